"""The training loop against formulas of its own; every check rejects loops that are broken on purpose."""

from __future__ import annotations

import copy
import inspect
import json
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import scalarlens.job
from scalarlens import backbones, encoders, metrics
from scalarlens.backbones import Tower
from scalarlens.cli import main
from scalarlens.errors import DataError, UsageError
from scalarlens.model import CtrModel, ModelSpec
from scalarlens.registry import options_of
from scalarlens.table.batches import Batch, PackedSplit, Shuffle
from scalarlens.table.statistics import TrainingStatistics
from scalarlens.training import RECIPES, FitResult, Recipe, fit, loop
from scalarlens.training.loop import TrainingDiverged

Fit = Callable[..., FitResult]
Check = Callable[..., None]
Weights = dict[str, Tensor]

GOLDEN = Path(__file__).parents[1] / "golden"
#: what a check raises when it rejects something
REJECTED = (AssertionError, pytest.fail.Exception)
few = settings(max_examples=30, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)
SMALL = Recipe(hidden=(6,), embedding_dim=4, batch_size=32, learning_rate=0.02, patience=2, max_epochs=3)


class World(NamedTuple):
    statistics: TrainingStatistics
    train: PackedSplit
    valid: PackedSplit


def drawn(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values with gaps, category ids and labels that depend on both."""
    rng = np.random.default_rng(seed)
    values, ids = rng.normal(size=(rows, 2)), rng.integers(2, 8, (rows, 2))
    chance = 1 / (1 + np.exp(-2 * values[:, 0] * np.where(ids[:, 0] % 2, 1, -1) - values[:, 1]))
    values[rng.random((rows, 2)) < 0.05] = np.nan
    labels = rng.random(rows) < chance
    labels[:2] = [False, True]
    return values, ids, labels


def world(rows: int = 80, seed: int = 0, valid_rows: int = 60, make: type[PackedSplit] = PackedSplit) -> World:
    values, ids, labels = drawn(rows, seed)
    statistics = TrainingStatistics.from_arrays(values, ids)
    valid = PackedSplit.from_arrays(*drawn(valid_rows, seed + 1000))
    return World(statistics, make.from_arrays(values, ids, labels), valid)


def model_of(
    statistics: TrainingStatistics, recipe: Recipe = SMALL, *, encoder: str = "deer", backbone: str = "dnn", seed: int = 1
) -> CtrModel:
    torch.manual_seed(seed)
    spec = ModelSpec(encoder, backbone, recipe.embedding_dim, recipe.tower, recipe.category_std)
    return CtrModel.build(spec.resolved(), statistics)


def weights_of(model: CtrModel) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same_bits(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Course(NamedTuple):
    """What a training did: result, model, the weights after each batch (first: the start) and at each epoch's end."""

    result: FitResult
    model: CtrModel
    after_batches: list[Weights]
    after_epochs: list[Weights]


def course(fit: Fit, tables: World, model: CtrModel, recipe: Recipe, seed: int = 3) -> Course:
    after_batches, after_epochs = [weights_of(model)], []

    def progress(epoch: int, done: int, rows: int, entry: dict[str, Any] | None) -> None:
        (after_batches if entry is None else after_epochs).append(weights_of(model))

    result = fit(model, tables.train, tables.valid, recipe, seed=seed, progress=progress)
    return Course(result, model, after_batches, after_epochs)


@contextmanager
def scripted(aucs: list[float]) -> Iterator[None]:
    """Validation AUCs as given, one per epoch; the last is repeated."""
    script = iter(aucs)

    def next_auc(*_: Any) -> float:
        return next(script, aucs[-1])

    with pytest.MonkeyPatch.context() as patch:
        told = SimpleNamespace(auc=next_auc, log_loss=metrics.log_loss, sigmoid=metrics.sigmoid)
        patch.setattr(loop, "metrics", told)
        yield


def broken(**replaced: Any) -> Fit:
    """`fit` with parts of its module replaced."""

    def fit_broken(*arguments: Any, **options: Any) -> FitResult:
        with pytest.MonkeyPatch.context() as patch:
            for name, part in replaced.items():
                patch.setattr(loop, name, part)
            return fit(*arguments, **options)

    return fit_broken


# What the loop may see


def check_no_place_for_test_data(fit: Fit) -> None:
    parameters = inspect.signature(fit).parameters.values()
    assert not any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters)
    assert [p.name for p in parameters if "PackedSplit" in str(p.annotation)] == ["train", "valid"]
    assert not any("test" in parameter.name for parameter in parameters)


