"""What an encoder may know of the training rows: ranges, moments, quantiles, vocabularies."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalarlens.errors import DataError

#: quantiles are kept at the levels 0, 1/4096, ..., 1
QUANTILE_LEVELS = 4096
#: distinct values are counted up to here
UNIQUE_LIMIT = 100_000
#: no more decimal places than this are looked for
MAX_DECIMALS = 4
#: distinct values of a column are summed in blocks of this many, wherever its rows came from
BLOCK_VALUES = 1 << 16

#: ids of a missing cell, and of a category that training did not keep
MISSING_ID, UNSEEN_ID = 0, 1

#: sorted distinct values of a column with their counts, block by block; may be walked more than once
Blocks = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The categories of one field, most frequent first (ties by text), with their training counts.

    Id 0 is a missing cell, id 1 a category that training did not keep, ids from 2 follow `texts`.
    """

    texts: tuple[str, ...]
    counts: np.ndarray
    missing: int
    rare: int

    FIRST_ID = 2

    @property
    def size(self) -> int:
        return len(self.texts) + self.FIRST_ID

    def pieces(self) -> Iterator[tuple[pa.Array, np.ndarray]]:
        """The categories as Arrow arrays, with their counts."""
        for start in range(0, len(self.texts), BLOCK_VALUES):
            place = slice(start, start + BLOCK_VALUES)
            yield pa.array(self.texts[place], pa.string()), self.counts[place]


class VocabularyStream(NamedTuple):
    """A vocabulary that need not be in memory: `size` categories with their counts, in pieces of string arrays."""

    missing: int
    rare: int
    size: int
    pieces: Iterable[tuple[pa.Array, np.ndarray]]


