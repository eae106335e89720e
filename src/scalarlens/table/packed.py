"""How a packed split lies on disk: a matrix per role and storage type, the narrowest that is exact."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

ROLES = ("values", "category_ids", "labels", "groups")
#: storage types, narrowest first; the ones that PyTorch can index on every device
INTEGERS = ("uint8", "int16", "int32", "int64")
FLOATS = ("float32", "float64")


def block_file(role: str, storage: str) -> str:
    return f"{role}.{storage}.bin"


@dataclass
class ColumnRange:
    """What a column needs of its storage type, gathered while streaming over it."""

    low: float = 0.0
    high: float = 0.0
    whole: bool = True
    single: bool = True

    @classmethod
    def union(cls, parts: Iterable[ColumnRange]) -> ColumnRange:
        """What several pieces of a column need together."""
        united = cls()
        for part in parts:
            united.low, united.high = min(united.low, part.low), max(united.high, part.high)
            united.whole &= part.whole
            united.single &= part.single
        return united

    def update(self, column: np.ndarray) -> None:
        if len(column) == 0:
            return
        if column.dtype.kind == "f":
            gaps = np.isnan(column)
            present = column[~gaps]
            with np.errstate(over="ignore"):
                self.single &= bool((present.astype(np.float32) == present).all())
            signed_zero = (present == 0) & np.signbit(present)
            self.whole &= not gaps.any() and bool((present == np.round(present)).all()) and not signed_zero.any()
            column = present
        if len(column):
            self.low, self.high = min(self.low, float(column.min())), max(self.high, float(column.max()))

    def storage_type(self, floating: bool) -> str:
        """The narrowest type that is exact; beyond int32 only identifiers stay integers."""
        fitting = [t for t in INTEGERS if np.iinfo(t).min <= self.low and self.high <= np.iinfo(t).max]
        if not floating:
            return fitting[0]
        if self.whole and fitting and fitting[0] != "int64":
            return fitting[0]
        return FLOATS[0] if self.single else FLOATS[1]
