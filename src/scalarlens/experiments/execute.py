"""One run, from shared device-resident splits to a record: train, select on validation, score test once."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import scalarlens
from scalarlens.datasets.prepared import PreparedTable
from scalarlens.errors import CheckFailed, DataError, UsageError, unknown_name
from scalarlens.experiments.spec import RunRecord, RunSpec, undefined_metrics
from scalarlens.job import evaluate
from scalarlens.model import CtrModel
from scalarlens.storage import one_line
from scalarlens.table.batches import Block, PackedSplit
from scalarlens.table.statistics import TrainingStatistics
from scalarlens.table.tensorizer import InputScale, Tensorizer
from scalarlens.training import fit
from scalarlens.training.loop import Progress

#: what a run needs
SPLITS = ("train", "valid", "test")
#: what trains a model: eager execution, which every other way is tied to by a test
WAYS = {"eager": fit}


@dataclass(frozen=True)
class Execution:
    """Where and how runs are executed; none of it is part of what they are, all of it is in their records."""

    device: str
    threads: int
    runner: str = "local"
    jobs: int = 1
    way: str = "eager"

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise unknown_name("way of executing", self.way, WAYS)
        if min(self.threads, self.jobs) < 1:
            raise UsageError(f"threads and jobs start at 1; got {self.threads} and {self.jobs}")


class SharedTables:
    """Prepared tables on one device, by digest: read and standardized once, however many runs look at them.

    Input scales and row limits are views of the same memory: the Tensorizer scales a batch as it is taken.
    """

    def __init__(self, tables: Iterable[str | Path | PreparedTable], device: torch.device | str) -> None:
        self.device = torch.device(device)
        opened = [table if isinstance(table, PreparedTable) else PreparedTable(table) for table in tables]
        self._tables = {table.digest: table for table in opened}
        self._blocks: dict[tuple[str, str], tuple[Block, ...]] = {}
        self._fitted: dict[tuple[str, InputScale], tuple[Tensorizer, TrainingStatistics]] = {}
        for table in opened:
            absent = [name for name in SPLITS if name not in table.splits]
            if absent:
                raise DataError(f"{table.folder} has no {absent[0]} split, and a run needs train, valid and test")

    def require(self, spec: RunSpec) -> PreparedTable:
        """The table that a spec names."""
        if spec.data not in self._tables:
            known = ", ".join(f"{digest[:8]} in {table.folder}" for digest, table in self._tables.items())
            raise UsageError(f"no table at hand has the digest {spec.data[:8]} that {spec} needs; here: {known or '-'}")
        return self._tables[spec.data]

    def statistics(self, spec: RunSpec) -> TrainingStatistics:
        """Those of the whole train split, in the scale that encoders see."""
        return self._scaled(spec)[1]

    def split(self, spec: RunSpec, name: str) -> PackedSplit:
        """One split as a run sees it: only train is cut to the row limit."""
        key = spec.data, name
        table = self.require(spec)
        if key not in self._blocks:
            self._blocks[key] = table.split(name).to(self.device).blocks
        stop = spec.limit_rows if name == "train" else None
        blocks = [Block(block.role, block.columns, block.rows[:stop]) for block in self._blocks[key]]
        counts = len(table.schema.numeric), len(table.schema.categorical)
        return PackedSplit(blocks, *counts, self._scaled(spec)[0].scale)

    def _scaled(self, spec: RunSpec) -> tuple[Tensorizer, TrainingStatistics]:
        key = spec.data, spec.input_scale
        if key not in self._fitted:
            table = self.require(spec)
            tensorizer = Tensorizer(table.schema, table.statistics, spec.input_scale)
            self._fitted[key] = tensorizer, tensorizer.encoder_statistics
        return self._fitted[key]


def execute(
    spec: RunSpec, tables: SharedTables, execution: Execution, *, attempt: int = 1, progress: Progress | None = None
) -> RunRecord:
    """Train and judge one run. Whatever goes wrong in it is in its record; nothing is written here."""
    tables.require(spec)
    history: list[dict[str, Any]] = []

    def keep(epoch: int, done: int, rows: int, entry: dict[str, Any] | None) -> None:
        if entry is not None:
            history.append(entry)
        if progress is not None:
            progress(epoch, done, rows, entry)

    timings: dict[str, Any] = {"started": datetime.now(UTC).isoformat(timespec="seconds")}
    began = time.perf_counter()
    try:
        with pinned_threads(execution.threads):
            outcome = _train_and_judge(spec, tables, execution, keep, timings)
    except Exception as error:  # one run of a thousand must not end the other ones, whatever it is that broke
        outcome = {"status": "failed", "error": {"type": type(error).__name__, "message": one_line(error)}}
    timings["seconds"] = round(time.perf_counter() - began, 6)
    return RunRecord(
        spec,
        attempts=attempt,
        execution=asdict(execution),
        versions=versions(),
        machine=machine(tables.device),
        timings=timings,
        history=history,
        **outcome,
    )


def _train_and_judge(
    spec: RunSpec,
    tables: SharedTables,
    execution: Execution,
    keep: Progress,
    timings: dict[str, Any],
) -> dict[str, Any]:
    """The fields of a done record."""
    clock = _Clock(timings)
    train, valid = tables.split(spec, "train"), tables.split(spec, "valid")
    clock.lap("load_seconds")
    torch.manual_seed(spec.seed)
    model = CtrModel.build(spec.model, tables.statistics(spec)).to(tables.device)
    clock.lap("build_seconds")
    result = WAYS[execution.way](model, train, valid, spec.recipe, seed=spec.seed, progress=keep)
    clock.lap("train_seconds")
    judged = {"valid": evaluate(model, valid)}
    # Opened here for the first time in the run: selection is over.
    test = tables.split(spec, "test")
    judged["test"] = evaluate(model, test)
    clock.lap("evaluate_seconds")
    undefined = undefined_metrics(judged)
    if undefined:
        raise CheckFailed(f"not defined for this run: {', '.join(undefined)}")
    return {
        "status": "done",
        "best_epoch": result.best_epoch,
        "metrics": judged,
        "parameters": count_parameters(model),
        "rows": {"train": train.rows, "valid": valid.rows, "test": test.rows},
    }


class _Clock:
    """Writes the seconds of one part of a run after the other."""

    def __init__(self, timings: dict[str, Any]) -> None:
        self._timings = timings
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._timings[name], self._last = round(now - self._last, 6), now


@contextmanager
def pinned_threads(threads: int) -> Iterator[None]:
    """While the context lasts, PyTorch computes on so many threads: a sum over another number has other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def count_parameters(model: CtrModel) -> dict[str, int]:
    """Trained numbers of the whole model and of its parts; `categories` has both lookup tables."""
    parts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    tables = parts["categories"] + parts.get("category_weights", 0)
    counts = {"encoder": parts["encoder"], "backbone": parts["backbone"], "categories": tables}
    return {**counts, "total": sum(counts.values())}


@cache
def versions() -> dict[str, str]:
    """What a result may depend on besides the spec."""
    return {
        "scalarlens": scalarlens.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


@cache
def machine(device: torch.device) -> dict[str, Any]:
    """What the machine is, without its name."""
    graphics = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    system = f"{platform.system()} {platform.machine()}"
    return {"system": system, "cores": os.cpu_count(), "gpu": graphics, "cpu": _processor()}


def _processor() -> str:
    """The model of the processor, as the kernel names it where one does."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