def fit_that_takes_test(
    model: CtrModel, train: PackedSplit, valid: PackedSplit, test: PackedSplit, recipe: Recipe
) -> FitResult:
    raise NotImplementedError


def fit_that_takes_anything(model: CtrModel, train: PackedSplit, valid: PackedSplit, **data: Any) -> FitResult:
    raise NotImplementedError


def check_one_class_is_refused(fit: Fit) -> None:
    tables = world()
    for label in (0, 1):
        values, ids, _ = drawn(20, 5)
        valid = PackedSplit.from_arrays(values, ids, np.full(20, label))
        with pytest.raises(DataError, match="both classes") as caught:
            fit(model_of(tables.statistics), tables.train, valid, SMALL, seed=1)
        assert caught.value.exit_code == 3


class TakesOneClass(loop._Run):
    def __init__(self, model: CtrModel, train: PackedSplit, valid: PackedSplit, *rest: Any) -> None:
        super().__init__(model, train, train, *rest)
        self.valid, self.valid_labels = valid, valid.labels.numpy()


# Early stopping, the best weights, and the plateau


class Protocol(NamedTuple):
    epochs: int
    best_epoch: int
    rates: list[float]


def protocol(aucs: list[float], recipe: Recipe) -> Protocol:
    """Early stopping in other words than the loop's: count how long nothing better has come."""
    best, best_epoch, waited, rate = -1.0, 0, 0, recipe.learning_rate
    rates: list[float] = []
    while len(rates) < recipe.max_epochs and waited < recipe.patience:
        rates.append(rate)
        auc = aucs[min(len(rates), len(aucs)) - 1]
        if auc > best:
            best, best_epoch, waited = auc, len(rates), 0
        else:
            waited, rate = waited + 1, rate * recipe.plateau_factor
    return Protocol(len(rates), best_epoch, rates)


TINY = world(rows=16, valid_rows=12)
scripts = st.lists(st.sampled_from([0.5, 0.55, 0.6, 0.65, 0.7]), min_size=1, max_size=8)
patiences, limits, factors = st.integers(1, 4), st.integers(1, 7), st.sampled_from([1.0, 0.5, 0.1])


def check_protocol(fit: Fit, holds: Callable[[Course, Protocol], None]) -> None:
    @few
    @given(scripts, patiences, limits, factors)
    def runs(aucs: list[float], patience: int, limit: int, factor: float) -> None:
        recipe = replace(SMALL, hidden=(3,), patience=patience, max_epochs=limit, plateau_factor=factor)
        with scripted(aucs):
            holds(course(fit, TINY, model_of(TINY.statistics, recipe), recipe), protocol(aucs, recipe))

    runs()


def check_stops_in_time(fit: Fit) -> None:
    def holds(ran: Course, expected: Protocol) -> None:
        assert [entry["epoch"] for entry in ran.result.history] == list(range(1, expected.epochs + 1))

    check_protocol(fit, holds)


def check_first_of_the_best_is_best(fit: Fit) -> None:
    def holds(ran: Course, expected: Protocol) -> None:
        assert ran.result.best_epoch == expected.best_epoch

    check_protocol(fit, holds)


