"""Schema + statistics + input scale -> tensors; the only place where a number is transformed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from scalarlens.errors import DataError, unknown_name
from scalarlens.table import cells
from scalarlens.table.batches import Batch
from scalarlens.table.columns import schema_cells
from scalarlens.table.schema import Schema
from scalarlens.table.statistics import MISSING_ID, UNSEEN_ID, TrainingStatistics, Vocabulary

InputScale = Literal["raw", "zscore"]


@dataclass
class CellCounts:
    """What the tensorizer met, by column: missing, unseen, out of range, infinite; and how many rows."""

    rows: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    unseen: dict[str, int] = field(default_factory=dict)
    out_of_range: dict[str, int] = field(default_factory=dict)
    infinite: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, column: str, count: int) -> None:
        if count:
            counter = getattr(self, kind)
            counter[column] = counter.get(column, 0) + count


class Tensorizer:
    """Reads the cells of a table as values and category ids, and applies the input scale.

    *Shape*: a table of B rows -> values `[B, N]` float64, category_ids `[B, C]` int64.

    >>> from scalarlens.table.schema import CategoricalColumn, NumericColumn
    >>> schema = Schema((NumericColumn("price"),), (CategoricalColumn("country"),), label="clicked")
    >>> train = pa.table({"price": [1.0, 5.0], "country": ["DE", "DE"]})
    >>> statistics = TrainingStatistics.fit([schema_cells(schema, train)])
    >>> values, ids = Tensorizer(schema, statistics, "raw").read(pa.table({"price": [9.0], "country": ["FR"]}))
    >>> values.tolist(), ids.tolist()
    ([[9.0]], [[1]])
    """

    def __init__(self, schema: Schema, statistics: TrainingStatistics, input_scale: InputScale) -> None:
        if input_scale not in get_args(InputScale):
            raise unknown_name("input scale", input_scale, get_args(InputScale))
        self.schema = schema
        self.statistics = statistics
        self.input_scale = input_scale

    @property
    def encoder_statistics(self) -> TrainingStatistics:
        """The training statistics in the scale that encoders see."""
        return self.statistics if self.input_scale == "raw" else self.statistics.standardized()

    def unscale(self, values: np.ndarray) -> np.ndarray:
        """Numbers in the encoder's scale back in serving units, `[N, ...]`."""
        if self.input_scale == "raw":
            return values
        shape = (-1, *[1] * (values.ndim - 1))
        std = np.maximum(self.statistics.std, 1e-12)
        return values * std.reshape(shape) + self.statistics.mean.reshape(shape)

    def read(self, table: pa.Table | pa.RecordBatch, counts: CellCounts | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Values in serving units and category ids. With `counts` (serving), infinite values clip and are counted."""
        values, texts = schema_cells(self.schema, table)
        ids = [self.category_ids(column, j) for j, column in enumerate(texts)]
        category_ids = np.stack(ids, axis=1) if ids else np.empty((len(values), 0), dtype=np.int64)
        if counts is not None:
            values = self._clip_and_count(values, category_ids, counts)
        return values, category_ids

    def category_ids(self, texts: pa.Array, column: int) -> np.ndarray:
        """Ids of one categorical column: 0 missing, 1 unseen, then by falling training count."""
        encoded = texts.dictionary_encode()
        lookup = self._lookups[column]
        known = [lookup.get(text, UNSEEN_ID) for text in encoded.dictionary.to_pylist()]
        codes = encoded.indices.fill_null(len(known)).to_numpy(zero_copy_only=False)
        return np.array([*known, MISSING_ID], dtype=np.int64)[codes]

    @cached_property
    def _lookups(self) -> list[dict[str, int]]:
        return [
            {text: index for index, text in enumerate(vocabulary.texts, Vocabulary.FIRST_ID)}
            for vocabulary in self.statistics.vocabularies
        ]

    def _clip_and_count(self, values: np.ndarray, category_ids: np.ndarray, counts: CellCounts) -> np.ndarray:
        low, high = self.statistics.low, self.statistics.high
        counts.rows += len(values)
        tallies: dict[str, np.ndarray] = {
            "missing": np.isnan(values).sum(0),
            "infinite": np.isinf(values).sum(0),
            "out_of_range": ((values < low) | (values > high)).sum(0),
        }
        for kind, tally in tallies.items():
            for column, count in zip(self.schema.numeric, tally.tolist(), strict=True):
                counts.add(kind, column.name, count)
        for kind, reserved in (("missing", MISSING_ID), ("unseen", UNSEEN_ID)):
            tally = (category_ids == reserved).sum(0)
            for category, count in zip(self.schema.categorical, tally.tolist(), strict=True):
                counts.add(kind, category.name, count)
        return np.where(np.isinf(values), np.where(values > 0, high, low), values)

    def scale(self, values: Tensor) -> Tensor:
        """Values in serving units -> values in the scale that encoders see."""
        if self.input_scale == "raw":
            return values
        mean, std = self._moments(values.device)
        return (values - mean) / std

    def _moments(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._moments_on:
            moments = (self.statistics.mean, np.maximum(self.statistics.std, 1e-12))
            mean, std = (torch.from_numpy(m).to(device) for m in moments)
            self._moments_on[device] = (mean, std)
        return self._moments_on[device]

    @cached_property
    def _moments_on(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def batch(self, values: np.ndarray, category_ids: np.ndarray, device: torch.device | str = "cpu") -> Batch:
        """What `read` gave, as the tensors that a model takes; the labels are unknown."""
        scaled = self.scale(torch.from_numpy(values).to(device))
        ids = torch.from_numpy(category_ids).to(device)
        return Batch(scaled, ids, torch.full((len(values),), torch.nan, device=device))


def rows_to_table(rows: Any, columns: Sequence[str]) -> pa.Table:
    """A table from what people hold: a list of dicts, Arrow, pandas, polars, or anything that exports Arrow."""
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, list | tuple):
        return pa.table({name: cells.from_objects(_cells_of(rows, name), name) for name in columns})
    if type(rows).__module__.partition(".")[0] == "pandas":
        return pa.Table.from_pandas(rows, preserve_index=False)
    if hasattr(rows, "__arrow_c_stream__"):
        return pa.table(rows)
    raise DataError(
        f"rows must be a list of dicts, an Arrow table, or a pandas or polars data frame; got {type(rows).__name__}"
    )


def _cells_of(rows: Sequence[Any], name: str) -> list[Any]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"row {number} must be a dict of column to value; got {type(row).__name__}")
        if name not in row:
            raise DataError(f"row {number} has no column {name!r}; give None for a missing value")
    return [row[name] for row in rows]
