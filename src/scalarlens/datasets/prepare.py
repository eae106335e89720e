"""Tables to packed splits, in bounded memory: read the text once, merge what was seen, deal rows to shards, write.

A preparation that was stopped continues where it was when the same command is given again, and ends in the same bytes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scalarlens.cluster import cores
from scalarlens.datasets.ingest import Chunk, Engine, Progress, ingest, read_here
from scalarlens.datasets.merge import TextColumn, merge_numbers, read_numbers
from scalarlens.datasets.pack import Packer, layouts_of
from scalarlens.datasets.parts import Part
from scalarlens.datasets.prepared import PreparedTable, refuse_foreign_folder, write_manifest
from scalarlens.datasets.spool import Work
from scalarlens.errors import DataError, ScalarLensError, UsageError, unknown_name
from scalarlens.storage import replacing_folder, sha256_of
from scalarlens.table.schema import Schema
from scalarlens.table.statistics import VocabularyStream, digest_of, stack_columns
from scalarlens.table.stored import write_statistics

#: a preparation needs about this much, whatever it prepares
LEAST_MEMORY = 800_000_000
MEMORY_LIMIT = 2_000_000_000
#: the share of the limit that the merge of one column may take
MERGE_SHARE = 48
#: part of the identity of a work folder; another version of the engine starts anew
WORK_FORMAT = 2
#: where the text of a table is read: here, or in tasks of Ray
ENGINES = ("local", "ray")


def prepare(
    schema: Schema,
    parts: Sequence[Part],
    out: str | Path,
    origin: Mapping[str, Any] | None = None,
    *,
    shuffle_seed: int | None = None,
    memory_limit: int = MEMORY_LIMIT,
    engine: str = "local",
    progress: Progress | None = None,
) -> PreparedTable:
    """Prepare tables whose rows know their split; the statistics are those of the training rows alone.

    With `shuffle_seed` the rows of each split are shuffled as a whole; without it they keep the order of the tables.
    The engine `ray` reads the text in tasks of Ray, which starts on this machine or joins the cluster that the
    environment variable RAY_ADDRESS names; all its machines reach the tables, and the folder that `out` is in, under
    the same paths. It gives the same bytes. The memory limit holds for each process.
    """
    refuse_foreign_folder(Path(out))
    out = Path(out).resolve()
    if memory_limit < LEAST_MEMORY:
        raise UsageError(f"preparation needs a memory limit of {LEAST_MEMORY:,} bytes or more; got {memory_limit:,}")
    for part in parts:
        part.table.require(schema.columns)
    if not any("train" in part.splits for part in parts):
        tables = ", ".join(str(part.table.path) for part in parts)
        raise DataError(f"{tables}: no row belongs to the train split, and statistics need training rows")
    with _pool() as pool:
        read_pieces = _engine(engine, pool)
        with Work(out) as work, _stopping_cleanly(work):
            work.claim(_identity(schema, parts, origin, shuffle_seed))
            run = _Preparation(schema, work, pool, read_pieces, memory_limit // MERGE_SHARE, progress or _silent)
            run.prepare(parts, out, origin, shuffle_seed)
            work.discard()
    return PreparedTable(out)


def parse_bytes(text: str, what: str = "a size") -> int:
    """A number of bytes from a text with a unit.

    >>> parse_bytes("2GB"), parse_bytes("1.5 GiB")
    (2000000000, 1610612736)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise UsageError(f"{what} is a number of bytes such as 2GB or 1500MB; got {text!r}")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def _engine(name: str, pool: Executor) -> Engine:
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    if name == "local":
        return partial(read_here, pool)
    # Imported late, because nothing else here has a use for it.
    from scalarlens.datasets.spread import RayTasks

    return RayTasks()


