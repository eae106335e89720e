"""How a table row becomes tensors: the same code in training and in serving."""

from scalarlens.table.batches import Batch, PackedSplit, Shuffle
from scalarlens.table.schema import CategoricalColumn, NumericColumn, Schema
from scalarlens.table.statistics import TrainingStatistics
from scalarlens.table.tensorizer import Tensorizer

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
