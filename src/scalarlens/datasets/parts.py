"""Which rows belong to which split: a part is a table with the split of each of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scalarlens.datasets.files import Table

SPLITS = ("train", "valid", "test")
#: the code of a row that belongs to no split
DROPPED = 255
#: shares of valid and test in a random split; the rest is train
VALID_SHARE = TEST_SHARE = 0.1


@dataclass(frozen=True, eq=False)
class Part:
    """A table whose rows all belong to one split, or are dealt row by row: codes into `SPLITS`, or `DROPPED`."""

    table: Table
    dealt: str | np.ndarray

    @property
    def splits(self) -> tuple[str, ...]:
        if isinstance(self.dealt, str):
            return (self.dealt,)
        return tuple(split for code, split in enumerate(SPLITS) if (self.dealt == code).any())

    def members(self, start: int, stop: int) -> Iterator[tuple[str, np.ndarray]]:
        """The splits of the rows from `start` to `stop`, each with a mask over those rows."""
        if isinstance(self.dealt, str):
            yield self.dealt, np.ones(stop - start, dtype=bool)
            return
        codes = self.dealt[start:stop]
        for split in self.splits:
            yield split, codes == SPLITS.index(split)


def deal_randomly(rows: int, seed: int) -> np.ndarray:
    """A seeded shuffle of exact shares: 80 % train, 10 % valid, 10 % test.

    >>> np.bincount(deal_randomly(20, seed=1)).tolist()
    [16, 2, 2]
    """
    sizes = [int(rows * VALID_SHARE), int(rows * TEST_SHARE)]
    dealt = np.repeat(np.arange(3, dtype=np.uint8), [rows - sum(sizes), *sizes])
    np.random.default_rng(seed).shuffle(dealt)
    return dealt