class _Preparation:
    """The stages of one preparation; each leaves files in the work folder and skips what it finds there."""

    def __init__(
        self, schema: Schema, work: Work, pool: Executor, read_pieces: Engine, budget: int, progress: Progress
    ) -> None:
        self.schema, self.work, self.pool = schema, work, pool
        self.read_pieces, self.budget, self.progress = read_pieces, budget, progress

    def prepare(self, parts: Sequence[Part], out: Path, origin: Mapping[str, Any] | None, seed: int | None) -> None:
        chunks = ingest(self.schema, parts, self.work, self.read_pieces, self.progress)
        numbers, categories, groups = self._merge(chunks)
        layouts = layouts_of(chunks, categories, self.schema.group is not None, seed)
        packer = Packer(self.work, chunks, layouts, categories, groups, self.progress)
        packer.pack(self.pool)
        table = self.work.path("table")
        splits = packer.write(table)
        (table / "schema.toml").write_text(self.schema.to_toml(), encoding="utf-8")
        rows = layouts["train"].rows
        statistics = {"rows": rows, "missing": rows - numbers.pop("present"), **numbers}
        write_statistics(table, statistics, _streams(categories))
        write_manifest(table, self.schema, digest_of(statistics, _streams(categories)), splits, origin)
        # Whoever stops it from here on makes the next run start anew.
        self.work.release()
        with replacing_folder(out) as folder:
            for entry in table.iterdir():
                entry.replace(folder / entry.name)

    def _merge(self, chunks: Sequence[Chunk]) -> tuple[dict[str, np.ndarray], list[TextColumn], dict[str, TextColumn]]:
        """Statistics of the numeric columns, and the numbering of the texts of every other."""
        files = [chunk.arrays for chunk in chunks]
        paths = [self.work.path(f"numeric.{j}") for j in range(len(self.schema.numeric))]
        categories = [
            TextColumn(f"category.{j}", files, self.work.folder, column.min_count)
            for j, column in enumerate(self.schema.categorical)
        ]
        splits = {split for chunk in chunks for split, _, _ in chunk.splits} if self.schema.group else set()
        groups = {split: TextColumn(f"group.{split}", files, self.work.folder) for split in sorted(splits)}
        tasks = [partial(merge_numbers, files, j, path, self.budget) for j, path in enumerate(paths)]
        tasks += [partial(column.merge, self.budget) for column in (*categories, *groups.values())]
        for done, _ in enumerate(self.pool.map(lambda task: task(), tasks), 1):
            self.progress("merging columns", done, len(tasks))
        return stack_columns([read_numbers(path) for path in paths]), categories, groups


def _streams(categories: Sequence[TextColumn]) -> Iterator[VocabularyStream]:
    return (column.vocabulary for column in categories)


def _silent(stage: str, done: int, rows: int | None) -> None:
    pass


@contextmanager
def _pool() -> Iterator[Executor]:
    pool = ThreadPoolExecutor(_threads())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _threads() -> int:
    """More threads than this would hold more pieces at once than the memory limit counts with."""
    return min(cores(), 4)


def _identity(schema: Schema, parts: Sequence[Part], origin: Mapping[str, Any] | None, shuffle_seed: int | None) -> str:
    """What makes two preparations the same: schema, files, splits, seed; the memory limit is not part of it."""
    known = [
        str(WORK_FORMAT),
        schema.digest(),
        json.dumps(dict(origin or {}), sort_keys=True, default=str),
        str(shuffle_seed),
    ]
    for part in parts:
        known += [part.dealt] if isinstance(part.dealt, str) else [str(len(part.dealt)), _digest_of(part.dealt)]
        for file in part.table.files:
            known.append(str(file.path.resolve()))
            if file.path.exists():
                found = file.path.stat()
                known.append(f"{found.st_size} {found.st_mtime_ns}")
    return sha256_of(*known)


def _digest_of(dealt: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(dealt).data).hexdigest()


@contextmanager
def _stopping_cleanly(work: Work) -> Iterator[None]:
    """Data that breaks its contract leaves nothing behind; any other stop leaves what the next run continues."""
    try:
        yield
    except DataError:
        work.discard()
        raise
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ScalarLensError(
            f"the disk of {work.folder.parent} is full; make room and give the same command again, which continues, "
            f"or remove {work.folder}"
        ) from error
