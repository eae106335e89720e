"""Shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Tensors here are tiny: threads that wait for each other cost more than they bring. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent
REAL_DATA = TESTS.parents[1] / "shared" / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Examples in docstrings are tests of the library; those of the tests themselves include broken ones."""
    items[:] = [item for item in items if not (isinstance(item, pytest.DoctestItem) and TESTS in item.path.parents)]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real tables; absent where nobody put them."""
    if not REAL_DATA.is_dir():
        pytest.skip(
            f"the real tables are not here: no folder {REAL_DATA.name} in a folder shared beside the repository"
        )
    return REAL_DATA
