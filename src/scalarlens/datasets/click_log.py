"""Made click logs in raw units, in which the same value means opposite things in different contexts.

One is small and has names that speak, for the demo. The other has the shape of Criteo's and any number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv

from scalarlens.datasets.files import Table
from scalarlens.datasets.parts import Part, deal_randomly
from scalarlens.datasets.source import Opened, Source, SplitRule, schema_of, sources
from scalarlens.errors import UsageError
from scalarlens.table.schema import CategoricalColumn, NumericColumn, Schema

PLACEMENTS = ("search", "feed", "video", "partner")
#: how a placement turns the response to the price: buyers on search look for cheap, readers of the feed for premium
PRICE_TASTE = np.array([-1.6, 1.6, 0.8, -0.8])
COUNTRIES, ADVERTISERS = 60, 3000

SCHEMA = Schema(
    numeric=(
        NumericColumn("price", unit="EUR"),
        NumericColumn("views_7d", unit="count"),
        NumericColumn("seconds_since_visit", unit="s"),
        NumericColumn("balance_change", unit="EUR"),
        NumericColumn("discount", unit="percent"),
    ),
    categorical=(
        CategoricalColumn("placement"),
        CategoricalColumn("country"),
        CategoricalColumn("advertiser", min_count=2),
    ),
    label="clicked",
    group="country",
)


class ClickLog(NamedTuple):
    """Rows in serving units, and the true logit of each, which no model gets to see."""

    table: pa.Table
    true_logits: np.ndarray


def make_click_log(rows: int, seed: int) -> ClickLog:
    """Draw a click log: heavy-tailed counts and prices, negative amounts, missing cells, Zipf categories.

    >>> log = make_click_log(1000, seed=1)
    >>> log.table.num_rows, log.table.column_names == [*SCHEMA.features, "clicked"]
    (1000, True)
    """
    rng = np.random.default_rng([seed, 0x5CA1A])
    columns = _draw_columns(rows, rng)
    logits = _true_logits(columns, rng)
    clicked = rng.random(rows) < 1 / (1 + np.exp(-logits))
    return ClickLog(_to_table(columns, clicked), logits)


def _draw_columns(rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    seen = rng.random(rows) < 0.7
    return {
        "price": np.round(rng.lognormal(3.0, 1.4, rows), 2),
        "views_7d": np.floor(rng.pareto(0.9, rows) * 3.0).clip(max=5e6),
        "seconds_since_visit": np.where(seen, np.floor(rng.lognormal(9.0, 2.2, rows)), np.nan),
        "balance_change": np.round(np.sign(rng.random(rows) - 0.45) * rng.lognormal(4.0, 1.8, rows), 2),
        "discount": np.where(rng.random(rows) < 0.8, rng.integers(0, 61, rows), np.nan),
        "placement": rng.choice(4, rows, p=[0.4, 0.35, 0.15, 0.1]),
        "country": _zipf(COUNTRIES, rows, rng),
        "advertiser": _zipf(ADVERTISERS, rows, rng),
    }


def _zipf(size: int, rows: int, rng: np.random.Generator) -> np.ndarray:
    weights = 1.0 / np.arange(1, size + 1) ** 1.1
    return rng.choice(size, rows, p=weights / weights.sum())


def _true_logits(columns: dict[str, np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Main effects, and three responses that turn with the context: by placement, by advertiser, by another number."""
    dear = (np.log(columns["price"]) - 3.0) / 1.4
    busy = np.log1p(columns["views_7d"]) / 3.0 - 0.6
    recent = 1.0 - np.nan_to_num(np.log(columns["seconds_since_visit"] + 1.0), nan=16.0) / 9.0
    change = np.sign(columns["balance_change"]) * np.log1p(np.abs(columns["balance_change"])) / 4.0
    discount = np.nan_to_num(columns["discount"], nan=0.0) / 60.0
    advertiser = rng.normal(0.0, 0.5, ADVERTISERS)[columns["advertiser"]]
    leaning = rng.choice([-1.0, 1.0], ADVERTISERS)[columns["advertiser"]]
    country = rng.normal(0.0, 0.3, COUNTRIES)[columns["country"]]
    return (
        -1.9
        + advertiser
        + country
        + 0.5 * np.tanh(busy)
        + 0.6 * recent
        + PRICE_TASTE[columns["placement"]] * np.sin(1.4 * dear)
        + 0.7 * leaning * np.sin(2.0 * busy)
        + 1.2 * change * np.tanh(2.0 * (discount - 0.35))
    )


