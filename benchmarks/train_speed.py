"""Rows per second of training, encoder by encoder, interleaved; medians with their spread.

python benchmarks/train_speed.py --device cpu --rows 40960
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import numpy as np
import torch

from scalarlens.model import CtrModel, ModelSpec
from scalarlens.table.batches import PackedSplit
from scalarlens.table.statistics import TrainingStatistics
from scalarlens.training import Recipe, fit

N, C, CATEGORIES = 13, 26, 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoders", default="deer,scalarlens,field,ple-a,daes-gate")
    parser.add_argument("--backbone", default="dnn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=40_960)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    names = chosen.encoders.split(",")
    data = made_up_split(chosen.rows).to(chosen.device)
    sample = data.batch(slice(0, min(chosen.rows, 200_000)))
    fitted = TrainingStatistics.from_arrays(sample.values.cpu().numpy(), np.tile(np.arange(CATEGORIES)[:, None], C))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(chosen.rounds + 1):
        for name in names:
            spent = epoch_seconds(name, chosen.backbone, data, fitted)
            if turn > 0:
                seconds[name].append(spent)
    report = {name: summary(chosen.rows, times, seconds[names[0]]) for name, times in seconds.items()}
    if chosen.json:
        print(json.dumps(report))
        return
    shape = f"{N} + {C} fields, batch {Recipe().batch_size}, {chosen.rows:,} rows"
    print(f"{machine(chosen.device)}; {chosen.backbone}, {shape}")
    for name, found in report.items():
        print(
            f"{name:16} {found['rows_per_second']:>12,.0f} rows/s  (spread {found['low']:,.0f} to {found['high']:,.0f})"
            f"  {found['time_ratio']:.2f} x the time of {names[0]}"
        )


def made_up_split(rows: int) -> PackedSplit:
    rng = np.random.default_rng(0)
    values = np.floor(rng.lognormal(2, 2, size=(rows, N)))
    return PackedSplit.from_arrays(values, rng.integers(2, CATEGORIES, size=(rows, C)), rng.integers(0, 2, size=rows))


def epoch_seconds(name: str, backbone: str, data: PackedSplit, fitted: TrainingStatistics) -> float:
    """One training epoch, without its validation."""
    recipe = Recipe(max_epochs=1)
    torch.manual_seed(0)
    spec = ModelSpec(name, backbone, recipe.embedding_dim, recipe.tower, recipe.category_std)
    model = CtrModel.build(spec, fitted)
    model.to(data.device)
    marks: list[float] = []

    def watch(epoch: int, done: int, rows: int, entry: object) -> None:
        if entry is None and done >= rows:
            if data.device.type == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    valid = PackedSplit([type(b)(b.role, b.columns, b.rows[:1000]) for b in data.blocks], N, C)
    if data.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    fit(model, data, valid, recipe, seed=0, progress=watch)
    return marks[0] - began


def summary(rows: int, times: list[float], reference: list[float]) -> dict[str, float]:
    ratios = [own / other for own, other in zip(times, reference, strict=True)]
    return {
        "rows_per_second": rows / statistics.median(times),
        "low": rows / max(times),
        "high": rows / min(times),
        "time_ratio": statistics.median(ratios),
    }


def machine(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


if __name__ == "__main__":
    main()
