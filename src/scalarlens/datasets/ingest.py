"""The one pass over the text of a table: every cell is read once, by the code that serves, into chunks on disk.

A chunk holds some consecutive rows of a part, ordered by split: numbers, labels, and categories as codes into its
own list of texts. Beside them stands what the training rows among them contribute to the statistics. Nothing that is
made of the chunks depends on where one ends and the next begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from scalarlens.datasets.files import Table
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
INGESTED_FILE = "ingested.json"

#: called with a stage, the rows done and the rows to do, where these are known
Progress = Callable[[str, int, int | None], None]


class Chunk(NamedTuple):
    """Rows on disk, with what is known of them: their place, the rows of each split, the range of each column."""

    arrays: Arrays
    notes: dict[str, Any]

    @property
    def splits(self) -> Iterator[tuple[str, int, int]]:
        """Each split that has rows here, with the first of its rows and the first behind them."""
        for split, (start, stop) in self.notes["splits"].items():
            yield split, start, stop


def ingest(schema: Schema, parts: Sequence[Part], work: Work, pool: Executor, progress: Progress) -> list[Chunk]:
    """All rows as chunks, in their order; chunks that an earlier run left are not read again."""
    done = work.path(INGESTED_FILE)
    if done.exists():
        notes = read_json(done, DataError)["chunks"]
        return [Chunk(Arrays(_path(work, index)), entry) for index, entry in enumerate(notes)]
    chunks = _found(work)
    total = _rows_of(parts)
    saving: Future[None] | None = None
    for raw in _raw_chunks(schema, parts, chunks):
        # Names are dropped as soon as they have served, so that two chunks are never in memory in full.
        if saving is not None:
            saving.result()
        arrays, notes = _read(schema, parts[raw.part], raw, pool)
        del raw
        chunk = Chunk(Arrays(_path(work, len(chunks))), notes)
        saving = pool.submit(save_arrays, chunk.arrays.path, arrays, notes)
        del arrays
        chunks.append(chunk)
        pa.default_memory_pool().release_unused()
        progress("reading rows", sum(entry.notes["rows"] for entry in chunks), total)
    if saving is not None:
        saving.result()
    write_json(done, {"chunks": [chunk.notes for chunk in chunks]})
    return chunks


def _path(work: Work, index: int) -> Path:
    return work.path(f"chunk-{index:06d}")


def _found(work: Work) -> list[Chunk]:
    chunks: list[Chunk] = []
    while (path := _path(work, len(chunks))).exists():
        arrays = Arrays(path)
        chunks.append(Chunk(arrays, arrays.notes))
    return chunks


def _rows_of(parts: Sequence[Part]) -> int | None:
    """How many rows there are, where that is known without reading them."""
    known = [None if isinstance(part.dealt, str) else len(part.dealt) for part in parts]
    return None if None in known else sum(rows for rows in known if rows is not None)


class _Raw(NamedTuple):
    part: int
    start: int
    cells: pa.Table


def _raw_chunks(schema: Schema, parts: Sequence[Part], done: Sequence[Chunk]) -> Iterator[_Raw]:
    """What is left to read, cut into chunks; each part must have rows, and as many as were dealt to splits."""
    for number, part in enumerate(parts):
        skipped = rows = sum(chunk.notes["rows"] for chunk in done if chunk.notes["part"] == number)
        if any(chunk.notes["part"] > number for chunk in done):
            continue
        for piece in _cut(part.table, schema.columns, skipped):
            start, rows = rows, rows + piece.num_rows
            yield _Raw(number, start, piece)
            del piece
        if rows == 0:
            raise DataError(f"{part.table.path} has no rows")
        if not isinstance(part.dealt, str) and rows != len(part.dealt):
            raise DataError(
                f"{part.table.path} has {rows} rows, and {len(part.dealt)} were dealt to splits; "
                "it changed while it was read; prepare it again"
            )


def _cut(table: Table, columns: Sequence[str], skipped: int) -> Iterator[pa.Table]:
    """The rows behind the first `skipped` ones, as tables of the size of a chunk."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in table.batches(columns):
        passed = min(skipped, batch.num_rows)
        skipped -= passed
        rest = batch.slice(passed)
        while rest.num_rows:
            # The files of a folder may differ in the types of their columns.
            if waiting and (rows >= CHUNK_ROWS or size >= CHUNK_BYTES or waiting[0].schema != rest.schema):
                yield pa.Table.from_batches(waiting)
                waiting, rows, size = [], 0, 0
            piece = rest.slice(0, CHUNK_ROWS - rows)
            rest = rest.slice(piece.num_rows)
            waiting.append(piece)
            rows, size = rows + piece.num_rows, size + piece.nbytes
    if waiting:
        yield pa.Table.from_batches(waiting)


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
        row = raw.start + bad.row + 1
        raise DataError(f"{part.table.path}: column {bad.column!r}, row {row}{more}: {bad.problem}") from bad
    arrays = {name: array for found, _ in results for name, array in found.items()}
    ranges = {split: [asdict(found[split]) for _, found in results[: len(schema.numeric)]] for split in layout.splits}
    notes = {"part": raw.part, "start": raw.start, "rows": raw.cells.num_rows}
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