@dataclass(frozen=True, eq=False)
class TrainingStatistics:
    """Everything fitted on training rows before a model exists; one entry per numerical field.

    Ranges and quantiles are float64 in the units that encoders see. A column without a single number has the
    range [0, 0].

    >>> statistics = TrainingStatistics.from_arrays(np.array([[1.0], [np.nan], [4.0]]))
    >>> statistics.low.tolist(), statistics.high.tolist(), statistics.missing.tolist()
    ([1.0], [4.0], [1])
    """

    rows: int
    missing: np.ndarray
    low: np.ndarray
    high: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    n_unique: np.ndarray
    quantiles: np.ndarray
    decimals: np.ndarray
    decimals_standardized: np.ndarray
    vocabularies: tuple[Vocabulary, ...] = ()

    @property
    def n_values(self) -> int:
        return len(self.low)

    @property
    def vocabulary_sizes(self) -> tuple[int, ...]:
        return tuple(vocabulary.size for vocabulary in self.vocabularies)

    @classmethod
    def from_arrays(cls, values: np.ndarray, category_ids: np.ndarray | None = None) -> TrainingStatistics:
        """Statistics of arrays already in memory: values `[rows, N]` (NaN = missing), ids `[rows, C]` integers."""
        values = np.asarray(values, dtype=np.float64)
        if values.ndim != 2:
            raise DataError(f"values must be [rows, fields]; got shape {values.shape}")
        builder = StatisticsBuilder(values.shape[1], 0 if category_ids is None else np.shape(category_ids)[1])
        texts = [] if category_ids is None else [pa.array(c).cast(pa.string()) for c in np.transpose(category_ids)]
        builder.update(values, texts)
        return builder.finish()

    @classmethod
    def fit(
        cls, batches: Iterable[tuple[np.ndarray, Sequence[pa.Array]]], min_counts: Sequence[int] = ()
    ) -> TrainingStatistics:
        """Statistics of streamed training batches: (values `[n, N]`, one string array per category, null = missing)."""
        builder: StatisticsBuilder | None = None
        for values, texts in batches:
            builder = builder or StatisticsBuilder(values.shape[1], len(texts), min_counts)
            builder.update(values, texts)
        if builder is None:
            raise DataError("statistics need at least one training batch; got none")
        return builder.finish()

    def unit_quantiles(self) -> np.ndarray:
        """The quantile grid mapped to [0, 1] by each field's range, `[N, 4097]`; all 0 for a constant field."""
        low, high = self.low[:, None] * 0.5, self.high[:, None] * 0.5
        span = np.where(high > low, high - low, 0.5)
        return np.clip((self.quantiles * 0.5 - low) / span, 0.0, 1.0)

    def standardized(self) -> TrainingStatistics:
        """The same statistics of `(x - mean) / std`: what encoders see under the shared z-score scale."""
        return replace(
            self,
            low=self.standardize(self.low),
            high=self.standardize(self.high),
            mean=np.zeros_like(self.mean),
            std=np.where(self.std > 0, 1.0, 0.0),
            quantiles=self.standardize(self.quantiles.T).T,
            decimals=self.decimals_standardized,
        )

    def standardize(self, values: np.ndarray) -> np.ndarray:
        """`(x - mean) / std` with the training moments, over the last axis."""
        return (values - self.mean) / np.maximum(self.std, 1e-12)

    @property
    def numbers(self) -> dict[str, Any]:
        """Everything but the vocabularies."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "vocabularies"}

    def stream_vocabularies(self) -> Iterator[VocabularyStream]:
        for vocabulary in self.vocabularies:
            yield VocabularyStream(vocabulary.missing, vocabulary.rare, len(vocabulary.texts), vocabulary.pieces())

    def digest(self) -> str:
        """SHA-256 over every number and every category."""
        return digest_of(self.numbers, self.stream_vocabularies())


def digest_of(numbers: dict[str, Any], vocabularies: Iterable[VocabularyStream]) -> str:
    """The digest of `TrainingStatistics`, for vocabularies that need not be in memory."""
    sha = hashlib.sha256()
    for name, value in numbers.items():
        array = np.ascontiguousarray(value)
        sha.update(f"{name}:{array.dtype.str}:{array.shape};".encode() + array.tobytes())
    for vocabulary in vocabularies:
        sha.update(f"{vocabulary.missing}:{vocabulary.rare}:{vocabulary.size};".encode())
        for texts, counts in vocabulary.pieces:
            joined = pc.binary_join_element_wise(
                pc.binary_length(texts).cast(pa.string()), pa.array(counts).cast(pa.string()), texts, ":"
            )
            size = pc.sum(pc.binary_length(joined), min_count=0).as_py()
            sha.update(memoryview(joined.buffers()[2])[:size] if size else b"")
    return sha.hexdigest()


class StatisticsBuilder:
    """Takes training batches one by one and ends in `TrainingStatistics`; the order of rows does not matter.

    Each column is held as its distinct values with their counts, so every statistic is exact.
    """

    def __init__(self, n_values: int, n_categories: int, min_counts: Sequence[int] = ()) -> None:
        self._columns = [_ValueCounts() for _ in range(n_values)]
        self._categories: list[dict[str | None, int]] = [{} for _ in range(n_categories)]
        self._min_counts = list(min_counts) or [1] * n_categories
        self._rows = 0

    def update(self, values: np.ndarray, texts: Sequence[pa.Array]) -> None:
        """Add one batch; `texts` holds one string array per categorical field, null for a missing cell."""
        for index, (column, counter) in enumerate(zip(values.T, self._columns, strict=True)):
            if np.isinf(column).any():
                row = self._rows + int(np.isinf(column).argmax())
                raise DataError(f"numerical field {index} is infinite at training row {row}; values must be finite")
            counter.add(column)
        for column, counts in zip(texts, self._categories, strict=True):
            for entry in column.value_counts().to_pylist():
                counts[entry["values"]] = counts.get(entry["values"], 0) + entry["counts"]
        self._rows += len(values)

    def finish(self) -> TrainingStatistics:
        stacked = stack_columns([describe(_in_blocks(*counter.totals())) for counter in self._columns])
        vocabularies = zip(self._categories, self._min_counts, strict=True)
        return TrainingStatistics(
            rows=self._rows,
            missing=self._rows - stacked.pop("present"),
            **stacked,
            vocabularies=tuple(_vocabulary(counts, min_count) for counts, min_count in vocabularies),
        )


class _ValueCounts:
    """Distinct values of one column with their counts; pending chunks are merged when they outgrow the rest."""

    MERGE_AT = 1 << 20

    def __init__(self) -> None:
        self._values = np.empty(0)
        self._counts = np.empty(0, dtype=np.int64)
        self._pending: list[np.ndarray] = []
        self._pending_size = 0

    def add(self, column: np.ndarray) -> None:
        present = column[~np.isnan(column)] + 0.0  # turns -0.0 into 0.0
        self._pending.append(present)
        self._pending_size += len(present)
        if self._pending_size > max(self.MERGE_AT, len(self._values)):
            self._merge()

    def totals(self) -> tuple[np.ndarray, np.ndarray]:
        self._merge()
        return self._values, self._counts

    def _merge(self) -> None:
        fresh, counts = np.unique(np.concatenate([np.empty(0), *self._pending]), return_counts=True)
        values, place = np.unique(np.concatenate([self._values, fresh]), return_inverse=True)
        merged = np.zeros(len(values), dtype=np.int64)
        np.add.at(merged, place, np.concatenate([self._counts, counts]))
        self._values, self._counts = values, merged
        self._pending, self._pending_size = [], 0


def _in_blocks(values: np.ndarray, counts: np.ndarray) -> Blocks:
    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, len(values), BLOCK_VALUES):
            yield values[start : start + BLOCK_VALUES], counts[start : start + BLOCK_VALUES]

    return blocks


def describe(blocks: Blocks) -> dict[str, Any]:
    """Statistics of one column from its sorted distinct values and their counts, in blocks of `BLOCK_VALUES`."""
    present = distinct = 0
    low = high = 0.0
    for values, counts in blocks():
        low = low if distinct else float(values[0])
        high = float(values[-1])
        present, distinct = present + int(counts.sum()), distinct + len(values)
    if not present:
        blocks = _in_blocks(np.zeros(1), np.ones(1, dtype=np.int64))
    mean, std = _moments(blocks, max(abs(low), abs(high)), max(present, 1))
    return {
        "present": present,
        "low": low,
        "high": high,
        "mean": mean,
        "std": std,
        "n_unique": min(distinct, UNIQUE_LIMIT),
        "quantiles": _quantile_grid(blocks, max(present, 1)),
        "decimals": _decimal_places(blocks, lambda values: values),
        "decimals_standardized": _decimal_places(blocks, lambda values: (values - mean) / max(std, 1e-12)),
    }


def stack_columns(columns: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """What `describe` says of several columns, one array per statistic."""
    if columns:
        return {key: np.array([column[key] for column in columns]) for key in columns[0]}
    empty = {key: np.empty(0) for key in ("low", "high", "mean", "std")}
    whole = {key: np.empty(0, np.int64) for key in ("present", "n_unique", "decimals", "decimals_standardized")}
    return {**empty, **whole, "quantiles": np.empty((0, QUANTILE_LEVELS + 1))}


def _moments(blocks: Blocks, largest: float, total: int) -> tuple[float, float]:
    """Mean and standard deviation.

    The values are divided by a power of two, which is exact, so that neither moment overflows. The sums of the
    blocks are added without rounding, so that nothing depends on the order in which rows came.
    """
    exponent = math.frexp(largest)[1]

    def scaled() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return ((np.ldexp(values, -exponent), counts) for values, counts in blocks())

    mean = math.fsum(float((values * counts).sum()) for values, counts in scaled()) / total
    variance = math.fsum(float((np.square(values - mean) * counts).sum()) for values, counts in scaled()) / total
    return math.ldexp(mean, exponent), math.ldexp(math.sqrt(variance), exponent)


def _quantile_grid(blocks: Blocks, total: int) -> np.ndarray:
    """Linear-interpolated quantiles at j/4096: position `level * (n - 1)` in the sorted column."""
    position = np.arange(QUANTILE_LEVELS + 1) * (total - 1)
    rank, part = position // QUANTILE_LEVELS, (position % QUANTILE_LEVELS) / QUANTILE_LEVELS
    ranks = (rank, np.minimum(rank + 1, total - 1))
    lower, upper = np.empty(len(rank)), np.empty(len(rank))
    begin = 0
    for values, counts in blocks():
        ends = begin + np.cumsum(counts)
        for wanted, found in zip(ranks, (lower, upper), strict=True):
            here = slice(*np.searchsorted(wanted, (begin, ends[-1])))
            found[here] = values[np.searchsorted(ends, wanted[here], side="right")]
        begin = ends[-1]
    half = (upper * 0.5 - lower * 0.5) * part
    return lower + half + half  # in two steps, because the whole range can overflow


def _decimal_places(blocks: Blocks, change: Callable[[np.ndarray], np.ndarray]) -> int:
    """The fewest decimal places, up to four, that hold 99.9 % of the values exactly."""
    exact, total = np.zeros(MAX_DECIMALS, dtype=np.int64), 0
    for values, counts in blocks():
        changed = change(values)
        total += int(counts.sum())
        for places in range(MAX_DECIMALS):
            # A value whose shifted point overflows has no decimal places to look for; NaN compares as false.
            with np.errstate(over="ignore", invalid="ignore"):
                scaled = changed * 10.0**places
                whole = np.abs(scaled - np.round(scaled)) <= np.maximum(1e-6, 4 * np.spacing(np.abs(scaled)))
            exact[places] += counts[whole].sum()
    enough = np.flatnonzero(exact >= 0.999 * total)
    return int(enough[0]) if len(enough) else MAX_DECIMALS


def _vocabulary(counts: dict[str | None, int], min_count: int) -> Vocabulary:
    missing = counts.get(None, 0)
    present = {text: count for text, count in counts.items() if text is not None}
    kept = sorted((t for t, n in present.items() if n >= min_count), key=lambda t: (-present[t], t))
    return Vocabulary(
        texts=tuple(kept),
        counts=np.array([present[text] for text in kept], dtype=np.int64),
        missing=missing,
        rare=sum(present.values()) - sum(present[text] for text in kept),
    )
