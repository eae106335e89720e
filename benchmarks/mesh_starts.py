"""Where the mesh starts: test AUC and rows per mesh interval for each start, on prepared tables.

python benchmarks/mesh_starts.py census=data/census bank=data/bank --seeds 2026,2027,2028 --device auto
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch

from scalarlens.datasets.prepared import PreparedTable
from scalarlens.job import choose_device, evaluate
from scalarlens.model import CtrModel, ModelSpec
from scalarlens.table.tensorizer import Tensorizer
from scalarlens.training import Recipe, fit

STARTS = ("quantile", "uniform", "blend")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--encoders", default="scalarlens,deer")
    parser.add_argument("--backbone", default="dnn")
    parser.add_argument("--starts", default=",".join(STARTS))
    parser.add_argument("--seeds", default="2026,2027,2028")
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="JSON lines, one per run")
    chosen = parser.parse_args()
    recipe, device = Recipe(batch_size=chosen.batch_size), choose_device(chosen.device)
    for text in chosen.tables:
        name, _, folder = text.partition("=")
        table = PreparedTable(folder)
        for encoder, start in itertools.product(chosen.encoders.split(","), chosen.starts.split(",")):
            runs = [
                run(table, encoder, start, chosen.backbone, recipe, int(s), device) for s in chosen.seeds.split(",")
            ]
            if chosen.out is not None:
                with chosen.out.open("a") as file:
                    for found in runs:
                        print(json.dumps({"table": name, "encoder": encoder, "start": start, **found}), file=file)
            print(f"{name:10} {encoder:11} {start:9} {line(runs)}", flush=True)


def run(
    table: PreparedTable, encoder: str, start: str, backbone: str, recipe: Recipe, seed: int, device: torch.device
) -> dict[str, float]:
    tensorizer = Tensorizer(table.schema, table.statistics, "raw")
    spec = ModelSpec(encoder, backbone, recipe.embedding_dim, recipe.tower, recipe.category_std, {"mesh_start": start})
    torch.manual_seed(seed)
    model = CtrModel.build(spec, tensorizer.encoder_statistics).to(device)
    splits = {name: table.split(name, tensorizer.scale).to(device) for name in ("train", "valid", "test")}
    began = time.perf_counter()
    result = fit(model, splits["train"], splits["valid"], recipe, seed=seed)
    seconds = time.perf_counter() - began
    valid, test = (evaluate(model, splits[name]) for name in ("valid", "test"))
    assert valid["auc"] is not None
    assert test["auc"] is not None
    return {
        "seed": seed,
        "valid_auc": valid["auc"],
        "test_auc": test["auc"],
        "epochs": len(result.history),
        "rows_per_second": splits["train"].rows * len(result.history) / seconds,
        "fullest_interval": fullest_interval(model, splits["valid"].batch(slice(0, splits["valid"].rows)).values),
    }


def fullest_interval(model: CtrModel, values: torch.Tensor) -> float:
    """The largest share of one field's present rows that one interval holds, averaged over the fields."""
    mesh = model.encoder.mesh
    with torch.no_grad():
        intervals = mesh.locate(values)[0].cpu().numpy()
    present = ~values.isnan().cpu().numpy()
    shares = [
        np.bincount(intervals[present[:, i], i]).max() / present[:, i].sum()
        for i in range(values.shape[1])
        if present[:, i].any()
    ]
    return float(np.mean(shares))


def line(runs: list[dict[str, float]]) -> str:
    def spread(key: str) -> str:
        values = np.array([found[key] for found in runs])
        return f"{values.mean():.4f} ± {values.std(ddof=1) if len(values) > 1 else 0:.4f}"

    epochs = np.mean([found["epochs"] for found in runs])
    speed = np.median([found["rows_per_second"] for found in runs])
    fullest = np.mean([found["fullest_interval"] for found in runs])
    return (
        f"valid {spread('valid_auc')}  test {spread('test_auc')}  epochs {epochs:4.1f}  "
        f"fullest interval {fullest:.0%}  {speed:,.0f} rows/s"
    )


if __name__ == "__main__":
    main()
