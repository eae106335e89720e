"""A table held against a schema: each problem with its column, its number of rows and the first of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalarlens.datasets.files import Table
from scalarlens.errors import DataError
from scalarlens.table.cells import BadCell, labels, not_numbers, numbers, plain, texts
from scalarlens.table.schema import Schema

Severity = Literal["error", "note"]


@dataclass(frozen=True)
class Problem:
    """An error, which training refuses, or a note on what is odd; row 1 is the first row of the table.

    >>> print(Problem("price", "'free' is not a number", count=3, first_row=7))
    error: 'price': 'free' is not a number (rows: 3, first: 7)
    """

    column: str | None
    problem: str
    count: int
    first_row: int | None
    severity: Severity = "error"

    def __str__(self) -> str:
        where = "" if self.column is None else f"{self.column!r}: "
        rows = "" if self.first_row is None else f" (rows: {self.count}, first: {self.first_row})"
        return f"{self.severity}: {where}{self.problem}{rows}"


def check_table(schema: Schema, table: Table) -> list[Problem]:
    """What is wrong or odd with a table, errors first; one pass over the rows of the schema's columns."""
    columns = {name: _column(schema, name) for name in schema.columns if name in table.columns}
    rows = 0
    for batch in table.batches(list(columns) or table.columns[:1]):
        for name, column in columns.items():
            column.add(batch.column(name), rows)
        rows += batch.num_rows
    if rows == 0:
        found = [Problem(None, "the table has no rows", 0, None)]
    else:
        found = [problem for column in columns.values() for problem in column.problems(rows)]
    first = 1 if rows else None
    absent = [name for name in schema.columns if name not in columns]
    extra = [name for name in table.columns if name not in schema.columns]
    found += [Problem(name, f"a missing column, {_role(schema, name)}", rows, first) for name in absent]
    found += [Problem(name, "an extra column, which is not read", rows, first, "note") for name in extra]
    return sorted(found, key=lambda problem: problem.severity != "error")


def _role(schema: Schema, name: str) -> str:
    roles = {schema.time: "the time", schema.group: "the group", schema.label: "the label"}
    roles |= dict.fromkeys((column.name for column in schema.categorical), "a categorical feature")
    roles |= dict.fromkeys((column.name for column in schema.numeric), "a numeric feature")
    return roles[name]


def _column(schema: Schema, name: str) -> _Column:
    if name == schema.label:
        return _LabelColumn(name)
    for number in schema.numeric:
        if number.name == name:
            return _NumericColumn(name, (*schema.missing, *number.missing))
    for category in schema.categorical:
        if category.name == name:
            return _TextColumn(name, (*schema.missing, *category.missing))
    return _TextColumn(name) if name == schema.group else _Column(name)


class _Column:
    """What one pass sees of a column of which nothing is asked but to exist."""

    def __init__(self, name: str, missing: Sequence[str | float] = ()) -> None:
        self.name, self.markers = name, missing
        self.missing = 0
        self.values: set[str | float] = set()
        self._found: dict[str, Problem] = {}

    def add(self, cells: pa.Array, done: int) -> None:
        """Look at the next rows, after `done` others."""

    def report(self, kind: str, problem: str, row: int, count: int) -> None:
        """Count rows with one kind of problem; the first of them stays the one that is shown."""
        known = self._found.get(kind, Problem(self.name, problem, 0, row + 1))
        self._found[kind] = replace(known, count=known.count + count)

    def report_type(self, error: DataError, done: int, count: int) -> None:
        self.report("type", str(error).removeprefix(f"column {self.name!r} "), done, count)

    def problems(self, rows: int) -> list[Problem]:
        found = sorted(self._found.values(), key=lambda problem: problem.first_row or 0)
        if self.missing == rows:
            found.append(Problem(self.name, "every cell is missing", rows, 1, "note"))
        elif len(self.values) == 1 and not self.missing and not found:
            found.append(Problem(self.name, f"constant, {self.values.pop()!r} in every row", rows, 1, "note"))
        return found

    def _keep(self, values: Iterable[str | float]) -> None:
        """Remember up to two different values: enough to tell a constant."""
        if len(self.values) < 2:
            self.values.update(values)


class _NumericColumn(_Column):
    """A column that must hold finite numbers or nothing."""

    def add(self, cells: pa.Array, done: int) -> None:
        cells = plain(cells)
        bad = not_numbers(cells, self.markers)
        if bad.any():
            row = int(bad.argmax())
            self.report("text", f"{cells[row].as_py()[:60]!r} is not a number", done + row, int(bad.sum()))
            cells = pc.if_else(pa.array(bad), pa.scalar(None, cells.type), cells)
        try:
            values = numbers(cells, self.name, self.markers)
        except DataError as error:
            self.report_type(error, done, len(cells))
            return
        infinite = np.isinf(values)
        if infinite.any():
            self.report("infinite", "an infinite value", done + int(infinite.argmax()), int(infinite.sum()))
        absent = np.isnan(values)
        self.missing += int(absent.sum()) - int(bad.sum())
        if not absent.all():
            self._keep((float(np.nanmin(values)), float(np.nanmax(values))))


class _TextColumn(_Column):
    """A column that must hold one category, or nothing, per row."""

    def add(self, cells: pa.Array, done: int) -> None:
        try:
            cells = texts(cells, self.name, [text for text in self.markers if isinstance(text, str)])
        except DataError as error:
            self.report_type(error, done, len(cells))
            return
        self.missing += cells.null_count
        self._keep(pc.unique(cells.drop_null())[:2].to_pylist())


class _LabelColumn(_Column):
    """A column that must hold 0 or 1 in every row."""

    def add(self, cells: pa.Array, done: int) -> None:
        try:
            self._keep(np.unique(labels(cells, self.name)).tolist())
        except BadCell as bad:
            self.report("label", bad.problem, done + bad.row, bad.count)
        except DataError as error:
            self.report_type(error, done, len(cells))
