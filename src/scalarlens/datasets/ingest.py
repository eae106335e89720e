"""The one pass over the text of a table: every cell is read once, by the code that serves, into chunks on disk.

A chunk holds some consecutive rows of a part, ordered by split: numbers, labels, and categories as codes into its
own list of texts. Beside them stands what the training rows among them contribute to the statistics. Nothing that is
made of the chunks depends on where one ends and the next begins, so that pieces of a table may be read anywhere, in
any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from scalarlens.datasets.files import Table, TableFile
from scalarlens.datasets.parts import SPLITS, Part
from scalarlens.datasets.spool import Arrays, Work, save_arrays, text_arrays
from scalarlens.errors import DataError
from scalarlens.storage import read_json, write_json
from scalarlens.table import cells
from scalarlens.table.columns import number_cells, text_cells
from scalarlens.table.packed import ColumnRange
from scalarlens.table.schema import Schema

#: a chunk is closed at this many rows, or at this many bytes of cells
CHUNK_ROWS, CHUNK_BYTES = 1 << 17, 1 << 26
#: consecutive files of a part are read together until they have this many bytes
PIECE_BYTES = 1 << 27

#: called with a stage, the rows done and the rows to do, where these are known
Progress = Callable[[str, int, int | None], None]


class Chunk(NamedTuple):
    """Rows on disk, with what is known of them: their number, the rows of each split, the range of each column."""

    arrays: Arrays
    notes: dict[str, Any]

    @property
    def splits(self) -> Iterator[tuple[str, int, int]]:
        """Each split that has rows here, with the first of its rows and the first behind them."""
        for split, (start, stop) in self.notes["splits"].items():
            yield split, start, stop


@dataclass(frozen=True)
class Piece:
    """Some consecutive files of a part, which are read on their own: into numbered chunks, and a list of these."""

    schema: Schema
    part: Part
    folder: Path
    number: int

    @property
    def is_read(self) -> bool:
        return self._list.exists()

    def chunks(self) -> list[Chunk]:
        """What was read."""
        notes = read_json(self._list, DataError)["chunks"]
        return [Chunk(Arrays(self._path(index)), entry) for index, entry in enumerate(notes)]

    def read(self, pool: Executor, tell: Callable[[int], None]) -> None:
        """Read all rows; chunks that an earlier run left are not made again. `tell` learns of rows that are done."""
        chunks = self._found()
        tell(_rows_in(chunks))
        saving: Future[None] | None = None
        for raw in _raw_chunks(self.schema, self.part, _rows_in(chunks)):
            # Names are dropped as soon as they have served, so that two chunks are never in memory in full.
            if saving is not None:
                saving.result()
            arrays, notes = _read(self.schema, self.part, raw, pool)
            del raw
            chunk = Chunk(Arrays(self._path(len(chunks))), notes)
            saving = pool.submit(save_arrays, chunk.arrays.path, arrays, notes)
            del arrays
            chunks.append(chunk)
            pa.default_memory_pool().release_unused()
            tell(notes["rows"])
        if saving is not None:
            saving.result()
        write_json(self._list, {"chunks": [chunk.notes for chunk in chunks]})

    @property
    def _list(self) -> Path:
        return self.folder / f"piece-{self.number:06d}.json"

    def _path(self, index: int) -> Path:
        return self.folder / f"chunk-{self.number:06d}-{index:06d}"

    def _found(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        while (path := self._path(len(chunks))).exists():
            arrays = Arrays(path)
            chunks.append(Chunk(arrays, arrays.notes))
        return chunks


#: reads pieces, wherever and in whatever order, and tells of the rows that are done
Engine = Callable[[Sequence[Piece], Callable[[int], None]], None]


def read_here(pool: Executor, pieces: Sequence[Piece], tell: Callable[[int], None]) -> None:
    """The local engine: one piece after the other, the columns of a chunk side by side."""
    for piece in pieces:
        piece.read(pool, tell)


def ingest(schema: Schema, parts: Sequence[Part], work: Work, read_pieces: Engine, progress: Progress) -> list[Chunk]:
    """All rows as chunks, in their order; what an earlier run left is not read again."""
    cuts = [_cut_part(part) for part in parts]
    whole = enumerate(chain.from_iterable(cuts))
    pieces = [Piece(schema, part, work.folder, number) for number, part in whole]
    total, done = _rows_of(parts), 0

    def tell(rows: int) -> None:
        nonlocal done
        done += rows
        progress("reading rows", done, total)

    done += sum(_rows_in(piece.chunks()) for piece in pieces if piece.is_read)
    unread = [piece for piece in pieces if not piece.is_read]
    if unread:
        read_pieces(unread, tell)
    chunks: list[Chunk] = []
    left = iter(pieces)
    for part, cut in zip(parts, cuts, strict=True):
        found = [chunk for _ in cut for chunk in next(left).chunks()]
        if not found:
            raise DataError(f"{part.table.path} has no rows")
        chunks += found
    return chunks


def _rows_in(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.notes["rows"] for chunk in chunks)


def _rows_of(parts: Sequence[Part]) -> int | None:
    """How many rows there are, where that is known without reading them."""
    known = [None if isinstance(part.dealt, str) else len(part.dealt) for part in parts]
    return None if None in known else sum(rows for rows in known if rows is not None)


def _cut_part(part: Part) -> list[Part]:
    """A part as several, in its order; rows that were dealt to splits go with their files."""
    groups: list[list[TableFile]] = []
    size = PIECE_BYTES
    for file in part.table.files:
        if size >= PIECE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.path.stat().st_size if file.path.exists() else 0
    if len(groups) == 1:
        return [part]
    tables = [replace(part.table, files=tuple(group)) for group in groups]
    if isinstance(part.dealt, str):
        return [Part(table, part.dealt) for table in tables]
    ends = np.cumsum([table.count_rows() for table in tables[:-1]])
    return [Part(table, dealt) for table, dealt in zip(tables, np.split(part.dealt, ends), strict=True)]


class _Origin(NamedTuple):
    """Where rows of a chunk come from: a row of a file, and its place in the chunk."""

    file: Path
    row: int
    place: int


class _Raw(NamedTuple):
    start: int
    cells: pa.Table
    origins: list[_Origin]


def _raw_chunks(schema: Schema, part: Part, skipped: int) -> Iterator[_Raw]:
    """What is left to read, cut into chunks; there must be as many rows as were dealt to splits."""
    rows = skipped
    for cut, origins in _cut(part.table, schema.columns, skipped):
        start, rows = rows, rows + cut.num_rows
        yield _Raw(start, cut, origins)
        del cut
    if not isinstance(part.dealt, str) and rows != len(part.dealt):
        raise DataError(
            f"{part.table.path} has {rows} rows where {len(part.dealt)} were dealt to splits; "
            "it changed while it was read; prepare it again"
        )


def _cut(table: Table, columns: Sequence[str], skipped: int) -> Iterator[tuple[pa.Table, list[_Origin]]]:
    """The rows behind the first `skipped` ones, as tables of the size of a chunk."""
    waiting: list[pa.RecordBatch] = []
    origins: list[_Origin] = []
    rows = size = 0
    for file, seen, batch in _batches(table, columns):
        passed = min(skipped, batch.num_rows)
        skipped -= passed
        rest = batch.slice(passed)
        while rest.num_rows:
            # The files of a folder may differ in the types of their columns.
            if waiting and (rows >= CHUNK_ROWS or size >= CHUNK_BYTES or waiting[0].schema != rest.schema):
                yield pa.Table.from_batches(waiting), origins
                waiting, origins, rows, size = [], [], 0, 0
            piece = rest.slice(0, CHUNK_ROWS - rows)
            origins.append(_Origin(file, seen + batch.num_rows - rest.num_rows, rows))
            rest = rest.slice(piece.num_rows)
            waiting.append(piece)
            rows, size = rows + piece.num_rows, size + piece.nbytes
    if waiting:
        yield pa.Table.from_batches(waiting), origins


def _batches(table: Table, columns: Sequence[str]) -> Iterator[tuple[Path, int, pa.RecordBatch]]:
    """The batches of a table, with their file and the rows of it that came before."""
    for file in table.files:
        seen = 0
        for batch in replace(table, files=(file,)).batches(columns):
            yield file.path, seen, batch
            seen += batch.num_rows


class _Layout(NamedTuple):
    """The rows of a chunk ordered by split: `order` picks them (None = as they are), `splits` says where each ends."""

    order: np.ndarray | None
    splits: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, part: Part, start: int, rows: int) -> _Layout:
        if isinstance(part.dealt, str):
            return cls(None, {part.dealt: (0, rows)})
        codes = part.dealt[start : start + rows]
        if len(codes) < rows:
            raise DataError(f"{part.table.path} has more than the {len(part.dealt)} rows that were dealt to splits")
        order = np.argsort(codes, kind="stable")
        bounds = np.searchsorted(codes[order], np.arange(len(SPLITS) + 1)).tolist()
        splits = {split: (bounds[code], bounds[code + 1]) for code, split in enumerate(SPLITS)}
        return cls(order[: bounds[-1]], {split: place for split, place in splits.items() if place[0] < place[1]})

    def arrange(self, cells: np.ndarray) -> np.ndarray:
        return cells if self.order is None else cells[self.order]

    @property
    def train(self) -> slice:
        return slice(*self.splits.get("train", (0, 0)))


#: arrays by name, and the range of a numeric column in each split
_Read = tuple[dict[str, np.ndarray], dict[str, ColumnRange]]


def _read(schema: Schema, part: Part, raw: _Raw, pool: Executor) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the notes of one chunk; columns are read side by side."""
    layout = _Layout.of(part, raw.start, raw.cells.num_rows)
    tasks = [partial(_numbers, schema, raw.cells, layout, j) for j in range(len(schema.numeric))]
    tasks += [partial(_categories, schema, raw.cells, layout, j) for j in range(len(schema.categorical))]
    tasks += [partial(_labels, schema, raw.cells, layout)]
    tasks += [partial(_groups, schema, raw.cells, layout)] if schema.group else []
    try:
        results = list(pool.map(_call, tasks))
    except cells.BadCell as bad:
        more = f" and {bad.count - 1} more near it" if bad.count > 1 else ""
        file, row, place = next(origin for origin in reversed(raw.origins) if origin.place <= bad.row)
        row += bad.row - place + 1
        raise DataError(f"{file}: column {bad.column!r}, row {row}{more}: {bad.problem}") from bad
    except DataError as error:
        # Of a whole column, whose type all files of a chunk share.
        raise DataError(f"{raw.origins[0].file}: {error}") from error
    arrays = {name: array for found, _ in results for name, array in found.items()}
    ranges = {split: [asdict(found[split]) for _, found in results[: len(schema.numeric)]] for split in layout.splits}
    notes = {"rows": raw.cells.num_rows}
    return arrays, {**notes, "splits": {name: list(place) for name, place in layout.splits.items()}, "ranges": ranges}


