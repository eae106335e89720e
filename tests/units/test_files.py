"""Readers of tables: what was written comes back, and a hostile file is one sentence that names the row."""

from __future__ import annotations

import bz2
import csv
import gzip
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
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


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
    with pytest.raises(DataError, match=r"missing column 'price'; the table has 'a', 'b', 'c'$"):
        wide.batches(["a", "price"])
    with pytest.raises(DataError, match=r"missing columns 'aa', 'x'; .*; did you mean 'a'\?$"):
        wide.batches(["aa", "x"])


def check_long_rows(read: Callable[[Path], Rows]) -> None:
    """Rows longer than a small block, between shorter ones, come once each and in order."""
    rows = [[str(row), "x" * (200 if row % 10 == 7 else 3)] for row in range(60)]
    with TemporaryDirectory() as folder:
        assert read(write_csv(Path(folder, "t.csv"), ["a", "b"], rows)) == rows


@pytest.mark.usefixtures("small_blocks")
def test_a_row_may_be_longer_than_a_block() -> None:
    check_long_rows(lambda path: rows_of(open_table(path)))


@pytest.mark.usefixtures("small_blocks")
def test_a_second_attempt_that_starts_over_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def starts_over(file: Any, columns: Any) -> Iterator[pa.RecordBatch]:
        for block_bytes in files.BLOCK_BYTES:
            try:
                yield from (block for block in file._parse(columns, block_bytes) if block.num_rows)
                return
            except pa.ArrowInvalid:
                continue

    monkeypatch.setattr(files._TextFile, "_blocks", starts_over)
    with pytest.raises(AssertionError):
        check_long_rows(lambda path: rows_of(open_table(path)))


@pytest.mark.usefixtures("small_blocks")
def test_rows_stream_before_the_file_has_been_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "1,2\n" * 1000 + "3\n")
    batches = open_table(path).batches()
    assert next(batches).num_rows < 20
    with pytest.raises(DataError, match="in row 1001 has 1 cell; its header names 2 columns"):
        list(batches)


# which row is wrong


def check_names_the_row(read: Callable[[Path], Any], rows_before: Rows, blank_lines: int) -> None:
    """Row 1 is the first data row; blank lines and line breaks inside of cells do not count."""
    with TemporaryDirectory() as folder:
        path = write_csv(Path(folder, "t.csv"), ["a", "b"], rows_before)
        with path.open("a") as file:
            file.write("\n" * blank_lines + "1,2,3\n4,5\n")
        with pytest.raises(DataError, match=f"in row {len(rows_before) + 1} has 3 cells"):
            read(path)


@few_examples
@given(st.lists(st.lists(cells, min_size=2, max_size=2), max_size=8), st.integers(0, 3))
def test_a_ragged_row_is_named(rows_before: Rows, blank_lines: int) -> None:
    check_names_the_row(lambda path: rows_of(open_table(path)), rows_before, blank_lines)


def test_rows_counted_as_lines_are_caught() -> None:
    def counts_lines(path: Path) -> None:
        for number, line in enumerate(path.read_text().splitlines()):
            if line.count(",") != 1:
                raise DataError(f"in row {number} has {line.count(',') + 1} cells")

    check_names_the_row(counts_lines, [["1", "2"]], 0)
    for rows_before, blank_lines in (([["1", "x\ny"]], 0), ([["1", "2"]], 1)):
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check_names_the_row(counts_lines, rows_before, blank_lines)


# hostile text


@pytest.mark.parametrize(
    ("raw", "fragments"),
    [
        (b"", ["is empty (0 bytes)"]),
        (b"\n\n", ["starts with an empty line"]),
        (b"\na,b\n1,2\n", ["starts with an empty line"]),
        (b"a,b\n1,2\n3\n", ["in row 2 has 1 cell; its header names 2 columns"]),
        (b"a,b\n1,2,3\n", ["in row 1 has 3 cells; its header names 2 columns"]),
        (b"a,b,a\n1,2,3\n", ["more than one column named 'a'"]),
        (b"a,b\n1,2\n\n3,\xff\n", ["in row 2 is not UTF-8"]),
        (b"a,\xe9\n1,2\n", ["in the names of its columns, is not UTF-8"]),
        ("a,b\n1,2\n".encode("utf-16"), ["in the names of its columns", "save the table as UTF-8"]),
        (b"a,b\n1,2\n3,x\0y\n", ["in row 2, column 'b', holds a NUL byte"]),
        (b"a,b\0\n1,2\n", ["in the names of its columns, holds a NUL byte"]),
        (b'a,b\n1,2\n3,"x\n4,5\n', ["in row 2 opens a quote that is never closed"]),
        (b'a,b\n1,2\n3,"x\n4,""\n', ["in row 2 opens a quote that is never closed"]),
        (b'a,b\n1,2\n"3,x\n4,5\n', ["in row 2 opens a quote that is never closed"]),
        (b'"a,b\n1,2\n', ["in the names of its columns, opens a quote that is never closed"]),
    ],
)
def test_hostile_text_is_one_sentence(tmp_path: Path, raw: bytes, fragments: list[str]) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(raw)
    sentence = sentence_of(path)
    for fragment in (str(path), *fragments):
        assert fragment in sentence


