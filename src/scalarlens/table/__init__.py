"""How a table row becomes tensors: the same code in training and in serving."""

from scalarlens.table.statistics import TrainingStatistics

__all__ = [
    "CategoricalColumn",
    "NumericColumn",
    "PackedSplit",
    "Schema",
    "Tensorizer",
    "TrainingStatistics",
]