def _call(task: Callable[[], _Read]) -> _Read:
    return task()


def _numbers(schema: Schema, table: pa.Table, layout: _Layout, j: int) -> _Read:
    name = schema.numeric[j].name
    values = number_cells(schema, table, schema.numeric[j])
    infinite = np.isinf(values)
    if infinite.any():
        row, count = int(infinite.argmax()), int(infinite.sum())
        raise cells.BadCell(name, "an infinite value; name it in `missing`, or clean it", row, count)
    values = layout.arrange(values)
    ranges = {}
    for split, place in layout.splits.items():
        ranges[split] = ColumnRange()
        ranges[split].update(values[slice(*place)])
    train = values[layout.train]
    distinct, counts = np.unique(train[~np.isnan(train)] + 0.0, return_counts=True)  # turns -0.0 into 0.0
    arrays = {f"values.{j}": values, f"distinct.{j}": distinct, f"counts.{j}": counts.astype(np.int32)}
    return arrays, ranges


def _categories(schema: Schema, table: pa.Table, layout: _Layout, j: int) -> _Read:
    texts = text_cells(schema, table, schema.categorical[j])
    return _encoded(f"category.{j}", texts, layout.order, layout.train), {}


def _groups(schema: Schema, table: pa.Table, layout: _Layout) -> _Read:
    """The groups of each split are counted and numbered by the rows of that split alone."""
    assert schema.group is not None
    texts = cells.texts(table.column(schema.group), schema.group)
    texts = texts if layout.order is None else texts.take(pa.array(layout.order))
    arrays: dict[str, np.ndarray] = {}
    for split, (start, stop) in layout.splits.items():
        arrays |= _encoded(f"group.{split}", texts.slice(start, stop - start), None, slice(None))
    return arrays, {}


def _labels(schema: Schema, table: pa.Table, layout: _Layout) -> _Read:
    labels = cells.labels(table.column(schema.label), schema.label).astype(np.uint8)
    return {"labels": layout.arrange(labels)}, {}


def _encoded(name: str, texts: pa.Array, order: np.ndarray | None, counted: slice) -> dict[str, np.ndarray]:
    """Texts as codes into their own list, the last code for missing ones, and how often each is counted."""
    encoded = texts.dictionary_encode()
    size = len(encoded.dictionary)
    codes = encoded.indices.fill_null(size).to_numpy()
    codes = codes if order is None else codes[order]
    return {
        f"{name}.codes": codes.astype(np.min_scalar_type(size)),
        f"{name}.counts": np.bincount(codes[counted], minlength=size + 1).astype(np.int32),
        **text_arrays(name, encoded.dictionary),
    }
