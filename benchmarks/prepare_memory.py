"""Peak memory and rows per second of a preparation, for tables in the shape of Criteo's of several sizes.

python benchmarks/prepare_memory.py --rows 1000000,3000000,10000000 --memory-limit 2GB --folder /tmp/prepare
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from scalarlens.datasets.click_log import write_criteo_tsv

#: the largest peak may exceed the smallest by this much
ALLOWED = 0.15


#: the peak that the kernel keeps of a process begins with that of its parent, so the process reads its own
RUN = """
import re, sys
from pathlib import Path
from scalarlens.cli import main
code = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))
sys.exit(code)
"""


def measure(table: Path, out: Path, limit: str, min_count: int) -> tuple[float, float]:
    """Seconds and peak megabytes of one preparation in a process of its own, from the counting of rows to the end."""
    source = ["--source", "criteo", "--from", str(table), "--option", f"source.min_count={min_count}"]
    options = ["--split", "random", "--seed", "1", "--memory-limit", limit, "--out", str(out), "--quiet"]
    began = time.perf_counter()
    command = [sys.executable, "-c", RUN, "prepare", *source, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - began, int(done.stdout.split()[-1]) / (1 << 10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1000000,3000000,10000000")
    parser.add_argument("--memory-limit", default="2GB")
    parser.add_argument("--min-count", type=int, default=1, help="1 keeps every category: the hardest case")
    parser.add_argument("--vocabulary-scale", type=float, default=10.0, help="of Criteo's vocabulary sizes")
    parser.add_argument("--folder", type=Path, help="where the tables go; they stay there, and are found again")
    chosen = parser.parse_args()
    peaks = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for rows in map(int, chosen.rows.split(",")):
            table = folder / f"criteo-{rows}-{chosen.vocabulary_scale:g}.tsv"
            if not table.exists():
                write_criteo_tsv(table, rows, seed=1, vocabulary_scale=chosen.vocabulary_scale)
            seconds, peak = measure(table, folder / "prepared", chosen.memory_limit, chosen.min_count)
            with pa.ipc.open_file(folder / "prepared" / "vocabularies.arrow") as vocabularies:
                categories = vocabularies.read_all().num_rows
            print(
                f"{rows:>11,} rows, {table.stat().st_size / 1e6:,.0f} MB, {categories:,} categories: peak {peak:,.0f} "
                f"MiB, {seconds:.1f} s, {rows / seconds:,.0f} rows/s",
                flush=True,
            )
            peaks.append(peak)
            shutil.rmtree(folder / "prepared")
    growth = max(peaks) / min(peaks) - 1
    print(f"the largest peak is {growth:.1%} above the smallest; {ALLOWED:.0%} are allowed")
    return 0 if growth <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
