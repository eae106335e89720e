"""The documentation that is read off the code is what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(generator: ModuleType) -> None:
    assert generator.stale() == []


def test_a_changed_picture_or_text_is_noticed(generator: ModuleType) -> None:
    text = '<polyline points="10.0,20.0 11.0,21.0"/>'
    assert generator.agrees(text, text.replace("10.0", "10.2"))
    assert not generator.agrees(text, text.replace("10.0", "12.0"))
    assert not generator.agrees(text, text.replace("polyline", "line"))


def test_tagged_notes_end_where_they_end(generator: ModuleType) -> None:
    code = '"""One.\n\nNOTE[DIFF] First\nsecond.\n\nNot this.\n"""\n#: NOTE[DIFF] Third\n#: fourth.\nX = 1\n'
    assert generator.notes_in(code) == ["First second.", "Third fourth."]
