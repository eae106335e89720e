"""A first schema for a table: what each column probably is, why, and where a person should look."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalarlens import metrics
from scalarlens.datasets.files import Table
from scalarlens.errors import DataError, unknown_name
from scalarlens.table.cells import BadCell, labels, not_numbers, numbers, plain, texts
from scalarlens.table.schema import CategoricalColumn, NumericColumn, Schema

#: distinct cells of a column are counted up to here
DISTINCT_LIMIT = 100_000
#: rows of each label that are kept to see whether a column copies the label
SAMPLE_ROWS = 1 << 15
#: of a column's cells at least this share must be numbers, and the others at most so many different texts
NUMBER_SHARE = 0.995
MOST_MARKERS = 5
#: texts that mean "missing" in many tables, in lower case
MARKERS = ("?", "-", "--", ".", "na", "n/a", "#n/a", "null", "none", "\\n", "missing")
#: whole numbers with no more distinct values than this may be codes
FEW_VALUES = 10
#: whole numbers beyond this are not exact in float32, and are seldom amounts
HUGE = 2**24
#: the share of distinct cells from which a column looks like an identifier, and the rows it takes to tell
UNIQUE_SHARE = 0.95
UNIQUE_ROWS = 50
#: a column that alone ranks or guesses the label better than this nearly copies it
COPY_AUC = 0.99
COPY_ACCURACY = 0.995
#: fewer rows of one label than this tell nothing about copies
COPY_ROWS = 10

_DATE = (
    r"^(\d{4}[-/]\d{1,2}[-/]\d{1,2}([T ]\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?\s?(Z|UTC|[+-]\d{2}:?\d{2})?)?"
    r"|\d{1,2}[./]\d{1,2}[./]\d{4})$"
)


Kind = Literal["numeric", "categorical", "left out"]


@dataclass(frozen=True)
class InferredSchema:
    """A schema with a reason for every column of the table, and the columns that a person should look at.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from scalarlens.datasets.files import open_table
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "clicks.csv")
    ...     _ = path.write_text("price,day,clicked\\n1.5,2024-01-31,0\\n?,2024-02-01,1\\n")
    ...     print(infer_schema(open_table(path), "clicked").to_toml(), end="")
    # doubtful: 'day'
    # left out: 'day': a date or a time; derive a number from it, or make it the `time` of the schema
    <BLANKLINE>
    label = "clicked"
    <BLANKLINE>
    [numeric]
    "price" = { missing = ["?"] }  # numbers from 1.5 to 1.5, and '?' for missing
    <BLANKLINE>
    [categorical]
    """

    schema: Schema
    reasons: Mapping[str, str]
    doubtful: tuple[str, ...]

    @property
    def left_out(self) -> tuple[str, ...]:
        return tuple(name for name in self.reasons if name not in self.schema.columns)

    def to_toml(self) -> str:
        """A `schema.toml` with the reasons as comments; what a person should look at stands on top."""
        lines = [f"# doubtful: {', '.join(map(repr, self.doubtful))}"] if self.doubtful else []
        lines += [f"# left out: {name!r}: {self.reasons[name]}" for name in self.left_out]
        notes = {name: "doubtful: " * (name in self.doubtful) + text for name, text in self.reasons.items()}
        return "".join(f"{line}\n" for line in (*lines, "") if lines) + self.schema.to_toml(notes)


def infer_schema(table: Table, label: str, *, group: str | None = None, time: str | None = None) -> InferredSchema:
    """Guess the kind of every column from all rows of a training table, in one pass and bounded memory."""
    for role, name in (("label", label), ("group", group), ("time", time)):
        if name is not None and name not in table.columns:
            raise unknown_name(f"{role} column", name, table.columns)
    columns = {name: _Column() for name in table.columns if name not in (label, group, time)}
    if not columns:
        raise DataError(f"{table.path} has no column that can be a feature")
    samples = (_Sample(columns), _Sample(columns))
    rows = 0
    for batch in table.batches():
        positive = _read_labels(table, batch.column(label), label, rows) == 1
        for name, column in columns.items():
            column.add(batch.column(name))
        for sample, chosen in zip(samples, (~positive, positive), strict=True):
            sample.add(batch, chosen)
        rows += batch.num_rows
    _require_both_labels(table, label, samples[0].rows, samples[1].rows)
    verdicts = {name: column.verdict() for name, column in columns.items()}
    for name, verdict in verdicts.items():
        if verdict.kind != "left out":
            verdict.doubts.extend(_signs_of_a_copy(name, verdict, samples))
    return _assemble(table, label, group, time, verdicts)


def _read_labels(table: Table, cells: pa.Array, label: str, done: int) -> np.ndarray:
    try:
        return labels(cells, label)
    except BadCell as bad:
        found = pc.unique(texts(cells, label).drop_null()).to_pylist()
        raise DataError(
            f"{table.path}: column {label!r}, row {done + bad.row + 1}: {bad.problem}; "
            f"the column holds {_shown(found) or 'nothing'}; make it 0/1"
        ) from bad


def _require_both_labels(table: Table, label: str, negatives: int, positives: int) -> None:
    if negatives + positives == 0:
        raise DataError(f"{table.path} has no rows; a schema is inferred from the rows of a training table")
    if not negatives or not positives:
        raise DataError(
            f"{table.path}: the label {label!r} is {int(positives > 0)} in all {negatives + positives} rows; "
            f"a model needs rows of both 0 and 1"
        )


def _assemble(
    table: Table, label: str, group: str | None, time: str | None, verdicts: Mapping[str, _Verdict]
) -> InferredSchema:
    roles = {
        group: "the group of a row, no feature",
        time: "the time of a row, no feature",
        label: "the label",
    }
    reasons = {name: verdicts[name].reason if name in verdicts else roles[name] for name in table.columns}
    kept = {name: verdict for name, verdict in verdicts.items() if verdict.kind != "left out"}
    if not kept:
        why = "; ".join(f"{name!r}: {reasons[name]}" for name in list(verdicts)[:3])
        raise DataError(f"{table.path} has no column that can be a feature; {why}")
    numeric = tuple(NumericColumn(n, missing=v.markers) for n, v in kept.items() if v.kind == "numeric")
    categorical = tuple(CategoricalColumn(n) for n, v in kept.items() if v.kind == "categorical")
    schema = Schema(numeric, categorical, label=label, group=group, time=time)
    return InferredSchema(schema, reasons, tuple(name for name, v in verdicts.items() if v.doubts))


def _shown(found: Sequence[str]) -> str:
    """A few texts, short and on one line."""
    more = f" and {len(found) - MOST_MARKERS} more" if len(found) > MOST_MARKERS else ""
    return ", ".join(repr(text[:40]) for text in found[:MOST_MARKERS]) + more


@dataclass
class _Verdict:
    """What a column is taken for, why, and what a person should think about."""

    kind: Kind
    because: str
    doubts: list[str] = field(default_factory=list)
    markers: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        return "; ".join([self.because, *self.doubts])


class _Column:
    """What one pass learns of a column; a cell is present unless it is null, NaN or empty."""

    def __init__(self) -> None:
        self.types: set[str] = set()
        self.foreign = ""
        self.rows = self.present = self.dates = self.absent = 0
        self.range = _Range()
        self.distinct = _Distinct()
        self.markers: Counter[str] = Counter()
        self.is_text = self.mostly_numbers = self.padded = False

    def add(self, cells: pa.Array) -> None:
        cells = plain(cells)
        kind = cells.type
        self.rows += len(cells)
        if pa.types.is_string(kind):
            cells = pc.utf8_trim_whitespace(cells)
            cells = cells.filter(pc.not_equal(cells, ""))
            self._add_texts(cells)
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            values = numbers(cells, "")
            cells = cells.filter(pa.array(~np.isnan(values)))
            self._add_numbers(values, cells)
            self.types.add("integer" if pa.types.is_integer(kind) else "real")
        else:
            cells = cells.drop_null()
            self._add_others(cells)
        self.present += len(cells)

    def _add_texts(self, cells: pa.Array) -> None:
        if not self.is_text:
            self._read_numbers(cells)
        if self.is_text:
            self.distinct.add(cells)
            self.dates += _count(pc.match_substring_regex(cells, _DATE))
            self.absent += _count(pc.is_in(pc.utf8_lower(cells), value_set=pa.array(MARKERS)))

    def _read_numbers(self, cells: pa.Array) -> None:
        """Count the numbers and the few texts beside them; more than a few settle that the column is text."""
        # Most columns of text show it in their first cells, and to search a whole batch of them is slow.
        for part in (cells[:1000], cells):
            odd = not_numbers(part, list(self.markers))
            self.markers.update(dict.fromkeys(pc.unique(part.filter(pa.array(odd))).to_pylist(), 0))
            if len(self._unknown()) > MOST_MARKERS:
                self.is_text, self.mostly_numbers = True, bool(not_numbers(part).mean() < 0.5)
                return
        marked = pc.is_in(cells, value_set=pa.array(list(self.markers), pa.string()))
        for entry in cells.filter(marked).value_counts().to_pylist():
            self.markers[entry["values"]] += entry["counts"]
        self.padded = self.padded or _count(pc.match_substring_regex(cells, r"^-?0\d")) > 0
        self._add_numbers(numbers(cells, "", list(self.markers)), cells)

    def _add_numbers(self, values: np.ndarray, cells: pa.Array) -> None:
        self.range.add(values[~np.isnan(values)])
        # Only whole numbers can be identifiers or codes; to count the others would be work for nothing.
        if self.range.whole:
            self.distinct.add(cells)

    def _add_others(self, cells: pa.Array) -> None:
        kind = cells.type
        if pa.types.is_boolean(kind):
            self.types.add("bool")
            self.distinct.add(cells)
        elif pa.types.is_temporal(kind):
            self.types.add("date")
        elif not pa.types.is_null(kind):
            self.foreign = str(kind)

    def _unknown(self) -> dict[str, int]:
        """The texts beside the numbers that do not mean "missing" elsewhere, with their counts."""
        return {text: count for text, count in self.markers.items() if text.lower() not in MARKERS}

    def verdict(self) -> _Verdict:
        others = sum(self._unknown().values())
        if self.foreign:
            return _Verdict("left out", f"holds {self.foreign!r}, which is neither a number nor a text")
        if self._is_date():
            hint = "derive a number from it, or make it the `time` of the schema"
            return _Verdict("left out", "a date or a time", [hint])
        too_few = self.range.count < NUMBER_SHARE * (self.range.count + others)
        if too_few or self.is_text or "bool" in self.types:
            return self._verdict_on_text(others)
        if self.range.count == 0:
            return _Verdict("numeric", "no numbers", ["every cell is missing"], tuple(self.markers))
        return self._verdict_on_numbers()

    def _is_date(self) -> bool:
        absent = self.absent + sum(self.markers.values()) - sum(self._unknown().values())
        dates = self.dates + sum(n for text, n in self._unknown().items() if re.match(_DATE, text))
        return "date" in self.types or dates >= NUMBER_SHARE * max(self.present - absent, 1)

    def _verdict_on_text(self, others: int) -> _Verdict:
        what = "true or false" if self.types == {"bool"} else "text"
        because, doubts = f"{what}, {self.distinct}", []
        if self.mostly_numbers or (not self.is_text and self.range.count > others > 0):
            strange = _shown(list(self._unknown())[:MOST_MARKERS])
            doubts.append(f"mostly numbers, but also such as {strange}: numeric once it is cleaned")
        if self.distinct.mostly_once:
            return _Verdict("left out", because, doubts or ["a row identifier, or free text"])
        if self.distinct.count == 1 and self.present == self.rows:
            doubts.append("one value in every row")
        return _Verdict("categorical", because, doubts)

    def _verdict_on_numbers(self) -> _Verdict:
        seen, markers = self.range, tuple(self.markers)
        doubts = [f"the text {text!r} in {n} rows taken for missing" for text, n in self._unknown().items()]
        if seen.infinite:
            doubts.append(f"{seen.infinite} infinite cells, which training refuses")
        if seen.infinite == seen.count:
            return _Verdict("numeric", "no finite number", doubts, markers)
        because = f"numbers from {seen.low:.6g} to {seen.high:.6g}"
        because += f", and {_shown(markers)} for missing" if markers else ""
        if seen.low == seen.high and seen.count == self.rows:
            return _Verdict("numeric", because, [*doubts, "one value in every row"], markers)
        if not seen.whole:
            return _Verdict("numeric", because, doubts, markers)
        kind, doubt = self._as_identifier()
        because = f"whole {because}, {self.distinct}"
        return _Verdict(kind, because, [*doubts, *filter(None, [doubt])], markers if kind == "numeric" else ())

    def _as_identifier(self) -> tuple[Kind, str]:
        """What whole numbers are for, as far as size, order and repetition tell; and the doubt, if any."""
        seen, distinct = self.range, self.distinct
        huge = max(abs(seen.low), abs(seen.high)) > HUGE
        repeated = distinct.share < UNIQUE_SHARE
        if "real" in self.types:
            return "numeric", "above 2^24 and often repeated: ids? then make it categorical" * (huge and repeated)
        if self.padded:
            return "categorical", "leading zeros: a code, not an amount"
        if distinct.mostly_once:
            if huge or seen.ascending or seen.high - seen.low < 2 * seen.count:
                return "left out", "nearly one value per row: an identifier or a time; numeric if an amount"
            return "numeric", "nearly one value per row: an identifier? then leave it out"
        if huge and repeated:
            return "categorical", "above 2^24 and often repeated: ids, not amounts"
        if distinct.count - len(self.markers) <= FEW_VALUES:
            return "numeric", "few distinct values: codes? then make it categorical"
        return "numeric", "above 2^24: an identifier?" * huge


class _Range:
    """Range and order of the numbers of a column, which may be infinite but not NaN."""

    def __init__(self) -> None:
        self.count = self.infinite = 0
        self.low, self.high, self._last = np.inf, -np.inf, -np.inf
        self.whole = self.ascending = True

    def add(self, values: np.ndarray) -> None:
        finite = values[np.isfinite(values)]
        self.count += len(values)
        self.infinite += len(values) - len(finite)
        if len(finite):
            self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))
            self.whole = self.whole and bool((finite == np.round(finite)).all())
            self.ascending = self.ascending and bool((np.diff(finite, prepend=self._last) >= 0).all())
            self._last = finite[-1]


class _Distinct:
    """Distinct cells, counted by hash until there are too many; `share` is of the cells seen until then."""

    def __init__(self) -> None:
        self._hashes = np.empty(0, dtype=np.int64)
        self._pending: list[np.ndarray] = []
        self._rows = 0

    def add(self, cells: pa.Array) -> None:
        if self.full:
            return
        # As texts, because Python gives the numbers -1 and -2 one hash.
        fresh = pc.unique(cells).cast(pa.string()).to_pylist()
        self._pending.append(np.fromiter(map(hash, fresh), np.int64))
        self._rows += len(cells)
        if sum(map(len, self._pending)) > max(len(self._hashes), DISTINCT_LIMIT // 4):
            self._merge()

    def _merge(self) -> None:
        if self._pending:
            self._hashes = np.unique(np.concatenate([self._hashes, *self._pending]))
            self._pending = []

    @property
    def full(self) -> bool:
        return len(self._hashes) > DISTINCT_LIMIT

    @property
    def count(self) -> int:
        self._merge()
        return len(self._hashes)

    @property
    def share(self) -> float:
        return self.count / max(self._rows, 1)

    @property
    def mostly_once(self) -> bool:
        return self.share >= UNIQUE_SHARE and self._rows >= UNIQUE_ROWS

    def __str__(self) -> str:
        many = f"more than {DISTINCT_LIMIT:,} distinct (counted up to there)"
        return f"{self.count:,} distinct" if self.count <= DISTINCT_LIMIT else many


class _Sample:
    """Up to `SAMPLE_ROWS` rows as texts, chosen by a hash of their place and so from the whole table."""

    def __init__(self, columns: Collection[str]) -> None:
        self.rows = 0
        self.table = pa.table({name: pa.array([], pa.string()) for name in columns})
        self._draws = np.empty(0, dtype=np.uint64)
        self._bar = 2**64 - 1

    def add(self, batch: pa.RecordBatch, chosen: np.ndarray) -> None:
        places = np.flatnonzero(chosen)
        draws = _scramble(np.arange(self.rows, self.rows + len(places), dtype=np.uint64))
        self.rows += len(places)
        kept = draws <= self._bar
        taken = batch.select(self.table.column_names).take(pa.array(places[kept]))
        fresh = {name: _as_texts(cells) for name, cells in zip(taken.schema.names, taken.columns, strict=True)}
        self.table = pa.concat_tables([self.table, pa.table(fresh)])
        self._draws = np.concatenate([self._draws, draws[kept]])
        while len(self._draws) > SAMPLE_ROWS:
            self._bar //= 2
            kept = self._draws <= self._bar
            self.table, self._draws = self.table.filter(pa.array(kept)), self._draws[kept]
        if self.table.column(0).num_chunks > 64:
            self.table = self.table.combine_chunks()


def _scramble(places: np.ndarray) -> np.ndarray:
    """A fixed, even spread of whole numbers over 64 bits."""
    mixed = (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)


def _as_texts(cells: pa.Array) -> pa.Array:
    try:
        return texts(cells, "")
    except DataError:
        return pa.nulls(len(cells), pa.string())


def _count(mask: pa.Array) -> int:
    return int(pc.sum(mask, min_count=0).as_py())


def _signs_of_a_copy(name: str, verdict: _Verdict, samples: tuple[_Sample, _Sample]) -> list[str]:
    """Why a column looks like a copy of the label, from a sample of the rows of each label."""
    sizes = [sample.table.num_rows for sample in samples]
    cells = plain(pa.chunked_array([chunk for sample in samples for chunk in sample.table.column(name).chunks]))
    positive = np.repeat([False, True], sizes)
    if verdict.kind == "numeric":
        values = numbers(cells, name, verdict.markers)
        present = ~np.isnan(values)
        area = _auc(values[present], positive[present])
        if max(area, 1 - area) > COPY_AUC:
            return [f"nearly copies the label: alone it ranks a sample with an AUC of {max(area, 1 - area):.4f}"]
    weights = np.where(positive, samples[1].rows / sizes[1], samples[0].rows / sizes[0])
    codes = pc.fill_null(cells.dictionary_encode(null_encoding="encode").indices, 0).to_numpy()
    for what, groups in (
        ("value", codes),
        ("being missing", pc.is_null(cells).to_numpy(zero_copy_only=False)),
    ):
        accuracy, base = _accuracy_of_others(groups.astype(np.int64), positive, weights)
        if min(sizes) >= COPY_ROWS and 1 - accuracy <= min(1 - COPY_ACCURACY, (1 - base) / 10):
            return [f"nearly copies the label: its {what} alone guesses {accuracy:.1%} of a sample"]
    return []


def _auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of pairs that the scores rank right, ties half; 0.5 where there are too few rows to tell."""
    ones = int(positive.sum())
    return metrics.auc(positive, scores) if min(ones, len(positive) - ones) >= COPY_ROWS else 0.5


def _accuracy_of_others(groups: np.ndarray, positive: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """How many rows the majority of the *other* rows of their group guesses, and how many a constant guesses.

    A group of one row has no others and is guessed like the whole, so that identifiers gain nothing.
    """
    ones = np.bincount(groups, weights * positive)[groups] - weights * positive
    zeros = np.bincount(groups, weights * ~positive)[groups] - weights * ~positive
    share = (weights * positive).sum() / weights.sum()
    tied = np.abs(ones - zeros) <= 1e-9 * weights.sum()
    guess = np.where(tied, share > 0.5, ones > zeros)
    return float((weights * (guess == positive)).sum() / weights.sum()), float(max(share, 1 - share))
