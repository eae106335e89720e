"""Kill trainings at random moments, resume them, and compare every byte with a training that was never disturbed.

python benchmarks/kill_resume.py --kills 20 --seed 0
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from scalarlens.cli import main as scalarlens
from scalarlens.datasets.click_log import SCHEMA, make_click_log
from scalarlens.job import ARTIFACT_FOLDER
from scalarlens.storage import sha256_of_file
from scalarlens.training.checkpoint import load_checkpoint
from scalarlens.training.loop import HISTORY_FILE

#: everything that a training carries from batch to batch is in use
OPTIONS = (
    "recipe.averaging=0.9",
    "recipe.dropout=0.1",
    "recipe.plateau_factor=0.5",
    "recipe.batch_norm=true",
    "recipe.batch_size=64",
    "recipe.embedding_dim=4",
    "recipe.hidden=[16,8]",
    "recipe.learning_rate=0.01",
    "recipe.patience=3",
    "recipe.max_epochs=10",
)
KILLED = -9


class Training(NamedTuple):
    """A training as a command; a checkpoint follows every batch."""

    data: Path
    out: Path

    def command(self, *more: str) -> list[str]:
        options = [argument for option in OPTIONS for argument in ("--option", option)]
        parts = ["--encoder", "scalarlens", "--backbone", "deepfm", "--input-scale", "raw", "--seed", "2026"]
        target = ["--out", str(self.out), "--device", "cpu", "--checkpoint-seconds", "0", "--quiet"]
        return ["train", str(self.data), *parts, *options, *target, *more]

    def start(self, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "scalarlens.cli", *self.command(*more)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, *more: str) -> float:
        """Run to the end; the seconds that it took."""
        began = time.monotonic()
        _ended(self.start(*more), well=(0,))
        return time.monotonic() - began

    def kill(self, moment: Callable[[float], bool], *more: str) -> bool:
        """Start, and send SIGKILL as soon as `moment(seconds)` is true; false if the training ended before that."""
        began = time.monotonic()
        process = self.start(*more)
        while process.poll() is None and not moment(time.monotonic() - began):
            time.sleep(2e-4)
        process.kill()
        return _ended(process, well=(0, KILLED)) == KILLED

    def bits(self) -> dict[str, str]:
        """SHA-256 of the history and of every file of the artifact."""
        files = [self.out / HISTORY_FILE, *sorted((self.out / ARTIFACT_FOLDER).iterdir())]
        return {str(path.relative_to(self.out)): sha256_of_file(path) for path in files}

    def history(self) -> list[dict[str, float]]:
        """The epochs that have ended."""
        path = self.out / HISTORY_FILE
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def position(self) -> str:
        """How far the newest checkpoint is, in words."""
        found = load_checkpoint(self.out) if self.out.exists() else None
        if found is None:
            return "before the first checkpoint"
        if (self.out / ARTIFACT_FOLDER).exists():
            return "after the artifact"
        position = found[1]["position"]
        return f"in epoch {position['epoch'] + 1} after {position['batch']} batches"


def _ended(process: subprocess.Popen[str], well: tuple[int, ...]) -> int:
    _, complaint = process.communicate()
    if process.returncode not in well:
        raise RuntimeError(f"a training ended with exit code {process.returncode}: {complaint}")
    return process.returncode


def prepare_table(folder: Path, rows: int) -> Path:
    """A small made click log, prepared."""
    pq.write_table(make_click_log(rows, seed=7).table, folder / "log.parquet")
    (folder / "schema.toml").write_text(SCHEMA.to_toml(), encoding="utf-8")
    source = ["--schema", str(folder / "schema.toml"), "--train", str(folder / "log.parquet")]
    with contextlib.redirect_stdout(io.StringIO()):
        code = scalarlens(["prepare", *source, "--split", "random", "--seed", "1", "--out", str(folder / "data")])
    if code != 0:
        raise RuntimeError(f"preparing the table ended with exit code {code}")
    return folder / "data"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=6000)
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = prepare_table(folder, chosen.rows)
        undisturbed = Training(data, folder / "undisturbed")
        # Twice, because the first start of Python is slower, and to see that two trainings end in the same bits.
        whole = min(undisturbed.finish(), Training(data, folder / "again").finish())
        if Training(data, folder / "again").bits() != undisturbed.bits():
            print("two undisturbed trainings differ; there is nothing to compare with")
            return 1
        history = undisturbed.history()
        rates = {entry["learning_rate"] for entry in history}
        print(f"undisturbed: {whole:.2f} s, {len(history)} epochs, {len(rates)} learning rates", flush=True)
        same = kills = attempts = 0
        while kills < chosen.kills:
            attempts += 1
            training, delay = Training(data, folder / f"killed-{attempts}"), chance.uniform(0.0, whole)
            if not training.kill(lambda seconds, delay=delay: seconds >= delay):
                print(f"a training ended before its kill after {delay:.2f} s; another one is killed", flush=True)
                continue
            kills += 1
            position = training.position()
            training.finish("--resume")
            differing = sorted(set(training.bits().items()) ^ set(undisturbed.bits().items()))
            same += not differing
            verdict = "same bits" if not differing else "other " + ", ".join(sorted({name for name, _ in differing}))
            print(f"kill {kills}: after {delay:.2f} s, {position}: resumed to {verdict}", flush=True)
    print(f"{same} of {chosen.kills} resumed to the same bits")
    return 0 if same == chosen.kills else 1


if __name__ == "__main__":
    sys.exit(main())
