"""Which rows belong to which split: a part is a table with the split of each of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scalarlens.datasets.files import Table

#: the splits that a table may have; `shifted` is a second test split, drawn from another distribution
SPLITS = ("train", "valid", "test", "shifted")
#: the code of a row that belongs to no split
DROPPED = 255
#: shares of valid and test, unless a source says otherwise; the rest is train
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
        for code, split in enumerate(SPLITS):
            mask = self.dealt[start:stop] == code
            if mask.any():
                yield split, mask


def deal_in_order(rows: int, valid: float = VALID_SHARE, test: float = TEST_SHARE) -> np.ndarray:
    """The first rows are train, the next are valid, the last are test.

    >>> deal_in_order(10).tolist()
    [0, 0, 0, 0, 0, 0, 0, 0, 1, 2]
    """
    sizes = [round(rows * valid), round(rows * test)]
    return np.repeat(np.arange(3, dtype=np.uint8), [rows - sum(sizes), *sizes])


def deal_randomly(rows: int, seed: int, valid: float = VALID_SHARE, test: float = TEST_SHARE) -> np.ndarray:
    """The same shares, exactly, in a seeded shuffle.

    >>> np.bincount(deal_randomly(20, seed=1)).tolist()
    [16, 2, 2]
    """
    dealt = deal_in_order(rows, valid, test)
    np.random.default_rng(seed).shuffle(dealt)
    return dealt