def _to_table(columns: dict[str, np.ndarray], clicked: np.ndarray) -> pa.Table:
    texts = {
        "placement": np.array(PLACEMENTS)[columns["placement"]],
        "country": np.char.add("c", columns["country"].astype(str)),
        "advertiser": np.char.add("ad-", columns["advertiser"].astype(str)),
    }
    arrays = {name: pa.array(columns[name], from_pandas=True) for name in ("price", "views_7d", "seconds_since_visit")}
    arrays |= {name: pa.array(columns[name], from_pandas=True) for name in ("balance_change", "discount")}
    arrays |= {name: pa.array(text) for name, text in texts.items()}
    return pa.table({**arrays, "clicked": clicked.astype(np.int8)})


# The log in the shape of Criteo's. What a category does is the same in every log; the seed draws the rows, and a chunk
# of them is a function of the seed and its number alone.

CHUNK_ROWS = 1 << 16
LABEL, TRUE_LOGIT = "label", "true_logit"


class Counts(NamedTuple):
    """A column of counts: `low + floor(exp(centre + spread z))`, at most `high`, with z normal; some cells missing."""

    name: str
    centre: float
    spread: float
    low: int
    high: int
    absent: float

    def draw(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        raw = np.exp(self.centre + self.spread * rng.standard_normal(rows))
        values: np.ndarray = (self.low + np.floor(raw)).clip(max=self.high)
        return values

    def place(self, values: np.ndarray) -> np.ndarray:
        """Where a count lies among the others, about standard normal: what the true logit responds to."""
        place: np.ndarray = (np.log(values - self.low + 0.5) - self.centre) / self.spread
        return place


#: centres and spreads after the medians, means and largest values that are known of Criteo's columns
COUNTS = (
    Counts("I1", 0.7, 1.6, 0, 5_775, 0.45),
    Counts("I2", 1.9, 2.2, -3, 257_675, 0.0),
    Counts("I3", 2.0, 1.6, 0, 65_535, 0.21),
    Counts("I4", 1.5, 1.1, 0, 969, 0.22),
    Counts("I5", 7.9, 1.9, 0, 23_159_456, 0.03),
    Counts("I6", 3.5, 1.7, 0, 431_037, 0.22),
    Counts("I7", 1.4, 1.6, 0, 56_311, 0.04),
    Counts("I8", 2.0, 1.1, 0, 6_047, 0.0),
    Counts("I9", 3.7, 1.4, 0, 29_019, 0.04),
    Counts("I10", 0.2, 0.6, 0, 11, 0.45),
    Counts("I11", 0.7, 1.1, 0, 231, 0.04),
    Counts("I12", 0.1, 1.2, 0, 4_008, 0.76),
    Counts("I13", 1.6, 1.2, 0, 7_393, 0.22),
)
#: categories that occur at least ten times in Criteo, as the benchmark BARS counted them (Criteo_x4)
VOCABULARIES = (
    *(1446, 554, 157339, 117822, 306, 18, 11882, 630, 5, 39530, 5131, 156656, 3176),
    *(28, 11043, 148913, 12, 4560, 2003, 5, 154564, 18, 17, 53031, 82, 40955),
)
#: a vocabulary must stay within the 32-bit numbers
LARGEST_SCALE = 10_000
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
#: shares of missing cells, by the number of the column
ABSENT = {3: 0.03, 4: 0.03, 6: 0.12, 12: 0.03, 16: 0.03, 19: 0.44, 20: 0.44, 21: 0.03, 22: 0.76, 24: 0.03, 25: 0.44}
ABSENT |= {26: 0.44}
SHAPE = (LABEL, *(counts.name for counts in COUNTS), *CATEGORIES, TRUE_LOGIT)
#: a count whose response turns with a category, and how strongly
TURNS_WITH_CATEGORY = (
    ("I7", "C17", 0.7),
    ("I13", "C14", 0.5),
    ("I2", "C9", 0.5),
    ("I6", "C2", 0.4),
    ("I5", "C15", 0.4),
)
#: a count whose response turns with another count
TURNS_WITH_COUNT = (("I7", "I11", 0.5), ("I4", "I8", 0.4))
INTERCEPT = -1.55


@sources.register("click-log")
class MadeClickLog(Source):
    """A made log in the shape of Criteo's, of any size: 13 heavy-tailed counts, 26 Zipf categories, missing cells.

    The response to a count turns with a category or with another count. The true logit is the column `true_logit`,
    outside the schema, so that the best possible AUC is known. `vocabulary_scale` multiplies the sizes of all
    vocabularies, which are Criteo's.

    >>> [part.table.count_rows() for part in MadeClickLog(rows=100_000).open(seed=1).parts]
    [100000]
    """

    licence = "none is needed: the rows are made here"
    obtain = "nothing is to be obtained: the rows are made here"
    splits = (SplitRule("random", "80/10/10 % of the rows; the seed draws both the rows and the split", seeded=True),)

    def __init__(self, *, rows: int = 1_000_000, vocabulary_scale: float = 1.0, min_count: int = 10) -> None:
        if not 0 < vocabulary_scale <= LARGEST_SCALE:
            raise UsageError(
                f"source.vocabulary_scale must be above 0 and at most {LARGEST_SCALE}; got {vocabulary_scale}"
            )
        self.rows, self.vocabulary_scale, self.min_count = rows, vocabulary_scale, min_count

    def _open(self, place: Path, split: str, seed: int) -> Opened:
        file = CriteoShaped(self.rows, seed, self.vocabulary_scale)
        numeric = " ".join(counts.name for counts in COUNTS)
        schema = schema_of(numeric, " ".join(CATEGORIES), LABEL, min_count=self.min_count)
        part = Part(Table(file.path, file.columns, (file,)), deal_randomly(self.rows, seed))
        return Opened(schema, (part,))


@dataclass(frozen=True)
class CriteoShaped:
    """A log in the shape of Criteo's as the file of a table, drawn while it is read.

    >>> log = CriteoShaped(rows=70_000, seed=1)
    >>> [batch.num_rows for batch in log.batches(["I1"], CHUNK_ROWS)], log.chunk(1).equals(log.chunk(1))
    ([65536, 4464], True)
    """

    rows: int
    seed: int
    vocabulary_scale: float = 1.0
    columns: tuple[str, ...] = SHAPE

    @property
    def path(self) -> Path:
        return Path("click-log")

    @property
    def vocabularies(self) -> tuple[int, ...]:
        return tuple(math.ceil(size * self.vocabulary_scale) for size in VOCABULARIES)

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        for number, start in enumerate(range(0, self.rows, CHUNK_ROWS)):
            yield self.chunk(number).slice(0, self.rows - start)

    def count_rows(self) -> int:
        return self.rows

    def chunk(self, number: int) -> pa.RecordBatch:
        """Rows `number * CHUNK_ROWS` and following, a whole chunk of them."""
        rng = np.random.default_rng([self.seed, 0xC2173, number])
        counts = {column.name: column.draw(rng, CHUNK_ROWS) for column in COUNTS}
        ranks = {name: _ranks(size, rng) for name, size in zip(CATEGORIES, self.vocabularies, strict=True)}
        for column in COUNTS:
            counts[column.name][rng.random(CHUNK_ROWS) < column.absent] = np.nan
        for place, share in ABSENT.items():
            ranks[f"C{place}"][rng.random(CHUNK_ROWS) < share] = 0
        logits = true_logits(counts, ranks)
        clicked = rng.random(CHUNK_ROWS) < 1 / (1 + np.exp(-logits))
        arrays = [pa.array(clicked.astype(np.uint8))]
        arrays += [pa.array(values, pa.int64(), from_pandas=True) for values in counts.values()]
        arrays += [_codes(rank, place) for place, rank in enumerate(ranks.values())]
        return pa.RecordBatch.from_arrays([*arrays, pa.array(logits)], SHAPE)


def write_criteo_tsv(path: str | Path, rows: int, seed: int, vocabulary_scale: float = 1.0) -> None:
    """The log as a file of Criteo's format: label, counts, categories; no header, empty for missing."""
    log = CriteoShaped(rows, seed, vocabulary_scale)
    names = list(SHAPE[:-1])
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with pa.csv.CSVWriter(path, log.chunk(0).select(names).schema, write_options=options) as writer:
        for batch in log.batches(names, CHUNK_ROWS):
            writer.write_batch(batch.select(names))


def true_logits(counts: dict[str, np.ndarray], ranks: dict[str, np.ndarray]) -> np.ndarray:
    """The logit behind the clicks, from the cells as they are seen: NaN and rank 0 are missing, and add nothing."""
    places = {column.name: np.nan_to_num(column.place(counts[column.name])) for column in COUNTS}
    logits = np.full(len(next(iter(ranks.values()))), INTERCEPT)
    for number, place in enumerate(places.values()):
        logits += (-1) ** number * 0.15 * np.tanh(place)
    for number, rank in enumerate(ranks.values()):
        logits += 0.2 * _effect(rank, number)
    for count, category, strength in TURNS_WITH_CATEGORY:
        leaning = np.sign(_effect(ranks[category], len(CATEGORIES) + CATEGORIES.index(category)))
        logits += strength * leaning * np.sin(1.5 * places[count])
    for count, other, strength in TURNS_WITH_COUNT:
        logits += strength * np.sin(1.5 * places[count]) * np.tanh(places[other])
    return logits


def _ranks(size: int, rng: np.random.Generator) -> np.ndarray:
    """Zipf ranks from 1 without a table: `P(rank = k) = log(1 + 1/k) / log(size + 1)`."""
    drawn = np.exp(rng.random(CHUNK_ROWS) * math.log(size + 1)).astype(np.uint64)
    ranks: np.ndarray = drawn.clip(1, size)
    return ranks


def _effect(ranks: np.ndarray, purpose: int) -> np.ndarray:
    """A number of mean 0 and variance 1 for each category and purpose; 0 for a missing category."""
    uniform = (_mixed(ranks + np.uint64(purpose << 40)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.where(ranks == 0, 0.0, (uniform - 0.5) * math.sqrt(12.0))


def _mixed(bits: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit of a 64-bit number moves every other."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint16)


def _codes(ranks: np.ndarray, column: int) -> pa.Array:
    """Categories as texts of eight hexadecimal digits, each its own in its column; rank 0 is null."""
    # Multiplying by an odd number permutes the 32-bit numbers, and so does folding the upper half into the lower.
    codes = (ranks.astype(np.uint32) ^ np.uint32(column << 27)) * np.uint32(0x9E3779B1)
    codes = (codes ^ (codes >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    letters = _HEX[codes.astype(">u4").view(np.uint8)]
    offsets = np.arange(0, 8 * len(ranks) + 1, 8, dtype=np.int32)
    valid = pa.array(ranks != 0).buffers()[1]
    return pa.Array.from_buffers(pa.string(), len(ranks), [valid, pa.py_buffer(offsets), pa.py_buffer(letters)])
