"""Preparation of one table in the shape of Criteo's by scalarlens and by FuxiCTR, in turns in one run.

Both read the same rows, fit on all of them, and write the packed result; scalarlens also shuffles. Memory is the
peak of the sum over all processes that a run starts, with shared pages counted once. FuxiCTR is installed into an
environment of its own.

python benchmarks/prepare_vs_fuxictr.py --rows 500000 --rounds 3 --folder /tmp/fuxictr
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import uuid
import venv
from pathlib import Path
from typing import NamedTuple

from scalarlens.datasets.click_log import write_criteo_tsv
from scalarlens.datasets.criteo import COLUMNS

#: FuxiCTR 2.3 names an argument of Polars that Polars 2 has dropped
FUXICTR = ("torch", "polars<2", "fuxictr>=2.3")
MARK = "PREPARE_BENCHMARK_RUN"

OURS = """
import sys
from scalarlens.datasets.files import open_table
from scalarlens.datasets.parts import Part
from scalarlens.datasets.prepare import prepare
from scalarlens.table.schema import CategoricalColumn, NumericColumn, Schema
numeric = tuple(NumericColumn(f"I{i}") for i in range(1, 14))
categorical = tuple(CategoricalColumn(f"C{i}") for i in range(1, 27))
schema = Schema(numeric, categorical, label="label")
prepare(schema, [Part(open_table(sys.argv[1]), "train")], sys.argv[2], shuffle_seed=1)
"""
THEIRS = """
import sys
from fuxictr.preprocess import FeatureProcessor, build_dataset
numeric = [f"I{i}" for i in range(1, 14)]
categorical = [f"C{i}" for i in range(1, 27)]
columns = [
    {"name": numeric, "active": True, "dtype": "float", "type": "numeric"},
    {"name": categorical, "active": True, "dtype": "str", "type": "categorical"},
]
label = {"name": "label", "dtype": "float"}
processor = FeatureProcessor(feature_cols=columns, label_col=label, dataset_id="criteo", data_root=sys.argv[2])
build_dataset(processor, train_data=sys.argv[1], data_format="csv", sep="\\t", min_categr_count=1)
"""


class Run(NamedTuple):
    seconds: float
    peak: float


def install(folder: Path) -> Path:
    """The Python of an environment that has FuxiCTR."""
    python = folder / "environment" / "bin" / "python"
    if not python.exists():
        venv.create(folder / "environment", with_pip=True)
    known = subprocess.run([python, "-c", "import fuxictr"], capture_output=True, check=False).returncode == 0
    if not known:
        for package in FUXICTR:  # in turn, so that the first are kept
            subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
    return python


def measure(python: Path | str, script: str, table: Path, out: Path) -> Run:
    """One preparation in a process of its own."""
    shutil.rmtree(out, ignore_errors=True)
    mark = uuid.uuid4().hex
    peak, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            peak[0] = max(peak[0], memory_of(mark))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        command = [str(python), "-c", script, str(table), str(out)]
        done = subprocess.run(command, env={**os.environ, MARK: mark}, capture_output=True, text=True, check=False)
    finally:
        seconds = time.perf_counter() - began
        ended.set()
        watcher.join()
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    return Run(seconds, peak[0])


def memory_of(mark: str) -> float:
    """Megabytes of all processes whose environment carries a mark; a shared page counts once in all."""
    total = 0
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue  # it has ended meanwhile
    return total / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True)
    chosen = parser.parse_args()
    folder: Path = chosen.folder
    folder.mkdir(parents=True, exist_ok=True)
    python = install(folder)
    bare, table = folder / "bare.tsv", folder / f"criteo-{chosen.rows}.tsv"
    if not table.exists():
        write_criteo_tsv(bare, chosen.rows, seed=1)
        table.write_bytes("\t".join(COLUMNS).encode() + b"\n" + bare.read_bytes())
        bare.unlink()
    same = table.with_suffix(".csv")
    if not same.exists():
        same.symlink_to(table.name)  # FuxiCTR takes the format from the name
    runs: dict[str, list[Run]] = {"scalarlens": [], "fuxictr": []}
    for _ in range(chosen.rounds):
        runs["scalarlens"].append(measure(sys.executable, OURS, table, folder / "ours"))
        runs["fuxictr"].append(measure(python, THEIRS, same, folder / "theirs"))
        for name, found in runs.items():
            print(f"{name:11} {chosen.rows / found[-1].seconds:9,.0f} rows/s, {found[-1].peak:6,.0f} MiB", flush=True)
    rates = {name: statistics.median(chosen.rows / run.seconds for run in found) for name, found in runs.items()}
    peaks = {name: statistics.median(run.peak for run in found) for name, found in runs.items()}
    for name in runs:
        print(f"median {name:11} {rates[name]:9,.0f} rows/s, peak {peaks[name]:6,.0f} MiB")
    print(
        f"scalarlens: {rates['scalarlens'] / rates['fuxictr']:.1f} times the rows per second, "
        f"{peaks['scalarlens'] / peaks['fuxictr']:.2f} times the memory"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
