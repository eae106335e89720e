"""TrainingStatistics and vocabularies on disk: two Arrow files, exact to the bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from scalarlens.errors import ArtifactError, ScalarLensError
from scalarlens.storage import read_arrow, replacing, write_arrow
from scalarlens.table.statistics import (
    MAX_DECIMALS,
    QUANTILE_LEVELS,
    UNIQUE_LIMIT,
    TrainingStatistics,
    Vocabulary,
    VocabularyStream,
)

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
#: vocabularies are written in batches of this many rows
BATCH_ROWS = 1 << 16


def save_statistics(statistics: TrainingStatistics, folder: Path) -> None:
    """Write both files; the number of training rows is not in them, the document beside them states it."""
    write_statistics(folder, statistics.numbers, statistics.stream_vocabularies())


def write_statistics(folder: Path, numbers: Mapping[str, Any], vocabularies: Iterable[VocabularyStream]) -> None:
    """Both files from numbers by their names and vocabularies as streams."""
    columns = {name: pa.array(numbers[name], kind) for name, kind in _PER_FIELD.items()}
    columns["quantiles"] = pa.array(list(numbers["quantiles"]), pa.list_(pa.float64()))
    write_arrow(folder / STATISTICS_FILE, pa.table(columns, schema=_STATISTICS))
    with (
        replacing(folder / VOCABULARIES_FILE) as partial,
        partial.open("wb") as file,
        pa.ipc.new_file(file, _VOCABULARIES) as writer,
    ):
        for field, vocabulary in enumerate(vocabularies):
            for batch in _batches_of(field, vocabulary):
                writer.write_table(batch)


def _batches_of(field: int, vocabulary: VocabularyStream) -> Iterator[pa.Table]:
    """The rows of one vocabulary in batches of one size, however large the pieces are that they come in."""
    head = (pa.nulls(Vocabulary.FIRST_ID, pa.string()), np.array([vocabulary.missing, vocabulary.rare]))
    waiting = _VOCABULARIES.empty_table()
    for texts, counts in chain([head], vocabulary.pieces):
        piece = pa.table([pa.array([field] * len(texts), pa.int32()), texts, counts], schema=_VOCABULARIES)
        waiting = pa.concat_tables([waiting, piece])
        while waiting.num_rows >= BATCH_ROWS:
            yield waiting.slice(0, BATCH_ROWS).combine_chunks()
            waiting = waiting.slice(BATCH_ROWS)
    if waiting.num_rows:
        yield waiting.combine_chunks()


def load_statistics(folder: Path, rows: int, refuse: type[ScalarLensError] = ArtifactError) -> TrainingStatistics:
    """Read both files back; anything inconsistent is refused."""
    table = read_arrow(folder / STATISTICS_FILE, _STATISTICS, refuse)
    if any(table[name].null_count for name in table.column_names):
        raise refuse(f"{folder / STATISTICS_FILE} has an empty cell")
    arrays = {name: table[name].to_numpy().copy() for name in _PER_FIELD}
    grid = table["quantiles"].combine_chunks()
    if grid.flatten().null_count or (np.diff(grid.offsets.to_numpy()) != QUANTILE_LEVELS + 1).any():
        raise refuse(f"{folder / STATISTICS_FILE}: each field needs {QUANTILE_LEVELS + 1} quantiles")
    quantiles = grid.flatten().to_numpy().reshape(-1, QUANTILE_LEVELS + 1).copy()
    vocabularies = _load_vocabularies(folder / VOCABULARIES_FILE, rows, refuse)
    statistics = TrainingStatistics(rows=rows, **arrays, quantiles=quantiles, vocabularies=vocabularies)
    _check_ranges(statistics, folder / STATISTICS_FILE, refuse)
    return statistics


def _check_ranges(statistics: TrainingStatistics, path: Path, refuse: type[ScalarLensError]) -> None:
    moments = (statistics.low, statistics.high, statistics.mean, statistics.std, statistics.quantiles)
    if not all(np.isfinite(array).all() for array in moments):
        raise refuse(f"{path} holds a number that is not finite")
    grid = statistics.quantiles
    ordered = (statistics.low <= statistics.high).all() and (grid[:, 1:] >= grid[:, :-1]).all()
    if not ordered or (statistics.std < 0).any():
        raise refuse(f"{path} holds a range or quantiles that are not in order")
    if (grid[:, 0] != statistics.low).any() or (grid[:, -1] != statistics.high).any():
        raise refuse(f"{path} holds quantiles that do not span the range of their field")
    limits = {"missing": statistics.rows, "n_unique": UNIQUE_LIMIT}
    limits |= dict.fromkeys(("decimals", "decimals_standardized"), MAX_DECIMALS)
    for name, limit in limits.items():
        counts = getattr(statistics, name)
        if ((counts < 0) | (counts > limit)).any():
            raise refuse(f"{path} holds a count of {name} that is not from 0 to {limit}")


def _load_vocabularies(path: Path, rows: int, refuse: type[ScalarLensError]) -> tuple[Vocabulary, ...]:
    table = read_arrow(path, _VOCABULARIES, refuse)
    if table["field"].null_count or table["count"].null_count:
        raise refuse(f"{path} has an empty cell")
    field, count = table["field"].to_numpy().copy(), table["count"].to_numpy().copy()
    starts = np.flatnonzero(np.diff(field, prepend=field[:1] - 1))
    if not np.array_equal(field[starts], np.arange(len(starts))) or (count < 0).any():
        raise refuse(f"{path}: fields must be numbered from 0 in order, with counts from 0")
    texts = table["text"].to_pylist()
    return tuple(
        _vocabulary(texts[start:stop], count[start:stop], rows, f"{path}: field {index}", refuse)
        for index, (start, stop) in enumerate(pairwise([*starts, len(field)]))
    )


def _vocabulary(
    texts: list[str | None], count: np.ndarray, rows: int, source: str, refuse: type[ScalarLensError]
) -> Vocabulary:
    kept = [text for text in texts if text is not None]
    if texts[: Vocabulary.FIRST_ID] + kept != texts or len(set(kept)) != len(texts) - Vocabulary.FIRST_ID:
        raise refuse(f"{source} is not a list of distinct categories")
    cells = count.tolist()
    if sum(cells) != rows:
        raise refuse(f"{source} counts {sum(cells)} cells in {rows} training rows")
    ranked = zip(cells[Vocabulary.FIRST_ID :], kept, strict=True)
    if any(few < many or (few == many and text >= following) for (few, text), (many, following) in pairwise(ranked)):
        raise refuse(f"{source} does not list the most frequent category first, and ties by their text")
    return Vocabulary(tuple(kept), count[Vocabulary.FIRST_ID :], cells[_MISSING], cells[_RARE])
