"""A table held against its schema: every problem, its number of rows and the first row, against a plain loop."""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalarlens.datasets import check
from scalarlens.datasets.check import Problem, check_table
from scalarlens.datasets.files import Table, open_table
from scalarlens.table.cells import numbers
from scalarlens.table.schema import CategoricalColumn, NumericColumn, Schema

few_examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)
SCHEMA = Schema(
    numeric=(NumericColumn("price", missing=("?", -1)), NumericColumn("age")),
    categorical=(CategoricalColumn("city"),),
    label="clicked",
    group="user",
    time="day",
    missing=("NA",),
)
GOOD: dict[str, list[Any]] = {
    "price": ["1.5", "?", "1e30", "NA", "", "-1"],
    "age": [3, 16_777_217, 5, None, 7, 8],
    "city": ["Rome", "Oslo", "", "Rome", "seen once", "NA"],
    "clicked": [0, 1, 0, 1, 0, 1],
    "user": [1, 1, 2, 2, 3, 3],
    "day": [datetime.date(2024, 1, 31)] * 6,
}


def write(path: Path, table: dict[str, list[Any]]) -> Table:
    """As typed Parquet, or as CSV where every cell is text and a missing one is empty."""
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.table(table), path)
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(table), *zip(*table.values(), strict=True)])
    return open_table(path)


@pytest.fixture(params=["t.csv", "t.parquet"])
def problems_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[Problem]]:
    """The problems of the good table after some of its columns were replaced; None takes a column away."""

    def problems(**changes: list[Any] | None) -> list[Problem]:
        table = {name: cells for name, cells in (GOOD | changes).items() if cells is not None}
        return check_table(SCHEMA, write(tmp_path / request.param, table))

    return problems


Check = Callable[..., list[Problem]]


def test_a_good_table_has_no_problem(problems_of: Check) -> None:
    assert problems_of() == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"price": ["1", "x", "2", "y", "", "x"]}, Problem("price", "'x' is not a number", 3, 2)),
        ({"price": ["1", "2", "inf", "3", "-inf", "4"]}, Problem("price", "an infinite value", 2, 3)),
        ({"age": [1.0, 2.0, 3.0, 4.0, 5.0, math.inf]}, Problem("age", "an infinite value", 1, 6)),
        ({"clicked": [0, 1, 0, 2, 0, 3]}, Problem("clicked", "the label '2' is neither 0 nor 1", 2, 4)),
        ({"clicked": [0, 1, 0, 1, None, 1]}, Problem("clicked", "the label is missing", 1, 5)),
        ({"price": None}, Problem("price", "a missing column, a numeric feature", 6, 1)),
        ({"city": None}, Problem("city", "a missing column, a categorical feature", 6, 1)),
        ({"clicked": None}, Problem("clicked", "a missing column, the label", 6, 1)),
        ({"user": None}, Problem("user", "a missing column, the group", 6, 1)),
        ({"day": None}, Problem("day", "a missing column, the time", 6, 1)),
        ({"color": ["x"] * 6}, Problem("color", "an extra column, which is not read", 6, 1, "note")),
        ({"price": ["?", "NA", "", "-1", "", "?"]}, Problem("price", "every cell is missing", 6, 1, "note")),
        ({"age": [None] * 6}, Problem("age", "every cell is missing", 6, 1, "note")),
        ({"city": ["", "NA"] * 3}, Problem("city", "every cell is missing", 6, 1, "note")),
        ({"age": [5] * 6}, Problem("age", "constant, 5.0 in every row", 6, 1, "note")),
        ({"city": ["x"] * 6}, Problem("city", "constant, 'x' in every row", 6, 1, "note")),
        ({"clicked": [0] * 6}, Problem("clicked", "constant, 0.0 in every row", 6, 1, "note")),
    ],
    ids=lambda value: value.problem if isinstance(value, Problem) else "-".join(value),
)
def test_each_problem(problems_of: Check, changes: dict[str, Any], problem: Problem) -> None:
    assert problems_of(**changes) == [problem]


def test_one_value_with_gaps_is_no_constant(problems_of: Check) -> None:
    assert problems_of(age=[5, None, 5, 5, 5, 5], city=["x", "", "x", "x", "x", "x"]) == []


def test_a_column_may_have_several_problems_and_errors_stand_first(problems_of: Check) -> None:
    found = problems_of(extra=["x"] * 6, city=["x"] * 6, price=["inf", "x", "1", "2", "y", "inf"], user=None)
    assert [str(problem) for problem in found] == [
        "error: 'price': an infinite value (rows: 2, first: 1)",
        "error: 'price': 'x' is not a number (rows: 2, first: 2)",
        "error: 'user': a missing column, the group (rows: 6, first: 1)",
        "note: 'city': constant, 'x' in every row (rows: 6, first: 1)",
        "note: 'extra': an extra column, which is not read (rows: 6, first: 1)",
    ]


def test_an_empty_table_is_an_error(problems_of: Check) -> None:
    found = problems_of(**{name: [] for name in GOOD})
    assert found == [Problem(None, "the table has no rows", 0, None)]
    assert str(found[0]) == "error: the table has no rows"


