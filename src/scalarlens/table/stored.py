"""TrainingStatistics and vocabularies on disk: two Arrow files, exact to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from scalarlens.errors import ArtifactError, ScalarLensError
from scalarlens.storage import read_arrow, write_arrow
from scalarlens.table.statistics import QUANTILE_LEVELS, TrainingStatistics, Vocabulary

STATISTICS_FILE = "statistics.arrow"
VOCABULARIES_FILE = "vocabularies.arrow"

_PER_FIELD = {
    "missing": pa.int64(),
    "low": pa.float64(),
    "high": pa.float64(),
    "mean": pa.float64(),
    "std": pa.float64(),
    "n_unique": pa.int64(),
    "decimals": pa.int64(),
    "decimals_standardized": pa.int64(),
}
_STATISTICS = pa.schema([*_PER_FIELD.items(), ("quantiles", pa.list_(pa.float64()))])
_VOCABULARIES = pa.schema([("field", pa.int32()), ("text", pa.string()), ("count", pa.int64())])
#: vocabulary rows that hold the count of missing and of rare cells instead of a category
_MISSING, _RARE = 0, 1


def save_statistics(statistics: TrainingStatistics, folder: Path) -> None:
    """Write both files; the number of training rows is not in them, the document beside them states it."""
    columns = {name: pa.array(getattr(statistics, name), kind) for name, kind in _PER_FIELD.items()}
    columns["quantiles"] = pa.array(list(statistics.quantiles), pa.list_(pa.float64()))
    write_arrow(folder / STATISTICS_FILE, pa.table(columns, schema=_STATISTICS))
    field, text, count = [], [], []
    for index, vocabulary in enumerate(statistics.vocabularies):
        field += [index] * vocabulary.size
        text += [None, None, *vocabulary.texts]
        count += [vocabulary.missing, vocabulary.rare, *vocabulary.counts.tolist()]
    write_arrow(folder / VOCABULARIES_FILE, pa.table([field, text, count], schema=_VOCABULARIES))


def load_statistics(folder: Path, rows: int, refuse: type[ScalarLensError] = ArtifactError) -> TrainingStatistics:
    """Read both files back; anything inconsistent is refused."""
    table = read_arrow(folder / STATISTICS_FILE, _STATISTICS, refuse)
    if any(table[name].null_count for name in table.column_names):
        raise refuse(f"{folder / STATISTICS_FILE} has an empty cell")
    arrays = {name: table[name].to_numpy() for name in _PER_FIELD}
    grid = [np.asarray(row, dtype=np.float64) for row in table["quantiles"].to_pylist()]
    if any(row.shape != (QUANTILE_LEVELS + 1,) for row in grid):
        raise refuse(f"{folder / STATISTICS_FILE}: each field needs {QUANTILE_LEVELS + 1} quantiles")
    quantiles = np.array(grid).reshape(-1, QUANTILE_LEVELS + 1)
    statistics = TrainingStatistics(
        rows=rows, **arrays, quantiles=quantiles, vocabularies=_load_vocabularies(folder / VOCABULARIES_FILE, refuse)
    )
    _check_ranges(statistics, folder / STATISTICS_FILE, refuse)
    return statistics


def _check_ranges(statistics: TrainingStatistics, path: Path, refuse: type[ScalarLensError]) -> None:
    moments = (statistics.low, statistics.high, statistics.mean, statistics.std, statistics.quantiles)
    if not all(np.isfinite(array).all() for array in moments):
        raise refuse(f"{path} holds a number that is not finite")
    ordered = (statistics.low <= statistics.high).all() and (np.diff(statistics.quantiles) >= 0).all()
    if not ordered or (statistics.std < 0).any():
        raise refuse(f"{path} holds a range or quantiles that are not in order")


def _load_vocabularies(path: Path, refuse: type[ScalarLensError]) -> tuple[Vocabulary, ...]:
    table = read_arrow(path, _VOCABULARIES, refuse)
    field, count = table["field"].to_numpy(), table["count"].to_numpy()
    texts = table["text"].to_pylist()
    starts = np.flatnonzero(np.diff(field, prepend=-1))
    if not np.array_equal(field[starts], np.arange(len(starts))) or (count < 0).any():
        raise refuse(f"{path}: fields must be numbered from 0 in order, with counts from 0")
    vocabularies: list[Vocabulary] = []
    for start, stop in zip(starts, [*starts[1:], len(field)], strict=True):
        head, kept = texts[start : start + 2], texts[start + 2 : stop]
        if head != [None, None] or None in kept or len(set(kept)) != len(kept):
            raise refuse(f"{path}: field {len(vocabularies)} is not a list of distinct categories")
        vocabularies.append(
            Vocabulary(tuple(kept), count[start + 2 : stop], int(count[start + _MISSING]), int(count[start + _RARE]))
        )
    return tuple(vocabularies)
