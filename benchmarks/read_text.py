"""Reading a tab-separated file as text: pyarrow, which preparation uses, and Polars; interleaved, medians and spread.

python benchmarks/read_text.py --rows 500000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl

from scalarlens.datasets.click_log import write_criteo_tsv
from scalarlens.datasets.files import open_text

COLUMNS = tuple(f"column_{i}" for i in range(1, 41))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "criteo.tsv")
        write_criteo_tsv(path, chosen.rows, seed=1)
        readers: dict[str, Callable[[Path], int]] = {"pyarrow": read_with_arrow, "polars": read_with_polars}
        rates: dict[str, list[float]] = {name: [] for name in readers}
        for turn in range(chosen.rounds + 1):
            for name, read in readers.items():
                began = time.perf_counter()
                assert read(path) == chosen.rows
                if turn > 0:
                    rates[name].append(chosen.rows / (time.perf_counter() - began))
    for name, found in rates.items():
        print(f"{name:8} {statistics.median(found):>12,.0f} rows/s  ({min(found):,.0f} to {max(found):,.0f})")


def read_with_arrow(path: Path) -> int:
    """As preparation reads it: batches of strings, in bounded memory."""
    return sum(batch.num_rows for batch in open_text(path, "\t", columns=COLUMNS).batches(COLUMNS, 65_536))


def read_with_polars(path: Path) -> int:
    """The same with Polars' streaming engine, which hands over whole columns of strings in batches."""
    lazy = pl.scan_csv(path, separator="\t", has_header=False, infer_schema=False, quote_char=None)
    return sum(batch.height for batch in lazy.collect_batches(chunk_size=65_536))


if __name__ == "__main__":
    main()
