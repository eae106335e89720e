"""How a table row becomes tensors: the same code in training and in serving.

Names are imported when they are first used: reading and preparing tables needs no PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalarlens.table.batches import Batch, PackedSplit, Shuffle
    from scalarlens.table.schema import CategoricalColumn, NumericColumn, Schema
    from scalarlens.table.statistics import TrainingStatistics
    from scalarlens.table.tensorizer import Tensorizer

_HOMES = {
    "Batch": "batches",
    "CategoricalColumn": "schema",
    "NumericColumn": "schema",
    "PackedSplit": "batches",
    "Schema": "schema",
    "Shuffle": "batches",
    "Tensorizer": "tensorizer",
    "TrainingStatistics": "statistics",
}

__all__ = [
    "Batch",
    "CategoricalColumn",
    "NumericColumn",
    "PackedSplit",
    "Schema",
    "Shuffle",
    "Tensorizer",
    "TrainingStatistics",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'scalarlens.table' has no attribute {name!r}")
    return getattr(importlib.import_module(f"scalarlens.table.{_HOMES[name]}"), name)
