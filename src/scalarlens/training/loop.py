"""The training loop. It has no parameter for test data."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from scalarlens import metrics
from scalarlens.errors import CheckFailed, DataError
from scalarlens.model import CtrModel
from scalarlens.storage import write_atomic
from scalarlens.table.batches import PackedSplit, Shuffle
from scalarlens.training.checkpoint import (
    flatten_optimizer,
    load_checkpoint,
    restore_optimizer,
    save_checkpoint,
    under,
)
from scalarlens.training.recipe import Recipe

HISTORY_FILE = "history.jsonl"
#: inside an epoch, a checkpoint is due after this many seconds
CHECKPOINT_SECONDS = 60.0

#: told after every batch: epoch, rows done in it, rows of it; and the new history entry when the epoch ends
Progress = Callable[[int, int, int, dict[str, Any] | None], None]


class TrainingDiverged(CheckFailed):
    """The loss stopped being a number: the run failed, and no model comes out of it."""


@dataclass
class FitResult:
    """What a training ended with; the model itself holds the best weights."""

    best_epoch: int
    history: list[dict[str, Any]] = field(default_factory=list)


def fit(
    model: CtrModel,
    train: PackedSplit,
    valid: PackedSplit,
    recipe: Recipe,
    *,
    seed: int,
    folder: Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: Progress | None = None,
) -> FitResult:
    """Train until the validation AUC stops improving, and leave the best weights in the model.

    With `folder`, history and checkpoints are kept there, and a training found there is continued: it ends in the
    same bits as one that was never interrupted. `seed` decides the order of the rows; dropout draws from PyTorch's
    own generator, which the caller seeds together with the start of the weights.
    """
    run = _Run(model, train, valid, recipe, seed, folder)
    run.resume()
    while not run.finished:
        run.train_epoch(progress, checkpoint_seconds)
        entry = run.judge()
        run.save()
        if progress is not None:
            progress(entry["epoch"], train.rows, train.rows, entry)
    model.load_state_dict(run.best)
    return FitResult(run.best_epoch, run.history)


class _Run:
    """The state of one training between two batches."""

    def __init__(
        self,
        model: CtrModel,
        train: PackedSplit,
        valid: PackedSplit,
        recipe: Recipe,
        seed: int,
        folder: Path | None,
    ) -> None:
        self.model, self.train, self.valid, self.recipe, self.folder = model, train, valid, recipe, folder
        self.shuffle = Shuffle(train.rows, recipe.batch_size, seed, train.device)
        self.optimizer = _adam(model, recipe)
        self.average = Average(model, recipe.averaging) if recipe.averaging > 0 else None
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=train.device)
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Tensor] = {}
        self.valid_labels = valid.labels.cpu().numpy()
        if len(np.unique(self.valid_labels)) < 2:
            raise DataError("early stopping needs both classes in the validation split; it has only one")

    def train_epoch(self, progress: Progress | None, checkpoint_seconds: float) -> None:
        self.model.train()
        saved = time.monotonic()
        for batch_index in self.shuffle.epoch_batches():
            batch = self.train.batch(batch_index)
            loss = F.binary_cross_entropy_with_logits(self.model(batch.values, batch.category_ids), batch.labels)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.loss_sum += loss.detach() * len(batch.labels)
            if self.average is not None:
                self.average.update(self.model)
            if progress is not None:
                done = min(self.shuffle.batch * self.recipe.batch_size, self.train.rows)
                progress(self.shuffle.epoch + 1, done, self.train.rows, None)
            if time.monotonic() - saved >= checkpoint_seconds:
                self.save()
                saved = time.monotonic()

    def judge(self) -> dict[str, Any]:
        """Close the epoch: validate, keep the weights if they are the best, cut the learning rate if not."""
        loss = self.loss_sum.item() / self.train.rows
        self.loss_sum.zero_()
        if not np.isfinite(loss):
            raise TrainingDiverged(f"training diverged: the loss of epoch {self.shuffle.epoch} is {loss}")
        with self.average.swapped_into(self.model) if self.average is not None else nullcontext():
            logits = self.model.score(self.valid.batches(self.recipe.batch_size))
            judged = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        if not np.isfinite(logits).all():
            raise TrainingDiverged(f"training diverged: validation logits of epoch {self.shuffle.epoch} are not finite")
        if not all(bool(tensor.isfinite().all()) for tensor in judged.values()):
            raise TrainingDiverged(f"training diverged: weights of epoch {self.shuffle.epoch} are not finite")
        entry = {
            "epoch": self.shuffle.epoch,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "train_loss": loss,
            "valid_auc": metrics.auc(self.valid_labels, logits),
            "valid_log_loss": metrics.log_loss(self.valid_labels, metrics.sigmoid(logits)),
        }
        self.history.append(entry)
        if self.best_epoch == entry["epoch"]:
            self.best = judged
        else:
            for group in self.optimizer.param_groups:
                group["lr"] *= self.recipe.plateau_factor
        return entry

    @property
    def best_epoch(self) -> int:
        """The first epoch with the highest validation AUC; 0 before the first."""
        if not self.history:
            return 0
        return int(np.argmax([entry["valid_auc"] for entry in self.history])) + 1

    @property
    def finished(self) -> bool:
        epochs = len(self.history)
        return epochs >= self.recipe.max_epochs or (epochs > 0 and epochs - self.best_epoch >= self.recipe.patience)

    def save(self) -> None:
        if self.folder is None:
            return
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        tensors |= flatten_optimizer(self.optimizer) | {"loss_sum": self.loss_sum, "random.cpu": torch.get_rng_state()}
        if self.average is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in self.average.weights.items()}
        if self.train.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.train.device)
        state = {
            "position": self.shuffle.position(),
            "history": self.history,
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "averaged_steps": self.average.steps if self.average is not None else 0,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(entry) + "\n" for entry in self.history)
        write_atomic(self.folder / HISTORY_FILE, "".join(lines).encode())
        save_checkpoint(self.folder, tensors, state)

    def resume(self) -> None:
        found = load_checkpoint(self.folder) if self.folder is not None else None
        if found is None:
            return
        tensors, state = found
        self.model.load_state_dict(under("model.", tensors))
        self.best = {name: tensor.to(self.train.device) for name, tensor in under("best.", tensors).items()}
        restore_optimizer(self.optimizer, tensors, state["rates"])
        self.loss_sum.copy_(tensors["loss_sum"])
        self.shuffle.restore(state["position"])
        self.history = state["history"]
        if self.average is not None:
            self.average.restore(under("average.", tensors), state["averaged_steps"])
        torch.set_rng_state(tensors["random.cpu"])
        # A run that moves to a GPU brings no state of its generator, and one that leaves it needs none.
        if "random.cuda" in tensors and self.train.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random.cuda"], self.train.device)


def _adam(model: CtrModel, recipe: Recipe) -> torch.optim.Adam:
    tables = [p for name, p in model.named_parameters() if name.startswith(("categories.", "category_weights."))]
    ids = {id(parameter) for parameter in tables}
    others = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": tables, "weight_decay": recipe.embedding_l2}]
    return torch.optim.Adam(groups, lr=recipe.learning_rate, fused=True)


class Average:
    """A moving average of the weights: the plain mean of the first steps, exponential with `decay` from then on."""

    def __init__(self, model: CtrModel, decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: CtrModel) -> None:
        self.steps += 1
        share = max(1 - self.decay, 1 / self.steps)
        torch._foreach_lerp_(list(self.weights.values()), [p.detach() for p in model.parameters()], share)

    def restore(self, weights: dict[str, Tensor], steps: int) -> None:
        self.steps = steps
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)

    @contextmanager
    def swapped_into(self, model: CtrModel) -> Iterator[None]:
        """While the context lasts, the model holds the averaged weights."""
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    def _exchange(self, model: CtrModel) -> None:
        for name, parameter in model.named_parameters():
            parameter.data, self.weights[name] = self.weights[name], parameter.data
