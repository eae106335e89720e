"""The demo: a made click log, ScalarLens and DEER side by side, an artifact, scores and a report."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from scalarlens import metrics
from scalarlens.artifact import MANIFEST, ModelArtifact
from scalarlens.datasets.click_log import SCHEMA, ClickLog, make_click_log
from scalarlens.datasets.files import open_table
from scalarlens.datasets.parts import Part
from scalarlens.datasets.prepare import prepare
from scalarlens.datasets.prepared import PreparedTable
from scalarlens.errors import UsageError
from scalarlens.job import RUN_FILE, Job, evaluate, train
from scalarlens.model import ModelSpec
from scalarlens.progress import Reporter
from scalarlens.report import demo_report, response_figure
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
        files = [f"{what:9} {path}" for what, path in self.document["files"].items()]
        digests = [f"{what:9} sha256 {digest}" for what, digest in self.document["digests"].items()]
        return "\n".join([*lines, "", *files, *digests])


def run_demo(out: Path, *, rows: int, seed: int, device: torch.device, reporter: Reporter) -> DemoSummary:
    """Everything from raw rows to a report, in one folder."""
    if rows < 1000:
        raise UsageError(f"the demo needs at least 1000 rows to train on; got {rows}")
    test = _prepare(out, rows, seed)
    table = PreparedTable(out / "data")
    artifacts, results = {}, {}
    for encoder in ENCODERS:
        progress = reporter.titled(f"{encoder}: ")
        artifact = _train(encoder, out, seed, device, progress)
        artifacts[encoder] = artifact
        results[encoder] = {
            **evaluate(artifact.model, table.split("test", artifact.tensorizer.scale)),
            "best_epoch": artifact.metrics["best_epoch"],
            "seconds": round(progress.seconds, 3),
        }
    measured = metrics.evaluate(test.table["clicked"].to_numpy(), test.true_logits)
    bayes = {name: measured[name] for name in ("auc", "log_loss", "ece")}
    document = {
        "rows": rows,
        "seed": seed,
        "backbone": BACKBONE,
        "recipe": asdict(RECIPE),
        "bayes": bayes,
        "results": results,
        **_write_files(out, artifacts["scalarlens"], table.splits["train"]["rows"], results, bayes),
    }
    return DemoSummary(document)


def _prepare(out: Path, rows: int, seed: int) -> ClickLog:
    """Draw the log, write its three splits as files, and prepare them; returns the test rows."""
    log = make_click_log(rows, seed)
    cuts = {"train": (0, int(0.8 * rows)), "valid": (int(0.8 * rows), int(0.9 * rows)), "test": (int(0.9 * rows), rows)}
    out.mkdir(parents=True, exist_ok=True)
    for name, (start, stop) in cuts.items():
        pq.write_table(log.table.slice(start, stop - start), out / f"{name}.parquet")
    prepare(SCHEMA, [Part(open_table(out / f"{name}.parquet"), name) for name in cuts], out / "data")
    start, stop = cuts["test"]
    return ClickLog(log.table.slice(start, stop - start), log.true_logits[start:stop])


def _train(encoder: str, out: Path, seed: int, device: torch.device, progress: Reporter) -> ModelArtifact:
    """A run of its own, afresh even where an earlier demo left one."""
    folder = out / encoder
    if (folder / RUN_FILE).exists():
        shutil.rmtree(folder)
    spec = ModelSpec(encoder, BACKBONE, RECIPE.embedding_dim, RECIPE.tower, RECIPE.category_std).resolved()
    job = Job(out / "data", spec, RECIPE, "raw", seed)
    return train(job, folder, device=device, progress=progress.progress)


def _write_files(
    out: Path, artifact: ModelArtifact, rows: int, results: dict[str, Any], bayes: dict[str, Any]
) -> dict[str, Any]:
    """Scores, picture and report; returns where they are, and the digests of what a second run repeats."""
    files = {
        "artifact": out / "scalarlens" / "artifact",
        "scores": out / "scores.parquet",
        "picture": out / "response.svg",
        "report": out / "report.html",
    }
    predict_file(artifact, open_table(out / "test.parquet"), files["scores"])
    picture = response_figure(artifact, out / "test.parquet")
    write_atomic(files["picture"], picture.encode())
    write_atomic(files["report"], demo_report(rows, results, bayes, picture).encode())
    digests = {"artifact": sha256_of_file(files["artifact"] / MANIFEST), "scores": sha256_of_file(files["scores"])}
    return {"files": {name: str(path) for name, path in files.items()}, "digests": digests}
