"""ScalarLens: numerical embeddings with stable coordinates and contextual responses, for click models.

Names are imported when they are first used, so that `import scalarlens` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalarlens.artifact import ModelArtifact, load
    from scalarlens.errors import ScalarLensError
    from scalarlens.model import CtrModel, ModelSpec
    from scalarlens.table import Schema, Tensorizer, TrainingStatistics
    from scalarlens.training import Recipe, fit

__version__ = "0.1.0"

_HOMES = {
    "CtrModel": "scalarlens.model",
    "ModelArtifact": "scalarlens.artifact",
    "ModelSpec": "scalarlens.model",
    "Recipe": "scalarlens.training",
    "ScalarLensError": "scalarlens.errors",
    "Schema": "scalarlens.table",
    "Tensorizer": "scalarlens.table",
    "TrainingStatistics": "scalarlens.table",
    "fit": "scalarlens.training",
    "load": "scalarlens.artifact",
}

__all__ = [
    "CtrModel",
    "ModelArtifact",
    "ModelSpec",
    "Recipe",
    "ScalarLensError",
    "Schema",
    "Tensorizer",
    "TrainingStatistics",
    "fit",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'scalarlens' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
