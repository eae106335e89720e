"""Tables to packed splits: one streaming pass for statistics and types, one that writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalarlens.datasets.files import Table
from scalarlens.datasets.parts import SPLITS, Part
from scalarlens.datasets.prepared import PreparedTable, refuse_foreign_folder, write_manifest
from scalarlens.errors import DataError
from scalarlens.storage import replacing_folder
from scalarlens.table import cells
from scalarlens.table.batches import ColumnRange, SplitWriter
from scalarlens.table.schema import Schema
from scalarlens.table.statistics import StatisticsBuilder, TrainingStatistics
from scalarlens.table.stored import save_statistics
from scalarlens.table.tensorizer import Tensorizer, require_columns, schema_cells


def prepare(
    schema: Schema, parts: Sequence[Part], out: str | Path, origin: Mapping[str, Any] | None = None
) -> PreparedTable:
    """Prepare tables whose rows know their split; the statistics are those of the training rows alone."""
    out = Path(out)
    refuse_foreign_folder(out)
    for part in parts:
        require_columns(schema.columns, part.table.columns)
    statistics, types = _first_pass(schema, parts)
    with replacing_folder(out) as folder:
        (folder / "schema.toml").write_text(schema.to_toml(), encoding="utf-8")
        save_statistics(statistics, folder)
        splits = _second_pass(schema, parts, statistics, types, folder)
        write_manifest(folder, schema, statistics, splits, origin)
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


def _splits(parts: Sequence[Part]) -> tuple[str, ...]:
    present = {split for part in parts for split in part.splits}
    return tuple(split for split in SPLITS if split in present)


def _walk(schema: Schema, parts: Sequence[Part]) -> Iterator[tuple[str, Rows]]:
    """All rows with their split, in the order of the files; can be walked more than once."""
    for part in parts:
        start = 0
        for rows in _read(schema, part.table):
            stop = start + len(rows.labels)
            for split, mask in part.members(start, stop):
                yield split, rows.take(mask)
            start = stop


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


def _first_pass(schema: Schema, parts: Sequence[Part]) -> tuple[TrainingStatistics, dict[str, dict[str, list[str]]]]:
    """Training statistics from training rows alone; storage types from the rows of each split alone."""
    builder = StatisticsBuilder(
        len(schema.numeric), len(schema.categorical), [column.min_count for column in schema.categorical]
    )
    ranges = {split: [ColumnRange() for _ in schema.numeric] for split in _splits(parts)}
    for split, rows in _walk(schema, parts):
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
    parts: Sequence[Part],
    statistics: TrainingStatistics,
    types: dict[str, dict[str, list[str]]],
    folder: Path,
) -> dict[str, dict[str, Any]]:
    tensorizer = Tensorizer(schema, statistics, "raw")
    writers = {split: SplitWriter(folder / split, types[split]) for split in _splits(parts)}
    group_codes: dict[str, dict[str | None, int]] = {split: {} for split in _splits(parts)}
    for split, rows in _walk(schema, parts):
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
