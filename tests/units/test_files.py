"""Readers of tables: what was written comes back, and a hostile file is one sentence that names the row."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalarlens.datasets import files
from scalarlens.datasets.files import Table, open_table
from scalarlens.errors import DataError

few_examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)
Rows = list[list[str]]
#: cells that readers like to change, and whatever else UTF-8 can hold
cells = st.sampled_from(["", "NA", "null", "007", "1e5", " 1 ", "true", 'a"b', "a,b", "x\ny", "\t"]) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5
)


def rows_of(table: Table, **options: Any) -> Rows:
    """Every row as a list, in the order of `table.columns`."""
    columns = options.pop("columns", None)
    batches = table.batches(columns, **options)
    return [list(row.values()) for batch in batches for row in batch.to_pylist()]


def write_csv(path: Path, columns: list[str], rows: Rows, **options: Any) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows([columns, *rows])
    return path


def sentence_of(path: Path, columns: list[str] | None = None) -> str:
    """What the error says when the whole table is read; it must be one line."""
    with pytest.raises(DataError) as caught:
        for _ in open_table(path).batches(columns):
            pass
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    return sentence


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 64 bytes need a second attempt."""
    monkeypatch.setattr(files, "BLOCK_BYTES", (64, 1 << 16))


# text comes back as it was written


def check_verbatim(read: Callable[[Path], Rows], rows: Rows, **options: Any) -> None:
    with TemporaryDirectory() as folder:
        path = write_csv(Path(folder, "t.csv"), ["a", "b"], rows, **options)
        assert read(path) == rows


@few_examples
@given(
    st.lists(st.lists(cells, min_size=2, max_size=2)),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from(["\n", "\r\n"]),
)
def test_csv_cells_come_back_as_written(rows: Rows, quoting: int, end: str) -> None:
    check_verbatim(lambda path: rows_of(open_table(path)), rows, quoting=quoting, lineterminator=end)


def test_readers_that_change_cells_are_caught() -> None:
    def guesses_types(path: Path) -> Rows:
        return [list(row.values()) for row in pa.csv.read_csv(path).to_pylist()]

    def drops_empty_cells(path: Path) -> Rows:
        return [[cell or None for cell in row] for row in rows_of(open_table(path))]  # type: ignore[misc]

    def splits_lines(path: Path) -> Rows:
        return [line.split(",") for line in path.read_text().splitlines()[1:]]

    for wrong in (guesses_types, drops_empty_cells, splits_lines):
        with pytest.raises(AssertionError):
            check_verbatim(wrong, [["007", "x"], ["", "a,b"]])


def test_tabs_separate_tsv(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.tsv", ["a", "b"], [["1,5", "x\ty"], ["", '"']], delimiter="\t")
    assert rows_of(open_table(path)) == [["1,5", "x\ty"], ["", '"']]


@pytest.mark.parametrize("ending", ["csv.gz", "csv.bz2", "csv.zst", "CSV.GZ"])
def test_compressed_text(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"t.{ending}"
    path.write_bytes(packed(ending, b"a,b\n1,2\n3,4\n"))
    assert rows_of(open_table(path)) == [["1", "2"], ["3", "4"]]


def packed(ending: str, raw: bytes) -> bytes:
    if ending.lower().endswith("gz"):
        return gzip.compress(raw)
    if ending.endswith("bz2"):
        return bz2.compress(raw)
    sink = io.BytesIO()
    with pa.CompressedOutputStream(pa.PythonFile(sink, "w"), "zstd") as stream:
        stream.write(raw)
        stream.flush()
        stream.close()
        return sink.getvalue() if not sink.closed else b""


def test_gzip_members_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,2\n") + gzip.compress(b"3,4\n"))
    assert rows_of(open_table(path)) == [["1", "2"], ["3", "4"]]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbf"price, EUR",b\r\n1,2\r\n')
    assert open_table(path).columns == ("price, EUR", "b")
    assert rows_of(open_table(path)) == [["1", "2"]]


@pytest.mark.parametrize("raw", [b"a,b", b"a,b\n", b"a,b\r\n\r\n\n", b'"a",b\n'])
def test_a_header_alone_is_a_table_without_rows(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(raw)
    table = open_table(path)
    assert table.columns == ("a", "b")
    assert table.count_rows() == 0
    assert rows_of(table) == []


def test_blank_lines_are_rows_only_where_a_row_is_one_cell(tmp_path: Path) -> None:
    (tmp_path / "two.csv").write_text("a,b\n\n1,2\n\n3,4\n")
    (tmp_path / "one.csv").write_text("a\n1\n\n3\n")
    assert rows_of(open_table(tmp_path / "two.csv")) == [["1", "2"], ["3", "4"]]
    assert rows_of(open_table(tmp_path / "one.csv")) == [["1"], [""], ["3"]]


# columns, batches and blocks


@pytest.fixture
def wide(tmp_path: Path) -> Table:
    rows = [[str(row * 10 + column) for column in range(3)] for row in range(10)]
    return open_table(write_csv(tmp_path / "wide.csv", ["a", "b", "c"], rows))


def test_columns_come_in_the_order_asked_for(wide: Table) -> None:
    (batch,) = wide.batches(["c", "a"])
    assert batch.schema.names == ["c", "a"]
    assert batch.column("c").to_pylist() == [str(row * 10 + 2) for row in range(10)]


def test_batches_are_no_larger_than_asked(wide: Table) -> None:
    assert [batch.num_rows for batch in wide.batches(batch_rows=4)] == [4, 4, 2]
    assert rows_of(wide, batch_rows=3) == rows_of(wide)
    assert wide.count_rows() == 10


def test_a_missing_column_is_named_at_once(wide: Table) -> None:
    with pytest.raises(DataError, match="missing column 'prise'; the table has 'a', 'b', 'c'$"):
        wide.batches(["a", "prise"])
    with pytest.raises(DataError, match="missing columns 'x', 'aa'; .*; did you mean 'a'"):
        Table(wide.path, ("a", "b"), ()).batches(["x", "aa"][::-1][::-1]) if False else wide.require(["x", "aa"])