def check_best_weights_are_restored(fit: Fit) -> None:
    def holds(ran: Course, expected: Protocol) -> None:
        assert same_bits(weights_of(ran.model), ran.after_epochs[expected.best_epoch - 1])
        assert not same_bits(ran.after_epochs[0], ran.after_epochs[-1]) or expected.epochs == 1

    check_protocol(fit, holds)


def check_rates_are_recorded(fit: Fit) -> None:
    def holds(ran: Course, expected: Protocol) -> None:
        assert [entry["learning_rate"] for entry in ran.result.history] == expected.rates

    check_protocol(fit, holds)


def check_last_epoch_is_worse_and_dropped(fit: Fit) -> None:
    """No script: the training labels are noise, so that validation gets worse by itself."""
    tables = world(rows=60, seed=4)
    values, ids, _ = drawn(60, 4)
    noise = PackedSplit.from_arrays(values, ids, np.random.default_rng(0).random(60) < 0.5)
    recipe = replace(SMALL, max_epochs=8, patience=3, learning_rate=0.05)
    model = model_of(tables.statistics, recipe)
    history = fit(model, noise, tables.valid, recipe, seed=1).history
    aucs = [entry["valid_auc"] for entry in history]
    assert aucs[-1] < max(aucs), "the case must have a worse last epoch"
    scores = model.score(tables.valid.batches(recipe.batch_size))
    assert metrics.auc(tables.valid.labels.numpy(), scores) == max(aucs)


class KeepsTheLast(loop._Run):
    def judge(self) -> dict[str, Any]:
        entry = super().judge()
        self.best = weights_of(self.model)
        return entry


class TiesImprove(loop._Run):
    @property
    def best_epoch(self) -> int:
        aucs = [entry["valid_auc"] for entry in self.history]
        return len(aucs) - int(np.argmax(aucs[::-1])) if aucs else 0


class CountsAllBadEpochs(loop._Run):
    @property
    def finished(self) -> bool:
        aucs = [entry["valid_auc"] for entry in self.history]
        bad = sum(auc <= max(aucs[:i], default=0.0) for i, auc in enumerate(aucs))
        return len(aucs) >= self.recipe.max_epochs or bad >= self.recipe.patience


class WaitsOneMore(loop._Run):
    @property
    def finished(self) -> bool:
        waited = len(self.history) - self.best_epoch
        return len(self.history) >= self.recipe.max_epochs or waited > self.recipe.patience


class HasNoLimit(loop._Run):
    @property
    def finished(self) -> bool:
        return bool(self.history) and len(self.history) - self.best_epoch >= self.recipe.patience


class CutsEveryEpoch(loop._Run):
    def judge(self) -> dict[str, Any]:
        entry = super().judge()
        if self.best_epoch == entry["epoch"]:
            for group in self.optimizer.param_groups:
                group["lr"] *= self.recipe.plateau_factor
        return entry


class NeverCuts(loop._Run):
    def judge(self) -> dict[str, Any]:
        entry = super().judge()
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate
        return entry


def test_replayed_benchmark_curve_cuts_and_stops_where_its_log_does() -> None:
    """The validation AUCs that BARS logged for DCNv2: the rate fell after epochs 6 and 8, and 9 was the last."""
    aucs = [0.80645, 0.809079, 0.810513, 0.811169, 0.811757, 0.811747, 0.814037, 0.813989, 0.813659]
    bars = RECIPES["bars"]
    recipe = replace(SMALL, patience=bars.patience, max_epochs=bars.max_epochs, plateau_factor=bars.plateau_factor)
    with scripted(aucs):
        ran = course(fit, TINY, model_of(TINY.statistics), replace(recipe, learning_rate=bars.learning_rate))
    assert ran.result.best_epoch == 7
    rates = [entry["learning_rate"] for entry in ran.result.history]
    assert rates == pytest.approx([1e-3] * 6 + [1e-4] * 2 + [1e-5], rel=1e-12)


# The optimizer: Adam by hand