def test_a_last_cell_of_several_lines_is_no_open_quote(tmp_path: Path) -> None:
    rows = [["1", "x"], ["2", 'several\n"lines"\n']]
    assert rows_of(open_table(write_csv(tmp_path / "t.csv", ["a", "b"], rows))) == rows


def test_the_last_column_is_watched_when_it_is_not_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('a,b\n1,2\n3,"x\n4,5\n')
    assert "row 2 opens a quote" in sentence_of(path, ["a"])


def test_nul_bytes_in_a_column_that_is_not_read_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"a,b,c\n1,x\0y,2\n")
    assert rows_of(open_table(path), columns=["a"]) == [["1"]]


@pytest.mark.usefixtures("small_blocks")
def test_a_row_beyond_every_block_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n" + "x" * (1 << 17) + ",2\n")
    assert "in row 2 cannot be read: its line has 65,536 characters or more" in sentence_of(path)
    path.write_text("a,b\n1,2\n3," + '"' + "4,5\n" * (1 << 16))
    assert "is a quote never closed?" in sentence_of(path)


@pytest.mark.parametrize("ending", ["csv.gz", "csv.bz2", "csv.zst"])
def test_compressed_text_cut_anywhere_is_refused(tmp_path: Path, ending: str) -> None:
    rng = np.random.default_rng(1)
    raw = b"a,b\n" + b"".join(b"%d,%d\n" % tuple(pair) for pair in rng.integers(0, 10**6, (500, 2)))
    whole = packed(ending, raw)
    path = tmp_path / f"t.{ending}"
    for cut in sorted({*rng.integers(1, len(whole), 20).tolist(), 1, 2, len(whole) - 1}):
        path.write_bytes(whole[:cut])
        assert "cut short" in sentence_of(path), cut
    path.write_bytes(whole)
    assert open_table(path).count_rows() == 500
    path.write_bytes(raw)
    assert str(path) in sentence_of(path)


# typed formats

TYPED = pa.table(
    {
        "price": pa.array([1.5, None, 3.0]),
        "id": pa.array([2**53 + 1, 2, 3]),
        "word": pa.array(["x", None, ""]).dictionary_encode(),
        "yes": pa.array([True, False, None]),
    }
)


def write_typed(path: Path, table: pa.Table = TYPED, rows_per_group: int = 2) -> Path:
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=rows_per_group)
    else:
        pa.feather.write_feather(table, str(path), chunksize=rows_per_group)
    return path


@pytest.mark.parametrize("ending", ["parquet", "arrow", "feather", "ipc"])
def test_typed_formats_keep_their_types(tmp_path: Path, ending: str) -> None:
    table = open_table(write_typed(tmp_path / f"t.{ending}"))
    assert table.columns == ("price", "id", "word", "yes")
    assert table.count_rows() == 3
    assert pa.Table.from_batches(table.batches()).to_pydict() == TYPED.to_pydict()
    assert next(table.batches()).schema.types == TYPED.schema.types
    assert rows_of(table, columns=["yes", "price"]) == [[True, 1.5], [False, None], [None, 3.0]]
    assert [batch.num_rows for batch in table.batches(batch_rows=1)] == [1, 1, 1]


@pytest.mark.parametrize("ending", ["parquet", "feather"])
def test_typed_files_cut_anywhere_are_refused(tmp_path: Path, ending: str) -> None:
    whole = write_typed(tmp_path / f"whole.{ending}").read_bytes()
    for cut in range(1, len(whole), 37):
        # A fresh file each time: an earlier one may still be mapped into memory.
        path = tmp_path / f"cut{cut}.{ending}"
        path.write_bytes(whole[:cut])
        assert str(path) in sentence_of(path)