def test_a_table_that_shares_no_column(tmp_path: Path) -> None:
    found = check_table(SCHEMA, write(tmp_path / "t.csv", {"x": [1, 2]}))
    assert [problem.column for problem in found] == [*SCHEMA.columns, "x"]
    assert {problem.count for problem in found} == {2}


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([datetime.date(2024, 1, 31)] * 6, "holds date32[day], which is not a number"),
        ([[1.0]] * 6, "holds list<"),
        ([b"1"] * 6, "holds binary"),
    ],
    ids=["date", "list", "binary"],
)
def test_types_that_are_no_numbers(tmp_path: Path, cells: list[Any], said: str) -> None:
    (problem,) = check_table(SCHEMA, write(tmp_path / "t.parquet", GOOD | {"age": cells}))
    assert problem.problem.startswith(said)
    assert (problem.column, problem.count, problem.first_row, problem.severity) == ("age", 6, 1, "error")


def test_types_that_are_no_category_and_no_label(tmp_path: Path) -> None:
    table = GOOD | {"city": [["x"]] * 6, "user": [["x"]] * 6, "clicked": [datetime.date(2024, 1, 31)] * 6}
    found = check_table(SCHEMA, write(tmp_path / "t.parquet", table))
    assert {problem.column for problem in found} == {"city", "user", "clicked"}
    assert all(problem.problem.startswith("holds ") and problem.count == 6 for problem in found)


def test_ids_and_huge_numbers_are_no_problem(problems_of: Check) -> None:
    assert problems_of(age=[2**53 + 1, 2**24 + 1, 10**15, -1, 0, 1], user=[2**53 + row for row in range(6)]) == []


# counts and first rows, over batches


def expected_of_numbers(cells: list[str]) -> dict[str, tuple[int, int]]:
    """Each problem of a numeric column with its number of rows and its first row, from a plain loop."""
    found: dict[str, list[int]] = {"not a number": [], "infinite": []}
    for row, cell in enumerate(cells, 1):
        try:
            value = float(cell) if cell else math.nan
        except ValueError:
            found["not a number"].append(row)
        else:
            if math.isinf(value):
                found["infinite"].append(row)
    return {kind: (len(rows), rows[0]) for kind, rows in found.items() if rows}


def check_rows(check_of: Callable[[Schema, Table], list[Problem]], cells: list[str], folder: Path) -> None:
    """The cells come in batches of three rows, one from each file of a folder."""
    schema = Schema((NumericColumn("a"),), (), label="y")
    for start in range(0, len(cells), 3):
        part = cells[start : start + 3]
        write(folder / f"{start:03d}.parquet", {"a": part, "y": [1, 0, 1][: len(part)]})
    found = check_of(schema, open_table(folder))
    errors = {problem.problem: problem for problem in found if problem.severity == "error"}
    said = {kind: (p.count, p.first_row) for text, p in errors.items() for kind in KINDS if kind in text}
    assert said == expected_of_numbers(cells)


KINDS = ("not a number", "infinite")
MANY = ["1", "", "inf", "2", "x", "z", "", "7", "x", "-inf", "y", "9", "1", "inf"]


@few_examples
@given(st.lists(st.sampled_from(["1", "", "2.5", "inf", "-inf", "x", "12a"]), min_size=1))
def test_counts_and_first_rows(tmp_path_factory: pytest.TempPathFactory, cells: list[str]) -> None:
    check_rows(check_table, cells, tmp_path_factory.mktemp("rows"))


def test_wrong_counts_and_rows_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = check._Column.report
    check_rows(check_table, MANY, tmp_path)

    def counts_from_zero(self: Any, kind: str, problem: str, row: int, count: int) -> None:
        right(self, kind, problem, row - 1, count)

    def counts_batches(self: Any, kind: str, problem: str, row: int, count: int) -> None:
        right(self, kind, problem, row, 1)

    def shows_the_last(self: Any, kind: str, problem: str, row: int, count: int) -> None:
        count += self._found.pop(kind).count if kind in self._found else 0
        right(self, kind, problem, row, count)

    def merges_kinds(self: Any, kind: str, problem: str, row: int, count: int) -> None:
        right(self, "one kind", problem, row, count)

    for wrong in (counts_from_zero, counts_batches, shows_the_last, merges_kinds):
        monkeypatch.setattr(check._Column, "report", wrong)
        with pytest.raises(AssertionError):
            check_rows(check_table, MANY, tmp_path)


def test_rows_of_a_folder_are_counted_through_its_files(tmp_path: Path) -> None:
    schema = Schema((NumericColumn("a"),), (), label="y")
    write(tmp_path / "1.csv", {"a": ["1", "2"], "y": [0, 1]})
    write(tmp_path / "2.csv", {"a": ["3", "x"], "y": [0, 1]})
    assert check_table(schema, open_table(tmp_path)) == [Problem("a", "'x' is not a number", 1, 4)]


def test_what_passes_the_check_is_read_without_an_error(problems_of: Check) -> None:
    assert problems_of() == []
    for column in SCHEMA.numeric:
        cells = pa.array(GOOD[column.name])
        assert np.isfinite(numbers(cells, column.name, (*SCHEMA.missing, *column.missing))).any()