def gradients(model: CtrModel, batch: Batch) -> tuple[float, dict[str, np.ndarray]]:
    model.zero_grad()
    loss = F.binary_cross_entropy_with_logits(model(batch.values, batch.category_ids), batch.labels)
    loss.backward()
    return loss.item(), {name: p.grad.double().numpy() for name, p in model.named_parameters() if p.grad is not None}


def adam_by_hand(
    moments: dict[str, np.ndarray], gradient: np.ndarray, weight: np.ndarray, step: int, rate: float
) -> np.ndarray:
    """Kingma and Ba (2015), algorithm 1, in float64."""
    moments["m"] = 0.9 * moments.get("m", 0.0) + 0.1 * gradient
    moments["v"] = 0.999 * moments.get("v", 0.0) + 0.001 * gradient**2
    mean, square = moments["m"] / (1 - 0.9**step), moments["v"] / (1 - 0.999**step)
    return weight - rate * mean / (np.sqrt(square) + 1e-8)


def check_steps_follow_adam(fit: Fit) -> None:
    """Every step of four epochs, with a penalty on the categorical tables and a rate that is cut once."""
    tables = world(rows=40)
    recipe = replace(SMALL, batch_size=16, embedding_l2=0.05, plateau_factor=0.5, patience=3, max_epochs=4)
    model = model_of(tables.statistics, recipe, backbone="deepfm")
    with scripted([0.6, 0.5, 0.7, 0.7]):
        ran = course(fit, tables, model, recipe)
    rates = [0.02, 0.02, 0.01, 0.01]
    shuffle, clone = Shuffle(40, 16, 3), copy.deepcopy(model)
    moments: dict[str, dict[str, np.ndarray]] = {name: {} for name, _ in model.named_parameters()}
    step = 0
    for epoch in range(4):
        losses = []
        for index in shuffle.epoch_batches():
            before, after = ran.after_batches[step : step + 2]
            step += 1
            clone.load_state_dict(before)
            batch = tables.train.batch(index)
            loss, gradient = gradients(clone, batch)
            losses.append((loss, len(batch.labels)))
            for name, moment in moments.items():
                weight = before[name].double().numpy()
                penalty = 0.05 * weight if name in ("categories.weight", "category_weights.weight") else 0.0
                moved = adam_by_hand(moment, gradient[name] + penalty, weight, step, rates[epoch])
                np.testing.assert_allclose(after[name].numpy(), moved, rtol=0, atol=3e-7, err_msg=name)
        mean = sum(loss * rows for loss, rows in losses) / 40
        assert ran.result.history[epoch]["train_loss"] == pytest.approx(mean, rel=1e-6)
    assert step == 12


def adam(groups: Callable[[CtrModel, Recipe], list[dict[str, Any]]], kind: Any = torch.optim.Adam) -> Fit:
    return broken(_adam=lambda model, recipe: kind(groups(model, recipe), lr=recipe.learning_rate))


def penalised(model: CtrModel, recipe: Recipe, prefix: str) -> list[dict[str, Any]]:
    chosen = [p for name, p in model.named_parameters() if name.startswith(prefix)]
    others = [p for name, p in model.named_parameters() if not name.startswith(prefix)]
    return [{"params": others}, {"params": chosen, "weight_decay": recipe.embedding_l2}]


class AveragesBatches(loop._Run):
    """The loss of an epoch weighs a short batch like a full one."""

    def judge(self) -> dict[str, Any]:
        entry = super().judge()
        entry["train_loss"] *= 40 / 48
        return entry


class RecordsARateThatIsNotUsed(loop._Run):
    def judge(self) -> dict[str, Any]:
        entry = super().judge()
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate
        entry["learning_rate"] *= 1.0 if self.best_epoch == entry["epoch"] else self.recipe.plateau_factor
        return entry


# Averaging


def flat(weights: Weights, model: CtrModel) -> np.ndarray:
    return np.concatenate([weights[name].double().numpy().ravel() for name, _ in model.named_parameters()])


