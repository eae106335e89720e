"""One training job: a prepared table in, a run folder with history, checkpoints and a sealed artifact out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from scalarlens import metrics
from scalarlens.artifact import SCORING_BATCH, ModelArtifact, refuse_large_options, seal
from scalarlens.datasets.prepared import PreparedTable
from scalarlens.errors import DataError, UsageError
from scalarlens.model import CtrModel, ModelSpec
from scalarlens.storage import read_json, write_json
from scalarlens.table.batches import PackedSplit
from scalarlens.table.tensorizer import InputScale, Tensorizer
from scalarlens.training import Recipe, fit
from scalarlens.training.checkpoint import CHECKPOINT_FILE
from scalarlens.training.loop import CHECKPOINT_SECONDS, Progress

RUN_FILE = "run.json"
ARTIFACT_FOLDER = "artifact"
#: what the generators of both PyTorch and NumPy take
LARGEST_SEED = 1 << 63


@dataclass(frozen=True)
class Job:
    """What to train, on what, and from which seed. Where it runs is not part of what it is."""

    data: Path
    spec: ModelSpec
    recipe: Recipe
    input_scale: InputScale
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.seed < LARGEST_SEED:
            raise UsageError(f"a seed is a whole number from 0 and below 2**63; got {self.seed!r}")

    def identity(self, data_digest: str) -> dict[str, Any]:
        """Two jobs with the same identity end in the same bits on the same machine."""
        document = {
            "data": data_digest,
            "model": self.spec.to_tables(),
            "recipe": asdict(self.recipe),
            "input_scale": self.input_scale,
            "seed": self.seed,
        }
        canonical: dict[str, Any] = json.loads(json.dumps(document))
        return canonical


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs an NVIDIA GPU that PyTorch can see; there is none; use --device cpu")
    return torch.device(name)


def train(
    job: Job,
    out: Path,
    *,
    device: torch.device,
    resume: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: Progress | None = None,
) -> ModelArtifact:
    """Train a job into a run folder; with `resume`, continue what the folder holds of it."""
    refuse_large_options(job.spec.to_tables(), UsageError)
    table = PreparedTable(job.data)
    if "valid" not in table.splits:
        raise DataError(
            f"{job.data} has no valid split, which early stopping needs; "
            "prepare it with --valid FILE or --split random --seed N"
        )
    _claim(out, job.identity(table.digest), resume)
    tensorizer = Tensorizer(table.schema, table.statistics, job.input_scale)
    torch.manual_seed(job.seed)
    model = CtrModel.build(job.spec, tensorizer.encoder_statistics).to(device)
    train_split = table.split("train", tensorizer.scale).to(device)
    valid_split = table.split("valid", tensorizer.scale).to(device)
    result = fit(
        model,
        train_split,
        valid_split,
        job.recipe,
        seed=job.seed,
        folder=out,
        checkpoint_seconds=checkpoint_seconds,
        progress=progress,
    )
    judged = {f"valid_{name}": value for name, value in evaluate(model, valid_split).items()}
    artifact = seal(
        model.cpu(),
        tensorizer,
        job.spec,
        training={"seed": job.seed, "recipe": asdict(job.recipe)},
        metrics={"best_epoch": result.best_epoch, "epochs": len(result.history), **judged},
        training_digest=table.training_digest,
    )
    artifact.save(out / ARTIFACT_FOLDER)
    return artifact


def evaluate(model: CtrModel, split: PackedSplit) -> dict[str, float | int | None]:
    """All metrics of a model on a packed split; None where one is not defined."""
    groups = split.groups
    found = metrics.evaluate(
        split.labels.cpu().numpy(),
        model.score(split.batches(SCORING_BATCH)),
        None if groups is None else groups.cpu().numpy(),
    )
    return {name: None if value != value else value for name, value in found.items()}


def _claim(out: Path, identity: dict[str, Any], resume: bool) -> None:
    """Make `out` the folder of this run, or refuse it if it belongs to something else."""
    started = (out / CHECKPOINT_FILE).exists()
    if started and not resume:
        raise UsageError(f"{out} already holds a run; continue it with --resume, or choose another --out")
    if started and (out / RUN_FILE).exists():
        theirs = read_json(out / RUN_FILE, UsageError)
        differing = sorted(_differing(theirs, identity))
        if differing:
            raise UsageError(
                f"{out} holds a run with another {', '.join(differing)}; repeat its options, or choose another --out"
            )
    foreign = out.is_dir() and any(not path.name.startswith(".") for path in out.iterdir())
    if foreign and not (out / RUN_FILE).exists():
        raise UsageError(f"{out} is not empty and holds no run; choose another --out")
    if out.is_file():
        raise UsageError(f"{out} is a file; --out names a folder")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / RUN_FILE, identity)


def _differing(theirs: Any, ours: Any, path: str = "") -> set[str]:
    """Dotted names of the leaves in which two documents are not the same."""
    if not (isinstance(theirs, dict) and isinstance(ours, dict)):
        return set() if theirs == ours else {path}
    parts = ((f"{path}.{key}".lstrip("."), key) for key in theirs.keys() | ours.keys())
    return {name for part, key in parts for name in _differing(theirs.get(key), ours.get(key), part)}
