"""Tables in files: CSV, TSV, Parquet and Arrow, or a folder of them, streamed as Arrow record batches.

Row 1 is the first data row, in every message.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from scalarlens.errors import DataError

#: sizes of the blocks in which text is parsed, tried in turn: a row must fit into one block
BLOCK_BYTES = (1 << 22, 1 << 26)

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_ARROW = (".arrow", ".feather", ".ipc")
_KNOWN = ".csv or .tsv (with .gz, .zst or .bz2 behind it, if compressed), .parquet, .arrow, .feather or .ipc"
_NOT_TABLES = ("schema.toml", "_SUCCESS", "_metadata", "_common_metadata")
#: a line put behind the end of a text file: an open quote swallows it
_END = "\0end of file\0"


class TableFile(Protocol):
    """One file of a table: its columns, its rows and their number."""

    @property
    def path(self) -> Path: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]: ...

    def count_rows(self) -> int: ...


@dataclass(frozen=True)
class Table:
    """Rows in one file, or in several files with the same columns, read in the order of their names.

    Text files give every cell as a string, exactly as written; the other formats give their own types, which
    may differ between the files of a folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "clicks.csv")
    ...     _ = path.write_text("price,clicked\\n1.50,0\\n,1\\n")
    ...     table = open_table(path)
    ...     table.columns, table.count_rows(), [batch.to_pydict() for batch in table.batches(["price"])]
    (('price', 'clicked'), 2, [{'price': ['1.50', '']}])
    """

    path: Path
    columns: tuple[str, ...]
    files: tuple[TableFile, ...]

    def batches(self, columns: Sequence[str] | None = None, batch_rows: int = 65536) -> Iterator[pa.RecordBatch]:
        """The rows in order, at most `batch_rows` at a time, with the columns in the order asked for."""
        wanted = self.columns if columns is None else tuple(columns)
        self.require(wanted)
        return self._batches(wanted, batch_rows)

    def _batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        for file in self.files:
            for batch in file.batches(columns, batch_rows):
                for start in range(0, batch.num_rows, batch_rows):
                    yield batch.slice(start, batch_rows).select(list(columns))

    def count_rows(self) -> int:
        return sum(file.count_rows() for file in self.files)

    def require(self, columns: Sequence[str]) -> None:
        """Refuse columns that the table does not have."""
        absent = [name for name in columns if name not in self.columns]
        if absent:
            near = difflib.get_close_matches(absent[0], self.columns, n=1, cutoff=0.5)
            raise DataError(
                f"{self.path}: missing column{'s' * (len(absent) > 1)} {_names(absent)}; "
                f"the table has {_names(self.columns)}" + (f"; did you mean {near[0]!r}?" if near else "")
            )


def open_table(path: str | Path) -> Table:
    """The table in a file or folder; reads its columns, not its rows."""
    path = Path(path)
    with _reading(path):
        if path.is_dir():
            return _open_folder(path)
        if not path.exists():
            raise _absent(path)
        file = _open_file(path)
    return Table(path, file.columns, (file,))


def open_text(path: str | Path, delimiter: str, *, columns: Sequence[str] = (), content: bytes | None = None) -> Table:
    """The table in a text file, whatever its name.

    `columns` names those of a file that has neither header nor quotes; `content` is read in place of the file.
    """
    path = Path(path)
    with _reading(path):
        if content is None:
            _require_content(path)
        file = _unambiguous(_TextFile(path, delimiter, _codec(path), columns, content))
    return Table(path, file.columns, (file,))


def sha256_of_content(path: Path) -> str:
    """Digest of what a file holds, without the compression that its name tells of."""
    sha = hashlib.sha256()
    with _reading(path), pa.input_stream(path, compression=_codec(path)) as stream:
        while block := stream.read(1 << 20):
            sha.update(block)
    return sha.hexdigest()


def _open_folder(path: Path) -> Table:
    entries = sorted(entry for entry in path.iterdir() if not _is_aside(entry))
    if not entries:
        raise DataError(f"the folder {path} has no table in it; put files there that end in {_KNOWN}")
    for entry in entries:
        require_inside(entry, path)
    formats = {_format(entry) for entry in entries}
    if len(formats) > 1:
        raise DataError(f"the folder {path} mixes {_names(sorted(formats))}; a table is of one format")
    files = tuple(_open_file(entry) for entry in entries)
    for file in files[1:]:
        odd = sorted(set(file.columns) ^ set(files[0].columns))
        if odd:
            raise DataError(
                f"{file.path} and {files[0].path} differ in their columns: only one of them has {_names(odd)}"
            )
    return Table(path, files[0].columns, files)


def require_inside(entry: Path, folder: Path) -> None:
    """Refuse what a folder only links to: whoever fills a folder must not decide which other files are read."""
    if not entry.is_symlink():
        return
    if not entry.exists():
        raise DataError(f"{entry} is a link to {entry.readlink()}, which does not exist; remove it")
    if not entry.resolve().is_relative_to(folder.resolve()):
        raise DataError(
            f"{entry} is a link that leads out of its folder, to {entry.resolve()}; "
            "put the file itself there, or name it on its own"
        )


def _is_aside(entry: Path) -> bool:
    return entry.name.startswith(".") or entry.name in _NOT_TABLES or entry.suffix == ".json"


def _format(path: Path) -> str:
    """The ending that names the format, without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in _CODECS and suffixes[0] in _DELIMITERS:
        return suffixes[0]
    if suffixes and suffixes[-1] in (*_DELIMITERS, ".parquet", *_ARROW) and not path.is_dir():
        return ".arrow" if suffixes[-1] in _ARROW else suffixes[-1]
    what = "is a folder" if path.is_dir() else "is no table by its name"
    raise DataError(f"{path} {what}; tables are files that end in {_KNOWN}")


