"""The columns of a schema out of a table; training and serving both read them here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from scalarlens.errors import DataError
from scalarlens.table import cells
from scalarlens.table.schema import CategoricalColumn, NumericColumn, Schema


def schema_cells(schema: Schema, table: pa.Table | pa.RecordBatch) -> tuple[np.ndarray, list[pa.Array]]:
    """The cells of a schema's columns: float64 `[rows, N]` with NaN, and a string array with null per category."""
    require_columns(schema.features, table.schema.names)
    numeric = [number_cells(schema, table, column) for column in schema.numeric]
    categorical = [text_cells(schema, table, column) for column in schema.categorical]
    values = np.stack(numeric, axis=1) if numeric else np.empty((table.num_rows, 0))
    return values, categorical


def number_cells(schema: Schema, table: pa.Table | pa.RecordBatch, column: NumericColumn) -> np.ndarray:
    """The cells of one numeric column, NaN for a missing one."""
    return cells.numbers(table.column(column.name), column.name, (*schema.missing, *column.missing))


def text_cells(schema: Schema, table: pa.Table | pa.RecordBatch, column: CategoricalColumn) -> pa.Array:
    """The cells of one categorical column, null for a missing one."""
    return cells.texts(table.column(column.name), column.name, (*schema.missing, *column.missing))


def require_columns(wanted: Sequence[str], present: Sequence[str]) -> None:
    """Refuse a table that lacks a column or has one of them twice."""
    uses = Counter(present)
    absent = [name for name in wanted if name not in uses]
    if absent:
        raise DataError(
            f"missing column{'s' * (len(absent) > 1)} {', '.join(map(repr, absent))}; the table has "
            f"{', '.join(map(repr, present)) or 'no columns'}"
        )
    twice = [name for name in wanted if uses[name] > 1]
    if twice:
        raise DataError(f"column {twice[0]!r} occurs twice in the table; its cells are ambiguous")
