"""Whether every way of handing in rows ends in the same scores."""

from __future__ import annotations

import csv
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from scalarlens.artifact import SCORING_BATCH
from scalarlens.audits.base import Audit, Finding, audits
from scalarlens.audits.subject import Subject, largest_gap
from scalarlens.datasets.files import open_table
from scalarlens.errors import ScalarLensError
from scalarlens.metrics import sigmoid
from scalarlens.scoring import predict_file

#: paths that take a library of the same name
LIBRARIES = ("pandas", "polars")


@audits.register("scoring-parity")
class ScoringParity(Audit):
    """Dicts, data frames, files and the packed split give the probabilities of the Arrow table, bit for bit."""

    question = "does every scoring path give the same probabilities?"

    def examine(self, subject: Subject) -> Finding:
        expected = subject.artifact.predict(subject.rows)
        gaps: dict[str, float | str] = {}
        for name, score in PATHS.items():
            try:
                gaps[name] = needs(name, subject) or largest_gap(score(subject), expected)
            except ScalarLensError as error:
                gaps[name] = f"refused: {error}"
        missing = {name: lack for name in PATHS if (lack := needs(name, subject))}
        apart = [name for name, gap in gaps.items() if gap != 0.0 and name not in missing]
        reason = f"other scores, or none, from {', '.join(apart)}".replace("_", " ") if apart else ""
        # One piece of data has one origin; but a library that is absent hides a path.
        warnings = tuple(f"not compared: {lack}" for name, lack in missing.items() if name in LIBRARIES)
        return Finding(not apart, reason, {"paths": gaps, "compared": len(PATHS) - len(missing)}, warnings)


def needs(path: str, subject: Subject) -> str:
    """What this path lacks here, or nothing."""
    if path in LIBRARIES and importlib.util.find_spec(path) is None:
        return f"{path} is not installed"
    if path == "as_given" and subject.given is None:
        return "the data is no file of raw rows with one type per column"
    if path == "packed_split" and subject.packed is None:
        return "the data is no prepared folder"
    return ""


def _dicts(subject: Subject) -> np.ndarray:
    return subject.artifact.predict(subject.rows.to_pylist())


def _pandas(subject: Subject) -> np.ndarray:
    return subject.artifact.predict(subject.rows.to_pandas())


def _polars(subject: Subject) -> np.ndarray:
    import polars

    return subject.artifact.predict(polars.from_arrow(subject.rows))


def _as_given(subject: Subject) -> np.ndarray:
    return subject.artifact.predict(subject.given)


def _packed_split(subject: Subject) -> np.ndarray:
    assert subject.packed is not None
    packed = subject.packed.to(subject.device)
    return sigmoid(subject.artifact.model.score(packed.batches(SCORING_BATCH)))


def _through_file(suffix: str) -> Callable[[Subject], np.ndarray]:
    """Written as a file of one kind, scored into a file of the same kind, and read back."""

    def score(subject: Subject) -> np.ndarray:
        with tempfile.TemporaryDirectory() as folder:
            rows, out = Path(folder, f"rows{suffix}"), Path(folder, f"scores{suffix}")
            write_rows(subject.rows, rows)
            predict_file(subject.artifact, open_table(rows), out)
            parts = [batch.column(0).to_numpy(zero_copy_only=False) for batch in open_table(out).batches()]
        return np.concatenate(parts).astype(np.float64)

    return score


def write_rows(rows: pa.Table, path: Path) -> None:
    """A file of these rows, in the kind that its name says."""
    if path.suffix == ".parquet":
        pa.parquet.write_table(rows, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, rows.schema) as writer:
            writer.write_table(rows)
    else:
        # Python writes a number with every digit that it has, and quotes what needs quotes.
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(rows.column_names)
            writer.writerows(_cells(rows))


def _cells(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in rows.columns), strict=True)


#: every path by which rows can be scored, beside the Arrow table that all are held against
PATHS: dict[str, Callable[[Subject], np.ndarray]] = {
    "dicts": _dicts,
    "pandas": _pandas,
    "polars": _polars,
    "csv_file": _through_file(".csv"),
    "parquet_file": _through_file(".parquet"),
    "arrow_file": _through_file(".arrow"),
    "as_given": _as_given,
    "packed_split": _packed_split,
}
