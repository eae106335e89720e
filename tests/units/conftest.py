"""Fixtures that several test files share."""

from __future__ import annotations

import pytest
from small_artifacts import Sealed, seal_trained


@pytest.fixture(scope="session")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sealed]:
    """The same training rows under both input scales, and `other` rows."""
    folder = tmp_path_factory.mktemp("sealed")
    return {
        "raw": seal_trained(folder / "raw", "raw", seed=1),
        "zscore": seal_trained(folder / "zscore", "zscore", seed=1),
        "other": seal_trained(folder / "other", "raw", seed=2),
    }
