# `make demo` and `make test` do all of their set-up themselves, in .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test test-slow check format docs clean

demo: .venv/core
	$(BIN)/scalarlens demo --out demo

test: check
	$(BIN)/python -m pytest -n 2 --doctest-modules src tests -m "not slow"

test-slow: .venv/dev
	$(BIN)/python -m pytest tests -m slow

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/dev
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

.venv/core: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

.venv/dev: .venv/core
	$(PIP) --editable '.[dev]'
	touch $@