@pytest.mark.parametrize("ending", ["parquet", "feather"])
def test_flipped_bits_never_give_another_kind_of_error(tmp_path: Path, ending: str) -> None:
    rng = np.random.default_rng(2)
    whole = write_typed(tmp_path / f"whole.{ending}", pa.concat_tables([TYPED] * 50), 40).read_bytes()
    said = []
    for attempt in range(150):
        raw = bytearray(whole)
        for place in rng.integers(0, len(raw), 3):
            raw[place] ^= 1 << rng.integers(0, 8)
        path = tmp_path / f"flipped{attempt}.{ending}"
        path.write_bytes(raw)
        try:
            rows_of(open_table(path))
        except DataError as error:
            said.append(str(error))
    assert len(said) > 20
    assert all(str(tmp_path) in sentence and "\n" not in sentence for sentence in said)


def test_text_in_a_typed_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    offsets, letters = pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"x\xff")
    cells = pa.Array.from_buffers(pa.string(), 2, [None, offsets, letters])
    path = write_typed(tmp_path / "t.parquet", pa.table({"a": cells}), 2)
    assert "is damaged after row 0" in sentence_of(path)


def test_columns_named_twice_are_refused_in_typed_files(tmp_path: Path) -> None:
    path = write_typed(tmp_path / "t.parquet", pa.table([[1], [2]], names=["a", "a"]))
    assert "more than one column named 'a'" in sentence_of(path)


def test_a_dot_in_a_name_is_only_a_dot(tmp_path: Path) -> None:
    table = open_table(write_typed(tmp_path / "t.parquet", pa.table({"user": [1], "user.age": [2]})))
    assert rows_of(table, columns=["user"]) == [[1]]
    assert rows_of(table, columns=["user.age"]) == [[2]]


# paths and folders


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "clicks.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match=r"no file or folder .*click.csv'; did you mean .*clicks.csv'\?"):
        open_table(tmp_path / "click.csv")
    with pytest.raises(DataError, match=r"no file or folder .*; give a file that ends in .csv"):
        open_table(tmp_path / "no" / "where")
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        open_table(tmp_path / ("x" * 5000))


@pytest.mark.parametrize("name", ["t.xlsx", "t", "t.gz", "t.parquet.gz", "t.txt"])
def test_an_unknown_ending_lists_the_known(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a\n1\n")
    with pytest.raises(DataError, match=r"is no table by its name; tables are files that end in \.csv or \.tsv"):
        open_table(tmp_path / name)


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name, value in (("part-2.csv", "3"), ("part-1.csv.gz", "2"), ("a.csv", "1")):
        raw = f"x,y\n{value},0\n".encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    for name in (".hidden.csv", "schema.toml", "manifest.json", "_SUCCESS", ".part-1.csv.crc"):
        (tmp_path / name).write_text("not, a, table")
    table = open_table(tmp_path)
    assert table.count_rows() == 3
    assert rows_of(table, columns=["x"]) == [["1"], ["2"], ["3"]]


def test_files_of_a_folder_may_order_their_columns_and_type_them_as_they_like(tmp_path: Path) -> None:
    write_typed(tmp_path / "1.parquet", pa.table({"a": [1], "b": ["x"]}))
    write_typed(tmp_path / "2.parquet", pa.table({"b": ["y"], "a": [2.5]}))
    assert rows_of(open_table(tmp_path)) == [[1, "x"], [2.5, "y"]]


def test_folders_that_are_no_table(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no table in it"):
        open_table(tmp_path)
    write_csv(tmp_path / "1.csv", ["a", "b"], [["1", "2"]])
    write_csv(tmp_path / "2.csv", ["a", "c"], [["1", "2"]])
    with pytest.raises(DataError, match=r"2\.csv and .*1\.csv differ in their columns: .* 'b', 'c'"):
        open_table(tmp_path)
    write_typed(tmp_path / "3.parquet")
    with pytest.raises(DataError, match=r"mixes '\.csv', '\.parquet'"):
        open_table(tmp_path)
    (tmp_path / "year=2024").mkdir()
    with pytest.raises(DataError, match="year=2024 is a folder"):
        open_table(tmp_path)
    (tmp_path / "year=2024").rmdir()
    (tmp_path / "readme.md").write_text("x")
    with pytest.raises(DataError, match=r"readme\.md is no table by its name"):
        open_table(tmp_path)


def test_an_error_in_a_folder_names_its_file(tmp_path: Path) -> None:
    write_csv(tmp_path / "1.csv", ["a", "b"], [["1", "2"]])
    (tmp_path / "2.csv").write_text("a,b\n1,2\n3\n")
    assert f"{tmp_path / '2.csv'} in row 2 has 1 cell" in sentence_of(tmp_path)
