"""The paper's controlled data: a known logit, in which a number may mean something else in another context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from scalarlens.datasets.files import Table
from scalarlens.datasets.parts import Part
from scalarlens.datasets.source import Opened, Source, SplitRule, schema_of, sources
from scalarlens.errors import unknown_name

SCHEMA = schema_of("x0 x1 x2", "c0 c1", label="y")
#: rows of each split; the shifted one has other categories and other correlations, and the same response
SPLIT_ROWS = {"train": 20_000, "valid": 5_000, "test": 10_000, "shifted": 10_000}
CATEGORY_SHARES = ((0.52, 0.27, 0.15, 0.06), (0.62, 0.28, 0.10))


class Draw(NamedTuple):
    """Rows of the controlled process. *Shape*: numbers `[n, 3]`, categories `[n, 2]`, labels and logits `[n]`."""

    numbers: np.ndarray
    categories: np.ndarray
    labels: np.ndarray
    logits: np.ndarray


@sources.register("controlled")
class Controlled(Source):
    """The controlled process of the paper (Appendix A): 3 numbers, 2 categories, one of four known responses.

    `mechanism` is `add`, `cat`, `num` or `mix`. The true logit is the column `true_logit`, outside the schema. For
    one seed, numbers and categories are the same under every mechanism.

    >>> opened = Controlled(mechanism="cat").open(seed=1)
    >>> [(part.dealt, part.table.count_rows()) for part in opened.parts]
    [('train', 20000), ('valid', 5000), ('test', 10000), ('shifted', 10000)]
    """

    licence = "none is needed: the rows are made here"
    obtain = "nothing is to be obtained: the rows are made here"
    splits = (
        SplitRule(
            "official",
            "20,000 train, 5,000 valid, 10,000 test, and 10,000 shifted, drawn with the seed from a reversed context",
            seeded=True,
        ),
    )
    paper_split = "official"

    def __init__(self, *, mechanism: str = "mix") -> None:
        if mechanism not in RESPONSES:
            raise unknown_name("mechanism", mechanism, RESPONSES)
        self.mechanism = mechanism

    def _open(self, place: Path, split: str, seed: int) -> Opened:
        tables = [_table(name, self.mechanism, seed) for name in SPLIT_ROWS]
        return Opened(SCHEMA, tuple(map(Part, tables, SPLIT_ROWS)))


def draw(split: str, mechanism: str, seed: int, rows: int | None = None) -> Draw:
    """One split of the process: `y ~ Bernoulli(sigmoid(q(x, c) + r(x, c) - 0.18))`.

    NOTE[DIFF] The paper does not say how its seeds become random numbers; each split here has a stream of its own.

    >>> draw("train", "add", seed=1, rows=4).numbers.shape
    (4, 3)
    """
    n = SPLIT_ROWS[split] if rows is None else rows
    rng = np.random.default_rng([seed, list(SPLIT_ROWS).index(split)])
    direction = -1 if split == "shifted" else 1
    c0, c1 = (rng.choice(len(shares), n, p=shares[::direction]) for shares in CATEGORY_SHARES)
    x0, x1, x2 = rng.uniform(-1.0, 1.0, (3, n))
    x1 = np.clip(0.78 * x1 + direction * 0.16 * (c0 - 1.5), -1.0, 1.0)
    x2 = np.clip(0.82 * x2 + direction * 0.14 * (c1 - 1), -1.0, 1.0)
    numbers, categories = np.stack([x0, x1, x2], 1), np.stack([c0, c1], 1)
    logits = true_logits(numbers, categories, mechanism)
    labels = (rng.random(n) < 1 / (1 + np.exp(-logits))).astype(np.uint8)
    return Draw(numbers, categories, labels, logits)


def true_logits(numbers: np.ndarray, categories: np.ndarray, mechanism: str) -> np.ndarray:
    """The logit that made the labels, `[n]`."""
    (x0, x1, x2), (c0, c1) = numbers.T, categories.T
    q = 0.65 * np.sin(np.pi * x0) + 0.35 * x1 - 0.25 * x2 + 0.18 * (c0 - 1.5) - 0.12 * (c1 - 1.0)
    logits: np.ndarray = q + RESPONSES[mechanism](x0, x1, x2, c0, c1) - 0.18
    return logits


Response = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def _add(x0: np.ndarray, x1: np.ndarray, x2: np.ndarray, c0: np.ndarray, c1: np.ndarray) -> np.ndarray:
    return 1.10 * np.sin(1.35 * np.pi * x0)


def _cat(x0: np.ndarray, x1: np.ndarray, x2: np.ndarray, c0: np.ndarray, c1: np.ndarray) -> np.ndarray:
    return (0.85 + 0.22 * c0 + 0.14 * c1) * np.sin(np.pi * (x0 + 0.16 * (c0 - 1.5) - 0.11 * (c1 - 1)))


def _num(x0: np.ndarray, x1: np.ndarray, x2: np.ndarray, c0: np.ndarray, c1: np.ndarray) -> np.ndarray:
    return 1.25 * np.sin(np.pi * (x0 + 0.58 * x1)) + 1.05 * x0 * x2


def _mix(x0: np.ndarray, x1: np.ndarray, x2: np.ndarray, c0: np.ndarray, c1: np.ndarray) -> np.ndarray:
    size = 0.72 + 0.17 * c0 + 0.11 * c1 + 0.28 * np.tanh(2 * x2)
    return size * np.sin(np.pi * (x0 + 0.13 * (c0 - 1.5) - 0.09 * (c1 - 1) + 0.45 * x1)) + 0.85 * x0 * x2


RESPONSES: dict[str, Response] = {"add": _add, "cat": _cat, "num": _num, "mix": _mix}


@dataclass(frozen=True)
class DrawnFile:
    """One split of the process as the file of a table."""

    split: str
    mechanism: str
    seed: int
    columns: tuple[str, ...] = ("x0", "x1", "x2", "c0", "c1", "y", "true_logit")

    @property
    def path(self) -> Path:
        return Path(f"controlled-{self.mechanism}-{self.split}")

    @cached_property
    def _rows(self) -> pa.RecordBatch:
        drawn = draw(self.split, self.mechanism, self.seed)
        columns = [*drawn.numbers.T, *drawn.categories.T, drawn.labels, drawn.logits]
        return pa.RecordBatch.from_arrays([pa.array(np.ascontiguousarray(c)) for c in columns], self.columns)

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        yield self._rows

    def count_rows(self) -> int:
        return SPLIT_ROWS[self.split]


def _table(split: str, mechanism: str, seed: int) -> Table:
    file = DrawnFile(split, mechanism, seed)
    return Table(file.path, file.columns, (file,))
