"""From chunks to the matrices of packed splits: rows dealt to shards, shards put in order, and appended.

The rows of a split are shuffled as a whole, without ever being in memory as a whole: each is dealt to a shard, and
each shard is shuffled when it is written. Both are a pure function of the seed, the split and the number of the row
in its split, so that nothing depends on how the rows were read, and the rows of one split not on another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scalarlens.datasets.ingest import Chunk, Progress
from scalarlens.datasets.merge import TextColumn
from scalarlens.datasets.parts import SPLITS
from scalarlens.datasets.spool import Arrays, Work, save_arrays
from scalarlens.errors import DataError
from scalarlens.storage import read_json, sha256_of, sha256_of_file, write_json
from scalarlens.table.packed import ROLES, ColumnRange, block_file

#: a shard holds about this many bytes of packed rows
SHARD_BYTES = 1 << 26
JOURNAL_FILE = "journal.json"


class Matrix(NamedTuple):
    """Columns of one role and one storage type in the order of the schema."""

    role: str
    storage: str
    columns: tuple[int, ...]

    @property
    def name(self) -> str:
        return block_file(self.role, self.storage)

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return len(self.columns) * np.dtype(self.storage).itemsize


@dataclass(frozen=True)
class PackedLayout:
    """The matrices of a split, its rows, and how these are dealt to shards; without a seed they keep their order."""

    split: str
    rows: int
    matrices: tuple[Matrix, ...]
    seed: int | None

    @cached_property
    def shards(self) -> int:
        return max(1, -(-self.rows * sum(matrix.width for matrix in self.matrices) // SHARD_BYTES))

    def shard_of(self, start: int, stop: int) -> np.ndarray:
        """The shard of the rows from `start` to `stop` of the split."""
        rows = np.arange(start, stop, dtype=np.uint64)
        if self.seed is None:
            return (rows * np.uint64(self.shards) // np.uint64(max(self.rows, 1))).astype(np.int64)
        upper = _mixed(rows, self._key) >> np.uint64(32)
        return (upper * np.uint64(self.shards) >> np.uint64(32)).astype(np.int64)

    def order_of(self, shard: int, rows: int) -> np.ndarray | slice:
        """The order in which the rows of a shard are written."""
        if self.seed is None:
            return slice(None)
        return self._generator(shard).permutation(rows)

    @cached_property
    def _key(self) -> np.uint64:
        return self._generator().integers(1 << 63, dtype=np.uint64)

    def _generator(self, *place: int) -> np.random.Generator:
        assert self.seed is not None
        return np.random.default_rng([self.seed, SPLITS.index(self.split), *place])


def _mixed(numbers: np.ndarray, key: np.uint64) -> np.ndarray:
    """Steele, Lea and Flood's SplitMix64: 64 bits that look random, for every number."""
    mixed = key + (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def layouts_of(
    chunks: Sequence[Chunk], categories: Sequence[TextColumn], grouped: bool, seed: int | None
) -> dict[str, PackedLayout]:
    """For each split the narrowest types that hold its own rows exactly."""
    ids = [ColumnRange(high=column.size).storage_type(floating=False) for column in categories]
    layouts = {}
    for split in SPLITS:
        here = [chunk for chunk in chunks if split in chunk.notes["splits"]]
        if not here:
            continue
        columns = zip(*(chunk.notes["ranges"][split] for chunk in here), strict=True)
        ranges = [ColumnRange.union(ColumnRange(**seen) for seen in column) for column in columns]
        storages = {
            "values": [column.storage_type(floating=True) for column in ranges],
            "category_ids": ids,
            "labels": ["uint8"],
            "groups": ["int64"] * grouped,
        }
        matrices = [
            Matrix(role, storage, tuple(j for j, other in enumerate(storages[role]) if other == storage))
            for role in ROLES
            for storage in dict.fromkeys(storages[role])
        ]
        rows = sum(stop - start for chunk in here for name, start, stop in chunk.splits if name == split)
        layouts[split] = PackedLayout(split, rows, tuple(matrices), seed)
    return layouts


class Packer:
    """Writes the splits in two steps: chunks become packed rows ordered by shard, then shard after shard is written."""

    def __init__(
        self,
        work: Work,
        chunks: Sequence[Chunk],
        layouts: Mapping[str, PackedLayout],
        categories: Sequence[TextColumn],
        groups: Mapping[str, TextColumn],
        progress: Progress,
    ) -> None:
        self._work, self._chunks, self._layouts = work, chunks, layouts
        self._categories, self._groups, self._progress = categories, groups, progress
        self._packed = [work.path(f"packed-{index:06d}") for index in range(len(chunks))]
        self._rows = sum(layout.rows for layout in layouts.values())

    def pack(self, pool: Executor) -> None:
        """Every chunk as packed rows, ordered by split and shard; what is done is not done again."""
        firsts = dict.fromkeys(self._layouts, 0)
        tasks = []
        for chunk, path in zip(self._chunks, self._packed, strict=True):
            tasks.append(partial(self._pack, chunk, path, dict(firsts)))
            for split, start, stop in chunk.splits:
                firsts[split] += stop - start
        done = 0
        for chunk, _ in zip(self._chunks, pool.map(_call, tasks), strict=True):
            done += chunk.notes["rows"]
            self._progress("packing rows", done, sum(entry.notes["rows"] for entry in self._chunks))

    def _pack(self, chunk: Chunk, path: Path, firsts: Mapping[str, int]) -> None:
        if path.exists():
            return
        arrays: dict[str, np.ndarray] = {}
        for split, start, stop in chunk.splits:
            layout = self._layouts[split]
            shards = layout.shard_of(firsts[split], firsts[split] + stop - start)
            order = np.argsort(shards, kind="stable")
            arrays[f"{split}.ends"] = np.searchsorted(shards[order], np.arange(layout.shards + 1))
            for matrix in layout.matrices:
                packed = np.empty((stop - start, len(matrix.columns)), _stored(matrix.storage))
                for place, column in enumerate(matrix.columns):
                    packed[:, place] = self._column(chunk, matrix.role, column, split, start, stop)[order]
                arrays[f"{split}.{matrix.name}"] = packed
        save_arrays(path, arrays)
        chunk.arrays.path.unlink(missing_ok=True)

    def _column(self, chunk: Chunk, role: str, column: int, split: str, start: int, stop: int) -> np.ndarray:
        if role == "values":
            return chunk.arrays.read(f"values.{column}", start, stop)
        if role == "labels":
            return chunk.arrays.read("labels", start, stop)
        if role == "groups":
            return self._groups[split].ids_of(chunk.arrays)[chunk.arrays.read(f"group.{split}.codes")]
        codes = chunk.arrays.read(f"category.{column}.codes", start, stop)
        return self._categories[column].ids_of(chunk.arrays)[codes]

    def write(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Append shard after shard to the files of each split; a journal says which are whole."""
        journal = self._work.path(JOURNAL_FILE)
        written = read_json(journal, DataError) if journal.exists() else {}
        packed = [Arrays(path) for path in self._packed]
        done = 0
        for split, layout in self._layouts.items():
            (folder / split).mkdir(parents=True, exist_ok=True)
            begun = written.get(split, {"shards": 0, "rows": 0})
            _cut_back(folder / split, layout, begun["rows"])
            for shard in range(begun["shards"], layout.shards):
                rows = _append(folder / split, layout, shard, [a for a in packed if f"{split}.ends" in a])
                begun = {"shards": shard + 1, "rows": begun["rows"] + rows}
                written[split] = begun
                write_json(journal, written)
                self._progress("writing rows", done + begun["rows"], self._rows)
            done += layout.rows
        return {split: describe_split(folder / split, layout) for split, layout in self._layouts.items()}


def _call(task: Any) -> None:
    task()


def _stored(storage: str) -> np.dtype[Any]:
    return np.dtype(storage).newbyteorder("<")


def _cut_back(folder: Path, layout: PackedLayout, rows: int) -> None:
    """Take off what was written behind the last whole shard."""
    for matrix in layout.matrices:
        with (folder / matrix.name).open("ab") as file:
            file.truncate(rows * matrix.width)


def _append(folder: Path, layout: PackedLayout, shard: int, packed: Sequence[Arrays]) -> int:
    """Write one shard behind what is written; one matrix of it at a time is in memory."""
    ends = [arrays.read(f"{layout.split}.ends", shard, shard + 2).tolist() for arrays in packed]
    rows = sum(stop - start for start, stop in ends)
    order = layout.order_of(shard, rows)
    for matrix in layout.matrices:
        name = f"{layout.split}.{matrix.name}"
        pieces = [arrays.read(name, start, stop) for arrays, (start, stop) in zip(packed, ends, strict=True)]
        content = np.concatenate(pieces)
        del pieces
        with (folder / matrix.name).open("ab") as file:
            file.write(np.ascontiguousarray(content[order]).data.cast("B") if content.size else b"")
            file.flush()
            os.fsync(file.fileno())
    return rows


def describe_split(folder: Path, layout: PackedLayout) -> dict[str, Any]:
    """What the manifest says of a split."""
    blocks = [
        {
            "role": matrix.role,
            "type": matrix.storage,
            "columns": list(matrix.columns),
            "sha256": sha256_of_file(folder / matrix.name),
        }
        for matrix in layout.matrices
    ]
    digest = sha256_of(*(f"{b['role']} {b['type']} {b['columns']} {b['sha256']}" for b in blocks))
    return {"rows": layout.rows, "blocks": blocks, "digest": digest}