def _open_file(path: Path) -> TableFile:
    kind = _format(path)
    _require_content(path)
    if kind in _DELIMITERS:
        return _unambiguous(_TextFile(path, _DELIMITERS[kind], _codec(path)))
    return _unambiguous(_ParquetFile(path) if kind == ".parquet" else _ArrowFile(path))


def _codec(path: Path) -> str | None:
    return _CODECS.get(path.suffix.lower())


def _require_content(path: Path) -> None:
    if not path.exists():
        raise _absent(path)
    if not path.is_file():
        raise DataError(f"{path} is not a regular file; write the table to a file first")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes); a table has at least the names of its columns")


def _unambiguous(file: TableFile) -> TableFile:
    path = file.path
    twice = sorted({name for name in file.columns if file.columns.count(name) > 1})
    if twice:
        raise DataError(f"{path} has more than one column named {_names(twice)}; each name may occur once")
    if not file.columns:
        raise DataError(f"{path} has no columns")
    return file


def _absent(path: Path) -> DataError:
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.6)
    hint = f"did you mean {str(path.parent / near[0])!r}?" if near else f"give a file that ends in {_KNOWN}"
    return DataError(f"no file or folder {str(path)!r}; {hint}")


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:20])
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")


@contextmanager
def _reading(path: Path, what: str = "a readable file") -> Iterator[None]:
    """Turn what the operating system and Arrow say about one file into a sentence."""
    try:
        yield
    except OSError as error:
        problem = f"cannot be read: {error.strerror}" if error.strerror else f"is not {what}, or is cut short"
        raise DataError(f"{path} {problem}" + f": {_first_line(error)}" * (not error.strerror)) from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not {what}, or is damaged: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class _TextFile:
    """Delimited text with a header; a quoted cell may hold the delimiter, line breaks and doubled quotes.

    Where the names of the columns are given, there is no header, and a quote is a letter like any other. A
    blank line is no row, except in a file of one column, where it is an empty cell. Arrow reads the rows; where
    it refuses one, a slow second reading finds the row and says what is wrong with it.
    """

    def __init__(
        self,
        path: Path,
        delimiter: str,
        codec: str | None,
        columns: Sequence[str] = (),
        content: bytes | None = None,
    ) -> None:
        self.path, self._delimiter, self._codec = path, delimiter, codec
        self._given, self._content = tuple(columns), content
        self._n_rows: int | None = None
        with _reading(path), self._rows() as rows:
            try:
                self.columns = self._given or self._checked(next(rows))
            except csv.Error as error:
                raise DataError(f"{path} has a header that cannot be read: {error}") from error
            self._has_rows = self._any_row(rows)

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        return self._stream(columns)

    def count_rows(self) -> int:
        if self._n_rows is None:
            self._n_rows = self._count()
        return self._n_rows

    def _count(self) -> int:
        if self._given and len(self.columns) > 1:
            return self._count_lines()
        return sum(batch.num_rows for batch in self._stream(self.columns[-1:]))

    def _count_lines(self) -> int:
        """Rows of a file without quotes, unparsed: the ends of lines that are not blank."""
        rows, last = 0, b"\n"
        with _reading(self.path), self._stream_of_bytes() as stream:
            while block := stream.read(BLOCK_BYTES[0]):
                text = last + block
                if b"\r" in text or b"\n\n" in text:
                    ends = np.isin(np.frombuffer(text, np.uint8), (10, 13))
                    rows += int((ends[1:] & ~ends[:-1]).sum())
                else:
                    rows += block.count(b"\n")
                last = block[-1:]
        return rows + (last not in b"\r\n")

    def _stream(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        if not self._has_rows:
            return
        done, last_cell = 0, ""
        try:
            for block in self._blocks(columns):
                self._refuse_nul(block, done)
                done, last_cell = done + block.num_rows, block.column(self.columns[-1])[-1].as_py()
                yield block
        except pa.ArrowException as error:
            unknown = f"cannot be read after row {done}: {_first_line(error)}"
            raise DataError(f"{self.path} {self._find_fault() or unknown}") from error
        except OSError as error:
            raise DataError(f"{self.path} is cut short or damaged: {_first_line(error)}") from error
        # A quote left open is no error to Arrow: the rest of the file is then one cell.
        fault = self._find_fault() if any(mark in last_cell for mark in "\r\n") else None
        if fault is not None:
            raise DataError(f"{self.path} {fault}")

    def _blocks(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Parsed blocks without empty ones; where Arrow refuses small blocks, it goes on with large ones."""
        done = 0
        for block_bytes in BLOCK_BYTES:
            seen = 0
            try:
                for block in self._parse(columns, block_bytes):
                    fresh = block.slice(max(done - seen, 0))
                    seen += block.num_rows
                    if fresh.num_rows:
                        done = seen
                        yield fresh
                return
            except pa.ArrowException:
                if block_bytes == BLOCK_BYTES[-1]:
                    raise

    def _parse(self, columns: Sequence[str], block_bytes: int) -> Iterator[pa.RecordBatch]:
        wanted = list(dict.fromkeys((*columns, self.columns[-1])))
        with (
            self._stream_of_bytes() as stream,
            pa.csv.open_csv(
                stream,
                read_options=pa.csv.ReadOptions(block_size=block_bytes, column_names=self._given or None),
                parse_options=pa.csv.ParseOptions(
                    delimiter=self._delimiter,
                    quote_char=False if self._given else '"',
                    newlines_in_values=not self._given,
                    ignore_empty_lines=len(self.columns) > 1,
                ),
                convert_options=pa.csv.ConvertOptions(
                    column_types=dict.fromkeys(wanted, pa.string()),
                    include_columns=wanted,
                    strings_can_be_null=False,
                ),
            ) as reader,
        ):
            yield from reader

    @contextmanager
    def _rows(self) -> Iterator[Iterator[list[str]]]:
        """The rows as the standard library reads them; the last is `_END`, unless a quote is open there."""
        with (
            self._stream_of_bytes() as stream,
            io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="") as text,
        ):
            lines = itertools.chain(_lines(text), [_END])
            if self._given:
                yield csv.reader(lines, delimiter=self._delimiter, quoting=csv.QUOTE_NONE)
            else:
                yield csv.reader(lines, delimiter=self._delimiter)

    def _stream_of_bytes(self) -> pa.NativeFile:
        if self._content is not None:
            return pa.BufferReader(self._content)
        return pa.input_stream(self.path, compression=self._codec)

    def _checked(self, header: list[str]) -> tuple[str, ...]:
        if not header or header == [_END]:
            raise DataError(f"{self.path} starts with an empty line; the first line must name the columns")
        fault = _fault_of_cells(header)
        if fault is not None:
            raise DataError(f"{self.path}, in the names of its columns, {fault}")
        return tuple(header)

    def _any_row(self, rows: Iterator[list[str]]) -> bool:
        try:
            return next(row for row in rows if row or len(self.columns) == 1) != [_END]
        except csv.Error:
            return True

    def _refuse_nul(self, batch: pa.RecordBatch, done: int) -> None:
        for name, cells in zip(batch.schema.names, batch.columns, strict=True):
            data = cells.buffers()[2]
            if not data or np.frombuffer(data, np.uint8).all():
                continue
            place = pc.index(pc.match_substring(cells, "\0"), True).as_py()
            if place >= 0:
                raise DataError(f"{self.path}, in row {done + place + 1}, column {name!r}, {_NUL}")

    def _find_fault(self) -> str | None:
        """What is wrong with the first bad row; None where the standard library finds nothing wrong."""
        number = 0
        with _reading(self.path), self._rows() as rows:
            if not self._given:
                next(rows)
            try:
                for cells in rows:
                    if cells == [_END]:
                        return None
                    if cells or len(self.columns) == 1:
                        number += 1
                        fault = _fault_of_cells(cells) or self._fault_of_count(len(cells or [""]))
                        if fault is not None:
                            return f"in row {number} {fault}"
            except csv.Error as error:
                return f"in row {number + 1} cannot be read: {error}; is a quote never closed?"
        return None

    def _fault_of_count(self, count: int) -> str | None:
        wanted = len(self.columns)
        source = "the format" if self._given else "its header"
        cells = f"has {count} cell{'s' * (count > 1)}; {source} names {wanted} columns"
        return None if count == wanted else cells


def _lines(text: io.TextIOWrapper) -> Iterator[str]:
    for line in iter(lambda: text.readline(BLOCK_BYTES[-1]), ""):
        if len(line) == BLOCK_BYTES[-1]:
            raise csv.Error(f"its line has {len(line):,} characters or more")
        yield line


_NUL = "holds a NUL byte; save the table as UTF-8 text"


def _fault_of_cells(cells: Sequence[str]) -> str | None:
    text = "".join(cells)
    if text.endswith(_END):
        return "opens a quote that is never closed"
    if "\0" in text:
        return _NUL
    if not text.isascii() and any("\udc80" <= letter <= "\udcff" for letter in text):
        return "is not UTF-8; save the table as UTF-8 text"
    return None


class _ParquetFile:
    """A Parquet file, read group by group; pages that carry a checksum are verified."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            self.columns = tuple(file.schema_arrow.names)
            self._n_rows: int = file.metadata.num_rows

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        with self._open() as file:
            yield from _validated(self.path, file.iter_batches(batch_rows, columns=list(dict.fromkeys(columns))))

    def count_rows(self) -> int:
        return self._n_rows

    @contextmanager
    def _open(self) -> Iterator[pa.parquet.ParquetFile]:
        with (
            _reading(self.path, "a Parquet file"),
            pa.parquet.ParquetFile(self.path, page_checksum_verification=True) as file,
        ):
            yield file


class _ArrowFile:
    """An Arrow IPC file (Feather version 2), mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            self.columns = tuple(file.schema.names)

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        with self._open(columns) as file:
            yield from _validated(self.path, (file.get_batch(i) for i in range(file.num_record_batches)))

    def count_rows(self) -> int:
        with self._open(self.columns[:1]) as file:
            return sum(file.get_batch(i).num_rows for i in range(file.num_record_batches))

    @contextmanager
    def _open(self, columns: Sequence[str] = ()) -> Iterator[pa.ipc.RecordBatchFileReader]:
        places = [self.columns.index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=places or None)
        with (
            _reading(self.path, "an Arrow file (of the file format, not the stream format)"),
            pa.memory_map(str(self.path)) as source,
            pa.ipc.open_file(source, options=options) as reader,
        ):
            yield reader


def _validated(path: Path, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Refuse damage before it is used: offsets that point outside, text that is not UTF-8."""
    done = 0
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            batch.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is damaged after row {done}: {_first_line(error)}") from error
        done += batch.num_rows
        yield batch
