"""Score a file of raw rows into a file of probabilities, streaming."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from scalarlens.artifact import SCORING_BATCH, ModelArtifact
from scalarlens.datasets.files import Table
from scalarlens.errors import DataError, UsageError
from scalarlens.storage import replacing
from scalarlens.table.cells import BadCell
from scalarlens.table.tensorizer import CellCounts

PROBABILITIES = pa.schema([("probability", pa.float64())])


def predict_file(artifact: ModelArtifact, table: Table, out: Path) -> CellCounts:
    """Write one column `probability`, in the order of the rows; the counts tell what was odd about them."""
    table.require(artifact.schema.features)
    if out.suffix not in (".parquet", ".arrow", ".csv"):
        raise UsageError(f"--out must end in .parquet, .arrow or .csv; got {out.name!r}")
    if not out.parent.is_dir():
        raise UsageError(f"the folder {out.parent} does not exist")
    counts = CellCounts()
    with replacing(out) as partial, _writer(partial, out.suffix) as writer:
        for batch in _regrouped(table, artifact.schema.features):
            try:
                probabilities = artifact.predict(batch, counts)
            except BadCell as bad:
                raise DataError(
                    f"{table.path}: column {bad.column!r}, row {counts.rows + bad.row + 1}: {bad.problem}"
                ) from bad
            writer.write_table(pa.table([probabilities], schema=PROBABILITIES))
    return counts


def _regrouped(table: Table, columns: tuple[str, ...]) -> Iterator[pa.Table]:
    """Batches of exactly the scoring size, so that scores do not depend on how a file is stored."""
    waiting: list[pa.RecordBatch] = []
    for batch in table.batches(columns):
        waiting.append(batch)
        while sum(part.num_rows for part in waiting) >= SCORING_BATCH:
            whole = pa.Table.from_batches(waiting)
            yield whole.slice(0, SCORING_BATCH)
            waiting = whole.slice(SCORING_BATCH).to_batches()
    if any(part.num_rows for part in waiting):
        yield pa.Table.from_batches(waiting)


def _writer(path: Path, suffix: str) -> pa.parquet.ParquetWriter | pa.ipc.RecordBatchFileWriter | pa.csv.CSVWriter:
    if suffix == ".parquet":
        return pa.parquet.ParquetWriter(path, PROBABILITIES)
    if suffix == ".arrow":
        return pa.ipc.new_file(path, PROBABILITIES)
    return pa.csv.CSVWriter(path, PROBABILITIES)
