"""Tables to packed splits: one streaming pass for statistics and types, one that writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalarlens.datasets.files import Table
from scalarlens.datasets.prepared import PreparedTable, refuse_foreign_folder, write_manifest
from scalarlens.errors import DataError, UsageError
from scalarlens.storage import replacing_folder
from scalarlens.table import cells
from scalarlens.table.batches import ColumnRange, SplitWriter
from scalarlens.table.schema import Schema
from scalarlens.table.statistics import StatisticsBuilder, TrainingStatistics
from scalarlens.table.stored import save_statistics
from scalarlens.table.tensorizer import Tensorizer, require_columns, schema_cells

#: shares of the random split
SHARES = {"train": 0.8, "valid": 0.1, "test": 0.1}


def prepare(schema: Schema, tables: Mapping[str, Table], out: str | Path, *, random_seed: int | None = None) -> PreparedTable:
    """Prepare the tables of the splits `train`, `valid`, `test`; with `random_seed`, `train` alone is divided."""
    out = Path(out)
    refuse_foreign_folder(out)
    for table in tables.values():
        require_columns(schema.columns, table.columns)
    if random_seed is None:
        source: Source = SplitTables(schema, tables)
    elif set(tables) == {"train"}:
        source = RandomSplit(schema, tables["train"], random_seed)
    else:
        raise UsageError("a random split divides one table; give --train alone, or the splits without --split")
    statistics, types = _first_pass(schema, source)
    with replacing_folder(out) as folder:
        (folder / "schema.toml").write_text(schema.to_toml(), encoding="utf-8")
        save_statistics(statistics, folder)
        splits = _second_pass(schema, source, statistics, types, folder)
        write_manifest(folder, schema, statistics, splits)
    return PreparedTable(out)


class Rows:
    """The cells of some rows: numbers, category texts, labels, group texts."""

    def __init__(self, values: np.ndarray, texts: list[pa.Array], labels: np.ndarray, groups: pa.Array | None) -> None:
        self.values, self.texts, self.labels, self.groups = values, texts, labels, groups

    @classmethod
    def of(cls, schema: Schema, batch: pa.RecordBatch) -> Rows:
        values, texts = schema_cells(schema, batch)
        for column, numbers in zip(schema.numeric, values.T, strict=True):
            infinite = np.isinf(numbers)
            if infinite.any():
                row, count = int(infinite.argmax()), int(infinite.sum())
                raise cells.BadCell(column.name, "an infinite value; name it in `missing`, or clean it", row, count)
        groups = cells.texts(batch.column(schema.group), schema.group) if schema.group else None
        return cls(values, texts, cells.labels(batch.column(schema.label), schema.label), groups)

    def take(self, keep: np.ndarray) -> Rows:
        mask = pa.array(keep)
        texts = [pc.filter(column, mask) for column in self.texts]
        groups = None if self.groups is None else pc.filter(self.groups, mask)
        return Rows(self.values[keep], texts, self.labels[keep], groups)


class Source:
    """Rows with the split that they belong to, in the order of the files; can be walked more than once."""

    splits: tuple[str, ...]

    def walk(self) -> Iterator[tuple[str, Rows]]:
        raise NotImplementedError


class SplitTables(Source):
    """One table per split."""

    def __init__(self, schema: Schema, tables: Mapping[str, Table]) -> None:
        self.splits = tuple(tables)
        self._schema, self._tables = schema, tables

    def walk(self) -> Iterator[tuple[str, Rows]]:
        for split, table in self._tables.items():
            for rows in _read(self._schema, table):
                yield split, rows


class RandomSplit(Source):
    """One table, each row dealt to a split by a seeded shuffle of exact shares."""

    splits = tuple(SHARES)

    def __init__(self, schema: Schema, table: Table, seed: int) -> None:
        self._schema, self._table = schema, table
        total = table.count_rows()
        sizes = [int(total * SHARES["valid"]), int(total * SHARES["test"])]
        self._dealt = np.repeat(np.arange(3, dtype=np.uint8), [total - sum(sizes), *sizes])
        np.random.default_rng(seed).shuffle(self._dealt)

    def walk(self) -> Iterator[tuple[str, Rows]]:
        start = 0
        for rows in _read(self._schema, self._table):
            dealt = self._dealt[start : start + len(rows.labels)]
            start += len(dealt)
            for index, split in enumerate(self.splits):
                yield split, rows.take(dealt == index)


def _read(schema: Schema, table: Table) -> Iterator[Rows]:
    done = 0
    for batch in table.batches(schema.columns):
        try:
            yield Rows.of(schema, batch)
        except cells.BadCell as bad:
            more = f" and {bad.count - 1} more near it" if bad.count > 1 else ""
            raise DataError(
                f"{table.path}: column {bad.column!r}, row {done + bad.row + 1}{more}: {bad.problem}"
            ) from bad
        done += batch.num_rows
    if done == 0:
        raise DataError(f"{table.path} has no rows")


def _first_pass(schema: Schema, source: Source) -> tuple[TrainingStatistics, dict[str, dict[str, list[str]]]]:
    """Training statistics from training rows alone; storage types from the rows of each split alone."""
    builder = StatisticsBuilder(
        len(schema.numeric), len(schema.categorical), [column.min_count for column in schema.categorical]
    )
    ranges = {split: [ColumnRange() for _ in schema.numeric] for split in source.splits}
    for split, rows in source.walk():
        for column, seen in zip(rows.values.T, ranges[split], strict=True):
            seen.update(column)
        if split == "train":
            builder.update(rows.values, rows.texts)
    statistics = builder.finish()
    ids = [ColumnRange(high=size).storage_type(floating=False) for size in statistics.vocabulary_sizes]
    types = {
        split: {
            "values": [column.storage_type(floating=True) for column in columns],
            "category_ids": ids,
            "labels": ["uint8"],
            **({"groups": ["int64"]} if schema.group else {}),
        }
        for split, columns in ranges.items()
    }
    return statistics, types


def _second_pass(
    schema: Schema,
    source: Source,
    statistics: TrainingStatistics,
    types: dict[str, dict[str, list[str]]],
    folder: Path,
) -> dict[str, dict[str, Any]]:
    tensorizer = Tensorizer(schema, statistics, "raw")
    writers = {split: SplitWriter(folder / split, types[split]) for split in source.splits}
    group_codes: dict[str, dict[str | None, int]] = {split: {} for split in source.splits}
    for split, rows in source.walk():
        ids = [tensorizer.category_ids(texts, j) for j, texts in enumerate(rows.texts)]
        arrays = {
            "values": rows.values,
            "category_ids": np.stack(ids, 1) if ids else np.empty((len(rows.labels), 0), np.int64),
            "labels": rows.labels[:, None],
        }
        if rows.groups is not None:
            arrays["groups"] = _code_groups(rows.groups, group_codes[split])
        writers[split].append(arrays)
    return {split: writer.finish() for split, writer in writers.items()}


def _code_groups(groups: pa.Array, codes: dict[str | None, int]) -> np.ndarray:
    """Number the groups in the order of their first row; a missing group is a group of its own."""
    encoded = groups.dictionary_encode(null_encoding="encode")
    known = [codes.setdefault(text, len(codes)) for text in encoded.dictionary.to_pylist()]
    return np.array(known, dtype=np.int64)[encoded.indices.to_numpy()][:, None]
