"""Rows per second of the training loader beside a plain copy of the same bytes, in turns in one run.

python benchmarks/loader.py --rows 2000000
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from scalarlens.table.batches import Block, PackedSplit, Shuffle

#: storage types in the shape of Criteo's packed columns, mixed as counts and vocabularies mix them
VALUES = ("float32", "int16", "float32", "float32", "float32", "float32", *("float32", "int16"), *["float32"] * 5)
CATEGORIES = (
    *("int16", "int16", "int32", "int32", "int16", "uint8", "int16", "int16", "uint8", "int32", "int16", "int32"),
    *("int16", "uint8", "int16", "int32", "uint8", "int16", "int16", "uint8", "int32", "uint8", "uint8", "int32"),
    *("uint8", "int32"),
)


def make_split(rows: int, rng: np.random.Generator) -> PackedSplit:
    blocks = []
    for role, types in (("values", VALUES), ("category_ids", CATEGORIES), ("labels", ("uint8",))):
        for storage in dict.fromkeys(types):
            columns = tuple(place for place, other in enumerate(types) if other == storage)
            content = rng.integers(0, 100, (rows, len(columns)), dtype=np.uint8).astype(storage)
            blocks.append(Block(role, columns, torch.from_numpy(content)))
    return PackedSplit(blocks, len(VALUES), len(CATEGORIES))


def rate(rows: int, work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return rows / (time.perf_counter() - began) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    split = make_split(chosen.rows, np.random.default_rng(0))
    shuffle = Shuffle(chosen.rows, chosen.batch_size, seed=1)
    order = list(shuffle.epoch_batches())
    row_bytes = 8 * (len(VALUES) + len(CATEGORIES)) + 4
    # As many bytes as the loader hands out in an epoch, from memory that no cache holds.
    wide = torch.ones(min(chosen.rows, 1_000_000), row_bytes, dtype=torch.uint8)

    def load() -> None:
        for index in order:
            split.batch(index)

    def load_in_order() -> None:
        for _ in split.batches(chosen.batch_size):
            pass

    def copy() -> None:
        for start in range(0, chosen.rows, chosen.batch_size):
            place = start % (len(wide) - chosen.batch_size)
            wide[place : place + chosen.batch_size].clone()

    ways = {"loader, shuffled": load, "loader, in order": load_in_order, "plain copy": copy}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(chosen.rounds):
        for name, work in ways.items():
            found[name].append(rate(chosen.rows, work))
    for name, rates in found.items():
        print(
            f"{name:18} median {statistics.median(rates):7.2f} Mrow/s, from {min(rates):.2f} to {max(rates):.2f} "
            f"({statistics.median(rates) * row_bytes / 1000:.2f} GB/s of what a batch holds)"
        )


if __name__ == "__main__":
    main()
