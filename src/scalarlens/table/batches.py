"""Batch, packed splits that are memory-mapped or live on a device, and a seeded shuffle that can be resumed."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scalarlens.errors import DataError
from scalarlens.table.packed import block_file


class Batch(NamedTuple):
    """Rows as tensors. *Shape*: values `[B, N]` float64 (NaN = missing), category_ids `[B, C]` int64, labels `[B]`."""

    values: Tensor
    category_ids: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Block:
    """Columns of one role and one storage type, row by row: a matrix of the narrowest type that holds them exactly."""

    role: str
    columns: tuple[int, ...]
    rows: Tensor

    @cached_property
    def places(self) -> slice | list[int]:
        """Where the columns go in the wide matrix of their role."""
        first = self.columns[0] if self.columns else 0
        run = slice(first, first + len(self.columns))
        return run if self.columns == tuple(range(first, run.stop)) else list(self.columns)


class PackedSplit:
    """One split: a few row-major matrices, widened to float64 and int64 as batches are taken.

    >>> split = PackedSplit.from_arrays(np.array([[1.5], [np.nan]]), np.array([[2], [0]]), np.array([0, 1]))
    >>> split.batch(slice(0, 2)).values.tolist()
    [[1.5], [nan]]
    """

    def __init__(
        self, blocks: Sequence[Block], n_values: int, n_categories: int, scale: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.blocks = tuple(blocks)
        self.n_values = n_values
        self.n_categories = n_categories
        self._scale = scale or (lambda values: values)
        self._host = [block.rows.numpy() for block in self.blocks] if self.device.type == "cpu" else []

    @classmethod
    def from_arrays(
        cls,
        values: np.ndarray,
        category_ids: np.ndarray,
        labels: np.ndarray,
        scale: Callable[[Tensor], Tensor] | None = None,
    ) -> PackedSplit:
        """A split of arrays in memory, without narrowing."""
        arrays: dict[str, np.ndarray] = {
            "values": np.asarray(values, np.float64),
            "category_ids": np.asarray(category_ids, np.int64),
            "labels": np.asarray(labels, np.uint8)[:, None],
        }
        blocks = [Block(role, tuple(range(a.shape[1])), torch.from_numpy(a.copy())) for role, a in arrays.items()]
        return cls(blocks, arrays["values"].shape[1], arrays["category_ids"].shape[1], scale)

    @property
    def rows(self) -> int:
        return len(self._only("labels"))

    @property
    def device(self) -> torch.device:
        return self._only("labels").device

    @property
    def labels(self) -> Tensor:
        """All labels, `[rows]` uint8."""
        return self._only("labels")[:, 0]

    @property
    def groups(self) -> Tensor | None:
        """Group codes, `[rows]`, where the schema names a group."""
        return next((block.rows[:, 0] for block in self.blocks if block.role == "groups"), None)

    def _only(self, role: str) -> Tensor:
        return next(block.rows for block in self.blocks if block.role == role)

    def to(self, device: torch.device | str) -> PackedSplit:
        """The same split on another device."""
        blocks = [Block(block.role, block.columns, block.rows.to(device)) for block in self.blocks]
        return PackedSplit(blocks, self.n_values, self.n_categories, self._scale)

    def batch(self, index: slice | Tensor) -> Batch:
        """The rows at `index`, in that order, without synchronising with the device."""
        values, category_ids, labels = self._gather_on_host(index) if self._host else self._gather(index)
        return Batch(self._scale(values), category_ids, labels.to(torch.float32))

    def _gather_on_host(self, index: slice | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """NumPy gathers short rows twice as fast as PyTorch, and widens and places them in one pass."""
        place = index if isinstance(index, slice) else np.asarray(np.from_dlpack(index), np.int64)
        n = index.stop - index.start if isinstance(index, slice) else len(index)
        wide = {"values": np.empty((n, self.n_values)), "category_ids": np.empty((n, self.n_categories), np.int64)}
        for block, rows in zip(self.blocks, self._host, strict=True):
            if block.role in wide:
                wide[block.role][:, block.places] = rows[place] if isinstance(place, slice) else rows.take(place, 0)
        return torch.from_numpy(wide["values"]), torch.from_numpy(wide["category_ids"]), _take(self.labels, index)

    def _gather(self, index: slice | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = index.stop - index.start if isinstance(index, slice) else len(index)
        wide = {
            "values": torch.empty(n, self.n_values, dtype=torch.float64, device=self.device),
            "category_ids": torch.empty(n, self.n_categories, dtype=torch.int64, device=self.device),
        }
        for block in self.blocks:
            if block.role in wide:
                _scatter(wide[block.role], block, index)
        return wide["values"], wide["category_ids"], _take(self._only("labels"), index)[:, 0]

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """All rows in their own order."""
        for start in range(0, self.rows, batch_size):
            yield self.batch(slice(start, min(start + batch_size, self.rows)))


def _take(rows: Tensor, index: slice | Tensor) -> Tensor:
    return rows[index] if isinstance(index, slice) else rows.index_select(0, index)


def _scatter(target: Tensor, block: Block, index: slice | Tensor) -> None:
    rows = _take(block.rows, index)
    if isinstance(block.places, slice):
        target[:, block.places] = rows
        return
    for position, column in enumerate(block.columns):
        target[:, column] = rows[:, position]


class Shuffle:
    """The order of training rows: a pure function of (seed, epoch), at a position that can be saved and restored.

    >>> shuffle = Shuffle(rows=5, batch_size=2, seed=7)
    >>> first = [index.tolist() for index in shuffle.epoch_batches()]
    >>> again = Shuffle(rows=5, batch_size=2, seed=7)
    >>> again.restore({"epoch": 0, "batch": 1})
    >>> [index.tolist() for index in again.epoch_batches()] == first[1:]
    True
    """

    def __init__(self, rows: int, batch_size: int, seed: int, device: torch.device | str = "cpu") -> None:
        if rows < 1:
            raise DataError("training needs at least one row; the split has none")
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.epoch = 0
        self.batch = 0
        self._device = device
        # A last batch of one row is joined to its neighbour: batch statistics need two.
        self.batches_per_epoch = max(1, (rows + batch_size - 2) // batch_size) if batch_size > 1 else rows

    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch}

    def restore(self, position: dict[str, int]) -> None:
        self.epoch, self.batch = position["epoch"], position["batch"]

    def epoch_batches(self) -> Iterator[Tensor]:
        """Row indices of what is left of this epoch; the position moves before a batch is handed out."""
        order = torch.from_numpy(np.random.default_rng([self.seed, self.epoch]).permutation(self.rows))
        if torch.device(self._device).type == "cuda":
            order = order.pin_memory()  # so that not even the copy of an epoch's order waits for the device
        order = order.to(self._device, non_blocking=True)
        while self.batch < self.batches_per_epoch:
            start = self.batch * self.batch_size
            self.batch += 1
            stop = self.rows if self.batch == self.batches_per_epoch else start + self.batch_size
            yield order[start:stop]
        self.epoch += 1
        self.batch = 0


def open_blocks(folder: Path, description: dict[str, Any]) -> list[Block]:
    """Map the matrices of a split into memory; a file of another size than described is refused."""
    blocks = []
    for entry in description["blocks"]:
        path = folder / block_file(entry["role"], entry["type"])
        shape = (description["rows"], len(entry["columns"]))
        wanted = shape[0] * shape[1] * np.dtype(entry["type"]).itemsize
        found = path.stat().st_size if path.exists() else None
        if found != wanted:
            raise DataError(f"{path} holds {found} bytes, the manifest promises {wanted}; prepare the table again")
        mapped = _mapped(path, entry["type"]).reshape(shape) if wanted else np.empty(shape, entry["type"])
        blocks.append(Block(entry["role"], tuple(entry["columns"]), torch.from_numpy(mapped)))
    return blocks


def _mapped(path: Path, storage: str) -> np.ndarray:
    """A file in memory, copy-on-write, because PyTorch has no read-only tensors; nothing here writes.

    The system starts to read it at once and in order, where batches would ask for it page by page.
    """
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_WILLNEED"):
        content.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(content, storage)
