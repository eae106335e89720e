"""The demo: a made click log, ScalarLens and DEER side by side, an artifact, scores and a report."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from scalarlens import metrics
from scalarlens.artifact import ModelArtifact
from scalarlens.datasets.click_log import SCHEMA, ClickLog, make_click_log
from scalarlens.datasets.files import open_table
from scalarlens.datasets.parts import Part
from scalarlens.datasets.prepare import prepare
from scalarlens.datasets.prepared import PreparedTable
from scalarlens.errors import UsageError
from scalarlens.job import Job, evaluate, train
from scalarlens.model import ModelSpec
from scalarlens.progress import Reporter
from scalarlens.report import demo_report
from scalarlens.scoring import predict_file
from scalarlens.storage import sha256_of_file, write_atomic
from scalarlens.training import Recipe

#: a smaller batch than the paper's, because the table is small
RECIPE = Recipe(batch_size=1024)
BACKBONE = "dnn"
ENCODERS = ("scalarlens", "deer")


@dataclass
class DemoSummary:
    document: dict[str, Any]

    @property
    def text(self) -> str:
        bayes, results = self.document["bayes"], self.document["results"]
        head = f"{'':16}{'AUC':>8}{'log loss':>10}{'ECE':>8}{'best epoch':>12}{'seconds':>9}"
        limit = f"{'Bayes limit':16}{bayes['auc']:8.4f}{bayes['log_loss']:10.4f}{bayes['ece']:8.4f}"
        lines = [head, limit]
        for name, found in results.items():
            lines.append(
                f"{name:16}{found['auc']:8.4f}{found['log_loss']:10.4f}{found['ece']:8.4f}"
                f"{found['best_epoch']:12d}{found['seconds']:9.1f}"
            )
        return "\n".join([*lines, "", *(f"{what:9} {path}" for what, path in self.document["files"].items())])


def run_demo(out: Path, *, rows: int, seed: int, device: torch.device, reporter: Reporter) -> DemoSummary:
    """Everything from raw rows to a report, in one folder."""
    if rows < 1000:
        raise UsageError(f"the demo needs at least 1000 rows to train on; got {rows}")
    test = _prepare(out, rows, seed)
    artifacts, results = {}, {}
    for encoder in ENCODERS:
        progress = reporter.titled(f"{encoder}: ")
        shutil.rmtree(out / encoder, ignore_errors=True)
        spec = ModelSpec(encoder, BACKBONE, RECIPE.embedding_dim, RECIPE.tower, RECIPE.category_std).resolved()
        job = Job(out / "data", spec, RECIPE, "raw", seed)
        artifact = train(job, out / encoder, device=device, progress=progress.progress)
        artifacts[encoder] = artifact
        results[encoder] = {
            **_tested(artifact, out),
            "best_epoch": artifact.metrics["best_epoch"],
            "seconds": progress.seconds,
        }
    files = _write_files(out, artifacts)
    bayes = metrics.evaluate(test.table["clicked"].to_numpy(), test.true_logits)
    document = {"rows": rows, "seed": seed, "recipe": asdict(RECIPE), "backbone": BACKBONE, "bayes": bayes}
    document |= {"results": results, "files": {name: str(path) for name, path in files.items()}}
    document["digests"] = {
        "artifact": sha256_of_file(out / "scalarlens" / "artifact" / "MANIFEST.sha256"),
        "scores": sha256_of_file(files["scores"]),
    }
    write_atomic(files["report"], demo_report(artifacts, results, bayes, out).encode())
    return DemoSummary(document)


def _prepare(out: Path, rows: int, seed: int) -> ClickLog:
    log = make_click_log(rows, seed)
    cuts = {"train": (0, int(0.8 * rows)), "valid": (int(0.8 * rows), int(0.9 * rows)), "test": (int(0.9 * rows), rows)}
    out.mkdir(parents=True, exist_ok=True)
    for name, (start, stop) in cuts.items():
        pq.write_table(log.table.slice(start, stop - start), out / f"{name}.parquet")
    prepare(SCHEMA, [Part(open_table(out / f"{name}.parquet"), name) for name in cuts], out / "data")
    start, stop = cuts["test"]
    return ClickLog(log.table.slice(start, stop - start), log.true_logits[start:stop])


def _tested(artifact: ModelArtifact, out: Path) -> dict[str, Any]:
    return evaluate(artifact.model, PreparedTable(out / "data").split("test", artifact.tensorizer.scale))


def _write_files(out: Path, artifacts: dict[str, ModelArtifact]) -> dict[str, Path]:
    scores = out / "scores.parquet"
    predict_file(artifacts["scalarlens"], open_table(out / "test.parquet"), scores)
    return {"artifact": out / "scalarlens" / "artifact", "scores": scores, "report": out / "report.html"}
