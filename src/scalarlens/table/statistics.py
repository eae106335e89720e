"""What an encoder may know of the training rows: ranges, moments, quantiles, vocabularies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa

from scalarlens.errors import DataError

#: quantiles are kept at the levels 0, 1/4096, ..., 1
QUANTILE_LEVELS = 4096
#: distinct values are counted up to here
UNIQUE_LIMIT = 100_000
#: no more decimal places than this are looked for
MAX_DECIMALS = 4


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

    def digest(self) -> str:
        """SHA-256 over every number and every category."""
        sha = hashlib.sha256()
        for field in fields(self):
            if field.name != "vocabularies":
                array = np.ascontiguousarray(getattr(self, field.name))
                sha.update(f"{field.name}:{array.dtype.str}:{array.shape};".encode() + array.tobytes())
        for vocabulary in self.vocabularies:
            sha.update(f"{vocabulary.missing}:{vocabulary.rare}:{len(vocabulary.texts)};".encode())
            for text, count in zip(vocabulary.texts, vocabulary.counts.tolist(), strict=True):
                encoded = text.encode()
                sha.update(f"{len(encoded)}:{count}:".encode() + encoded)
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
        columns = [_describe(*counter.totals()) for counter in self._columns]
        stacked = {key: np.array([c[key] for c in columns]) for key in columns[0]} if columns else _no_columns()
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


def _describe(values: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray | float | int]:
    """Statistics of one column from its sorted distinct values and their counts."""
    present = int(counts.sum())
    if present == 0:
        values, counts = np.zeros(1), np.ones(1, dtype=np.int64)
    mean, std = _moments(values, counts)
    return {
        "present": present,
        "low": values[0],
        "high": values[-1],
        "mean": mean,
        "std": std,
        "n_unique": min(len(values), UNIQUE_LIMIT) if present else 0,
        "quantiles": _quantile_grid(values, counts),
        "decimals": _decimal_places(values, counts),
        "decimals_standardized": _decimal_places((values - mean) / max(std, 1e-12), counts),
    }


def _no_columns() -> dict[str, np.ndarray]:
    empty = {key: np.empty(0) for key in ("low", "high", "mean", "std")}
    whole = {key: np.empty(0, np.int64) for key in ("present", "n_unique", "decimals", "decimals_standardized")}
    return {**empty, **whole, "quantiles": np.empty((0, QUANTILE_LEVELS + 1))}


def _moments(values: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation, scaled so that neither overflows."""
    scale = max(abs(values[0]), abs(values[-1])) or 1.0
    total = counts.sum()
    mean = float((values / scale * counts).sum() / total)
    variance = float((np.square(values / scale - mean) * counts).sum() / total)
    return mean * scale, variance**0.5 * scale


def _quantile_grid(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Linear-interpolated quantiles at j/4096: position `level * (n - 1)` in the sorted column."""
    ends = np.cumsum(counts)
    position = np.arange(QUANTILE_LEVELS + 1) * (ends[-1] - 1)
    rank, part = position // QUANTILE_LEVELS, (position % QUANTILE_LEVELS) / QUANTILE_LEVELS
    lower = values[np.searchsorted(ends, rank, side="right")]
    upper = values[np.searchsorted(ends, np.minimum(rank + 1, ends[-1] - 1), side="right")]
    half = (upper * 0.5 - lower * 0.5) * part
    return lower + half + half  # in two steps, because the whole range can overflow


def _decimal_places(values: np.ndarray, counts: np.ndarray) -> int:
    """The fewest decimal places, up to four, that hold 99.9 % of the values exactly."""
    for places in range(MAX_DECIMALS):
        scaled = values * 10.0**places
        whole = np.abs(scaled - np.round(scaled)) <= np.maximum(1e-6, 4 * np.spacing(np.abs(scaled)))
        if counts[whole].sum() >= 0.999 * counts.sum():
            return places
    return MAX_DECIMALS


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