def average_by_hand(steps: list[np.ndarray], decay: float) -> np.ndarray:
    """The mean of all steps as long as that weighs the newest by more than `1 - decay`, exponential afterwards."""
    average = steps[0]
    for count in range(1, len(steps) + 1):
        newest = steps[count - 1]
        mean = np.mean(steps[:count], axis=0)
        average = mean if count <= round(1 / (1 - decay)) else decay * average + (1 - decay) * newest
    return average


def check_averaging_follows_its_formula(fit: Fit) -> None:
    tables = world()
    for decay in (0.75, 0.9):
        recipe = replace(SMALL, averaging=decay, batch_size=16, max_epochs=4, patience=4)
        with scripted([0.5, 0.6, 0.7, 0.65]):
            ran = course(fit, tables, model_of(tables.statistics, recipe), recipe)
        steps = [flat(weights, ran.model) for weights in ran.after_batches[1:]]
        expected = average_by_hand(steps[:15], decay)
        np.testing.assert_allclose(flat(weights_of(ran.model), ran.model), expected, rtol=0, atol=1e-6)
        assert np.abs(expected - steps[14]).max() > 1e-2


def check_averages_are_what_is_validated(fit: Fit) -> None:
    tables = world()
    recipe = replace(SMALL, averaging=0.9, batch_size=16, max_epochs=3)
    model = model_of(tables.statistics, recipe)
    result = fit(model, tables.train, tables.valid, recipe, seed=3)
    entry = result.history[result.best_epoch - 1]
    labels, scores = tables.valid.labels.numpy(), model.score(tables.valid.batches(recipe.batch_size))
    assert entry["valid_auc"] == metrics.auc(labels, scores)
    assert entry["valid_log_loss"] == metrics.log_loss(labels, metrics.sigmoid(scores))


def check_averaging_leaves_the_training_alone(fit: Fit) -> None:
    tables, recipe = world(), replace(SMALL, batch_size=16)
    plain, averaged = (
        course(fit, tables, model_of(tables.statistics), replace(recipe, averaging=decay)) for decay in (0.0, 0.9)
    )
    assert len(plain.after_batches) == len(averaged.after_batches) == 16
    assert all(same_bits(*pair) for pair in zip(plain.after_batches, averaged.after_batches, strict=True))


class AveragesTheStart(loop.Average):
    """Exponential from the first step on, so that the start of the weights stays in."""

    def update(self, model: CtrModel) -> None:
        self.steps = 1 << 30
        super().update(model)


class AveragesAllAlike(loop.Average):
    """A plain mean for ever."""

    def update(self, model: CtrModel) -> None:
        self.decay = 1.0
        super().update(model)


class AveragesAtTheEnd(loop._Run):
    """One update per epoch."""

    def train_epoch(self, *arguments: Any) -> None:
        average, self.average = self.average, None
        super().train_epoch(*arguments)
        self.average = average
        if average is not None:
            average.update(self.model)


class ValidatesTheNewest(loop._Run):
    """Keeps averages, but measures the weights of the last step."""

    def judge(self) -> dict[str, Any]:
        entry = super().judge()
        labels, scores = self.valid_labels, self.model.score(self.valid.batches(self.recipe.batch_size))
        return entry | self.history[-1].update(
            valid_auc=metrics.auc(labels, scores), valid_log_loss=metrics.log_loss(labels, metrics.sigmoid(scores))
        ) if False else self._measured(entry, labels, scores)

    def _measured(self, entry: dict[str, Any], labels: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
        entry["valid_auc"] = metrics.auc(labels, scores)
        entry["valid_log_loss"] = metrics.log_loss(labels, metrics.sigmoid(scores))
        return entry


class StaysInTheModel(loop.Average):
    """Training goes on from the averages."""

    @contextmanager
    def swapped_into(self, model: CtrModel) -> Iterator[None]:
        self._exchange(model)
        yield
