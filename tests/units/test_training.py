"""The training loop against formulas of its own; every check rejects loops that are broken on purpose."""

from __future__ import annotations

import copy
import inspect
import json
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
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
    statistics: TrainingStatistics,
    recipe: Recipe = SMALL,
    *,
    encoder: str = "deer",
    backbone: str = "dnn",
    seed: int = 1,
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
    @example([0.6, 0.5, 0.7, 0.5, 0.65, 0.5], 2, 7, 0.5)
    @example([0.6, 0.6, 0.6], 2, 7, 0.5)
    @example([0.5, 0.6, 0.7, 0.8], 1, 3, 0.5)
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
    recipe = replace(
        SMALL, category_std=0.5, batch_size=16, embedding_l2=0.05, plateau_factor=0.5, patience=3, max_epochs=4
    )
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


def penalised(model: CtrModel, recipe: Recipe, prefix: str | tuple[str, ...]) -> list[dict[str, Any]]:
    chosen = [p for name, p in model.named_parameters() if name.startswith(prefix)]
    others = [p for name, p in model.named_parameters() if not name.startswith(prefix)]
    return [{"params": others}, {"params": chosen, "weight_decay": recipe.embedding_l2}]


class CountsFullBatches(loop._Run):
    """The loss of an epoch is divided by batches times batch size."""

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
        scores = self.model.score(self.valid.batches(self.recipe.batch_size))
        entry["valid_auc"] = metrics.auc(self.valid_labels, scores)
        entry["valid_log_loss"] = metrics.log_loss(self.valid_labels, metrics.sigmoid(scores))
        return entry


class StaysInTheModel(loop.Average):
    """Training goes on from the averages."""

    @contextmanager
    def swapped_into(self, model: CtrModel) -> Iterator[None]:
        self._exchange(model)
        yield


# Divergence


def check_divergence_is_a_failure(fit: Fit) -> None:
    """A loss, validation logits or a weight that is not a number: no result, whatever the reason."""
    tables = world()

    def poison(weight: str, batch: int) -> None:
        model = model_of(tables.statistics)
        calls = iter(range(100))

        def progress(*_: Any) -> None:
            if next(calls) == batch:
                with torch.no_grad():
                    model.get_parameter(weight)[0] = torch.nan

        with pytest.raises(TrainingDiverged, match="diverged") as caught:
            fit(model, tables.train, tables.valid, replace(SMALL, max_epochs=1), seed=1, progress=progress)
        assert caught.value.exit_code == 1

    poison("backbone.mlp.0.weight", batch=0)
    poison("backbone.mlp.0.weight", batch=2)
    poison("categories.weight", batch=2)


class PredictsAConstant(loop._Run):
    """What is not a number becomes 0."""

    def judge(self) -> dict[str, Any]:
        for tensor in (self.loss_sum, *self.model.state_dict().values()):
            tensor.nan_to_num_(nan=0.0)
        return super().judge()


class TrustsTheLoss(loop._Run):
    """Looks at the loss of the epoch alone."""

    def judge(self) -> dict[str, Any]:
        finite = bool(self.loss_sum.isfinite())
        try:
            return super().judge()
        except TrainingDiverged:
            if not finite:
                raise
            self.best = weights_of(self.model)
            self.history.append({"epoch": self.shuffle.epoch, "valid_auc": 0.5})
            return self.history[-1]


# The same seed, the same bits


def check_seed_decides_the_bits(fit: Fit) -> None:
    tables, recipe = world(), replace(SMALL, dropout=0.2, averaging=0.9, batch_norm=True)

    def trained(seed: int, start: int) -> Course:
        return course(fit, tables, model_of(tables.statistics, recipe, seed=start), recipe, seed)

    one, again, other_order, other_start = trained(1, 1), trained(1, 1), trained(2, 1), trained(1, 2)
    assert same_bits(weights_of(one.model), weights_of(again.model))
    assert one.result == again.result
    for other in (other_order, other_start):
        assert not same_bits(weights_of(one.model), weights_of(other.model))
        assert one.result.history != other.result.history


class ForgetsTheSeed(Shuffle):
    def __init__(self, rows: int, batch_size: int, seed: int, *rest: Any) -> None:
        super().__init__(rows, batch_size, 0, *rest)


class DrawsASeed(Shuffle):
    def __init__(self, rows: int, batch_size: int, seed: int, *rest: Any) -> None:
        super().__init__(rows, batch_size, np.random.SeedSequence().entropy, *rest)


# The order of the rows


def check_every_row_once_an_epoch(make: type[Shuffle]) -> None:
    @few
    @given(st.integers(1, 60), st.integers(1, 17), st.integers(0, 2**63 - 1))
    def visits(rows: int, batch_size: int, seed: int) -> None:
        shuffle = make(rows, batch_size, seed)
        for epoch in range(3):
            assert shuffle.position() == {"epoch": epoch, "batch": 0}
            batches = [index.tolist() for index in shuffle.epoch_batches()]
            assert sorted(chain.from_iterable(batches)) == list(range(rows))
            assert len(batches) == shuffle.batches_per_epoch
            sizes = [len(batch) for batch in batches]
            assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
            assert sizes[-1] <= batch_size + 1
            assert sizes[-1] > 1 or rows == 1 or batch_size == 1, "batch norm needs two rows"

    visits()


def check_orders_differ(make: type[Shuffle]) -> None:
    @few
    @given(st.integers(20, 60), st.integers(1, 17), st.integers(0, 2**63 - 2))
    def differ(rows: int, batch_size: int, seed: int) -> None:
        shuffles = [make(rows, batch_size, seed), make(rows, batch_size, seed + 1)]
        orders = [torch.cat(list(shuffle.epoch_batches())).tolist() for shuffle in shuffles for _ in range(3)]
        assert len({tuple(order) for order in orders}) == 6
        assert torch.cat(list(make(rows, batch_size + 1, seed).epoch_batches())).tolist() == orders[0]

    differ()


def check_order_continues_from_every_position(make: type[Shuffle]) -> None:
    @few
    @given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 2**63 - 1))
    def continues(rows: int, batch_size: int, seed: int) -> None:
        whole = make(rows, batch_size, seed)
        batches: list[list[int]] = []
        positions = [whole.position()]
        for _ in range(3):
            for index in whole.epoch_batches():
                batches.append(index.tolist())
                positions.append(json.loads(json.dumps(whole.position())))
        for done, position in enumerate(positions):
            rest = make(rows, batch_size, seed)
            rest.restore(position)
            found = []
            while rest.epoch < 3:
                found += [index.tolist() for index in rest.epoch_batches()]
            assert found == batches[done:]

    continues()


class DropsTheRemainder(Shuffle):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.batches_per_epoch = max(1, self.rows // self.batch_size)

    def epoch_batches(self) -> Iterator[Tensor]:
        return (index[: self.batch_size] for index in super().epoch_batches())


class LeavesARowAlone(Shuffle):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.batches_per_epoch = -(-self.rows // self.batch_size)


class ShowsEvenRowsTwice(Shuffle):
    def epoch_batches(self) -> Iterator[Tensor]:
        return (index - index % 2 for index in super().epoch_batches())


class RepeatsItsOrder(Shuffle):
    def epoch_batches(self) -> Iterator[Tensor]:
        epoch, self.epoch = self.epoch, 0
        yield from super().epoch_batches()
        self.epoch = epoch + 1


class ForgetsTheBatch(Shuffle):
    def restore(self, position: dict[str, int]) -> None:
        super().restore({**position, "batch": 0})


class ForgetsTheEpoch(Shuffle):
    def restore(self, position: dict[str, int]) -> None:
        super().restore({**position, "epoch": 0})


class MovesLate(Shuffle):
    """The position moves when a batch is done with, not when it is handed out."""

    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": max(0, self.batch - 1)}


class WatchedSplit(PackedSplit):
    """Remembers the rows that are asked for by index."""

    seen: list[list[int]]

    def batch(self, index: slice | Tensor) -> Batch:
        if isinstance(index, Tensor):
            self.seen.append(index.tolist())
        return super().batch(index)


def check_loop_shows_every_row_once_an_epoch(fit: Fit) -> None:
    tables = world(rows=41, make=WatchedSplit)
    assert isinstance(tables.train, WatchedSplit)
    tables.train.seen = []
    recipe = replace(SMALL, batch_size=10, max_epochs=3, patience=3)
    fit(model_of(tables.statistics), tables.train, tables.valid, recipe, seed=1)
    assert [len(rows) for rows in tables.train.seen] == [10, 10, 10, 11] * 3
    orders = [list(chain.from_iterable(tables.train.seen[start : start + 4])) for start in (0, 4, 8)]
    assert all(sorted(order) == list(range(41)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


# Reading from the device


class HostReads(TorchDispatchMode):
    """Counts what makes a host wait for its device: values read as Python numbers, and shapes that depend on them."""

    WAITING = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "_unique2",
        "is_nonzero",
        "equal",
        "allclose",
    )
    METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in self.WAITING or masked:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, self:
            for method in self.METHODS:
                patch.setattr(Tensor, method, self._counted(method, getattr(Tensor, method)))
            yield

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.reads.append(name)
            return original(*arguments, **options)

        return counted


def check_no_batch_waits_for_the_device(fit: Fit, encoder: str = "scalarlens", backbone: str = "deepfm") -> None:
    tables = world()
    recipe = replace(SMALL, batch_size=20, averaging=0.9, dropout=0.1, batch_norm=True, embedding_l2=1e-3, max_epochs=2)
    host = HostReads()
    counts: list[list[int]] = [[], []]

    def progress(epoch: int, done: int, rows: int, entry: dict[str, Any] | None) -> None:
        if entry is None:
            counts[epoch - 1].append(len(host.reads))

    model = model_of(tables.statistics, recipe, encoder=encoder, backbone=backbone)
    with host.watching():
        fit(model, tables.train, tables.valid, recipe, seed=1, progress=progress)
    assert [len(epoch) for epoch in counts] == [4, 4]
    assert counts[1][0] > counts[0][-1], "the end of an epoch does read; if nothing is seen there, nothing is watched"
    for epoch in counts:
        assert epoch[0] == epoch[-1], host.reads[epoch[0] : epoch[-1]]


def reading(read: Callable[[Tensor], Any]) -> type[loop._Run]:
    """A loop that looks at the loss after every batch."""

    class Reads(loop._Run):
        def train_epoch(self, progress: Any, checkpoint_seconds: float) -> None:
            def look(*told: Any) -> None:
                read(self.loss_sum)
                progress(*told)

            super().train_epoch(look, checkpoint_seconds)

    return Reads


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "float": float,
    "bool": lambda loss: bool(loss > 0),
    "tolist": lambda loss: loss.tolist(),
    "numpy": lambda loss: loss.numpy(),
    "cpu": lambda loss: loss.cpu(),
    "format": lambda loss: f"{loss:.3f}",
    "mask": lambda loss: loss[loss > 0],
    "nonzero": lambda loss: torch.nonzero(loss),
}


@pytest.mark.parametrize("name", encoders.encoders.names())
def test_no_encoder_waits_for_the_device(name: str) -> None:
    check_no_batch_waits_for_the_device(fit, encoder=name)


@pytest.mark.parametrize("name", backbones.backbones.names())
def test_no_backbone_waits_for_the_device(name: str) -> None:
    check_no_batch_waits_for_the_device(fit, encoder="deer", backbone=name)


# Every check, and what it rejects


FIT_MUTANTS: list[tuple[Check, str, Fit]] = [
    (check_no_place_for_test_data, "a parameter for test data", fit_that_takes_test),
    (check_no_place_for_test_data, "any keyword", fit_that_takes_anything),
    (check_one_class_is_refused, "takes one class", broken(_Run=TakesOneClass)),
    (check_stops_in_time, "ties improve", broken(_Run=TiesImprove)),
    (check_stops_in_time, "counts all bad epochs", broken(_Run=CountsAllBadEpochs)),
    (check_stops_in_time, "waits one more", broken(_Run=WaitsOneMore)),
    (check_stops_in_time, "has no limit", broken(_Run=HasNoLimit)),
    (check_first_of_the_best_is_best, "ties improve", broken(_Run=TiesImprove)),
    (check_best_weights_are_restored, "keeps the last", broken(_Run=KeepsTheLast)),
    (check_last_epoch_is_worse_and_dropped, "keeps the last", broken(_Run=KeepsTheLast)),
    (check_rates_are_recorded, "cuts every epoch", broken(_Run=CutsEveryEpoch)),
    (check_rates_are_recorded, "never cuts", broken(_Run=NeverCuts)),
    (check_steps_follow_adam, "records a rate that is not used", broken(_Run=RecordsARateThatIsNotUsed)),
    (check_steps_follow_adam, "counts full batches", broken(_Run=CountsFullBatches)),
    (check_steps_follow_adam, "penalises everything", adam(lambda model, recipe: penalised(model, recipe, ""))),
    (check_steps_follow_adam, "penalises nothing", adam(lambda model, recipe: penalised(model, recipe, "none"))),
    (
        check_steps_follow_adam,
        "penalises vectors alone",
        adam(lambda model, recipe: penalised(model, recipe, "categories")),
    ),
    (
        check_steps_follow_adam,
        "decouples the penalty",
        adam(lambda model, recipe: penalised(model, recipe, ("categories", "category_weights")), torch.optim.AdamW),
    ),
    (check_averaging_follows_its_formula, "averages the start", broken(Average=AveragesTheStart)),
    (check_averaging_follows_its_formula, "averages all alike", broken(Average=AveragesAllAlike)),
    (check_averaging_follows_its_formula, "averages at the end", broken(_Run=AveragesAtTheEnd)),
    (check_averages_are_what_is_validated, "validates the newest", broken(_Run=ValidatesTheNewest)),
    (check_averaging_leaves_the_training_alone, "stays in the model", broken(Average=StaysInTheModel)),
    (check_divergence_is_a_failure, "predicts a constant", broken(_Run=PredictsAConstant)),
    (check_divergence_is_a_failure, "trusts the loss", broken(_Run=TrustsTheLoss)),
    (check_seed_decides_the_bits, "forgets the seed", broken(Shuffle=ForgetsTheSeed)),
    (check_seed_decides_the_bits, "draws a seed", broken(Shuffle=DrawsASeed)),
    (check_loop_shows_every_row_once_an_epoch, "drops the remainder", broken(Shuffle=DropsTheRemainder)),
    (check_loop_shows_every_row_once_an_epoch, "shows even rows twice", broken(Shuffle=ShowsEvenRowsTwice)),
    *(
        (check_no_batch_waits_for_the_device, f"reads by {how}", broken(_Run=reading(read)))
        for how, read in READS.items()
    ),
]
SHUFFLE_MUTANTS: list[tuple[Check, str, type[Shuffle]]] = [
    (check_every_row_once_an_epoch, "drops the remainder", DropsTheRemainder),
    (check_every_row_once_an_epoch, "leaves a row alone", LeavesARowAlone),
    (check_every_row_once_an_epoch, "shows even rows twice", ShowsEvenRowsTwice),
    (check_orders_differ, "repeats its order", RepeatsItsOrder),
    (check_orders_differ, "forgets the seed", ForgetsTheSeed),
    (check_order_continues_from_every_position, "forgets the batch", ForgetsTheBatch),
    (check_order_continues_from_every_position, "forgets the epoch", ForgetsTheEpoch),
    (check_order_continues_from_every_position, "moves late", MovesLate),
]


def name_of(part: Any) -> str:
    return part if isinstance(part, str) else getattr(part, "__name__", "")


@pytest.mark.parametrize("check", dict.fromkeys(check for check, *_ in FIT_MUTANTS), ids=name_of)
def test_loop(check: Check) -> None:
    check(fit)


@pytest.mark.parametrize("check", dict.fromkeys(check for check, *_ in SHUFFLE_MUTANTS), ids=name_of)
def test_shuffle(check: Check) -> None:
    check(Shuffle)


@pytest.mark.parametrize(("check", "flaw", "mutant"), [*FIT_MUTANTS, *SHUFFLE_MUTANTS], ids=name_of)
def test_mutant_is_rejected(check: Check, flaw: str, mutant: Any) -> None:
    with pytest.raises(REJECTED):
        check(mutant)


# Recipes


def test_paper_recipe_is_the_papers() -> None:
    assert asdict(RECIPES["paper"]) == {
        "hidden": (256, 128, 64),
        "dropout": 0.0,
        "batch_norm": False,
        "embedding_dim": 16,
        "category_std": 0.01,
        "batch_size": 4096,
        "learning_rate": 1e-3,
        "patience": 2,
        "max_epochs": 50,
        "averaging": 0.0,
        "embedding_l2": 0.0,
        "plateau_factor": 1.0,
    }


def test_bars_recipe_is_the_published_one() -> None:
    """DCNv2_criteo_x4_001 of the BARS benchmark; what it shares with the paper's protocol is the paper's."""
    assert asdict(RECIPES["bars"]) == asdict(RECIPES["paper"]) | {
        "batch_size": 10000,
        "learning_rate": 0.001,
        "plateau_factor": 0.1,
        "embedding_l2": 1e-05,
        "dropout": 0.1,
        "batch_norm": True,
        "hidden": (1000, 1000, 1000, 1000, 1000),
        "max_epochs": 100,
    }
    assert options_of(backbones.backbones.get("dcnv2")) == {"cross_layers": 3}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("embedding_dim", "batch_size", "patience", "max_epochs") for value in (0, -1)),
        *(("learning_rate", value) for value in (0.0, -1e-3, float("nan"), float("inf"))),
        *((name, value) for name in ("embedding_l2", "category_std") for value in (-1e-9, float("nan"), float("inf"))),
        *((name, value) for name in ("averaging", "dropout") for value in (-0.1, 1.0, 1.5, float("nan"))),
        *(("plateau_factor", value) for value in (0.0, -0.5, 1.1, float("nan"))),
        ("hidden", (8, 0)),
        ("hidden", (-1,)),
    ],
)
def test_impossible_recipe_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"recipe: {name} must be .*; got") as caught:
        Recipe(**{name: value})
    assert repr(value) in str(caught.value)


def test_all_that_is_wrong_with_a_recipe_is_told_at_once() -> None:
    with pytest.raises(UsageError, match=r"batch_size .*; got 0; .*dropout .*; got 2.0; plateau_factor .*; got 0"):
        Recipe(batch_size=0, dropout=2.0, plateau_factor=0.0)


def test_batch_norm_needs_more_than_one_row() -> None:
    with pytest.raises(UsageError, match="batch_norm needs a batch_size above 1"):
        Recipe(batch_norm=True, batch_size=1)
    assert Recipe(batch_norm=True, batch_size=2).tower.batch_norm


@pytest.mark.parametrize(
    "limits",
    [
        {"batch_size": 1, "patience": 1, "max_epochs": 1, "embedding_dim": 1, "learning_rate": 1e-30},
        {"averaging": 0.0, "dropout": 0.0, "embedding_l2": 0.0, "category_std": 0.0, "plateau_factor": 1.0},
        {"averaging": 0.9999, "dropout": 0.9999, "plateau_factor": 1e-9, "hidden": ()},
    ],
)
def test_recipe_at_its_limits_is_taken(limits: dict[str, Any]) -> None:
    assert vars(Recipe(**limits)).items() >= limits.items()


def job_of(monkeypatch: pytest.MonkeyPatch, *options: str) -> scalarlens.job.Job:
    """The job that the command line makes of some options; nothing is trained."""
    jobs = []

    def caught(job: scalarlens.job.Job, *_: Any, **__: Any) -> None:
        jobs.append(job)
        raise UsageError("caught")

    monkeypatch.setattr(scalarlens.job, "train", caught)
    parts = ["--encoder", "deer", "--backbone", "dcnv2", "--input-scale", "raw"]
    assert main(["train", "data", *parts, "--seed", "1", "--out", "run", "--device", "cpu", *options]) == 2
    return jobs[0]


def count_modules(model: CtrModel) -> tuple[list[float], int]:
    dropouts = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    return dropouts, sum(isinstance(module, torch.nn.BatchNorm1d) for module in model.modules())


@pytest.mark.parametrize(
    ("options", "modules"),
    [
        ([], ([], 0)),
        (["--option", "recipe.dropout=0.25"], ([0.25] * 3, 0)),
        (["--option", "recipe.batch_norm=true"], ([], 3)),
        (["--recipe", "bars"], ([0.1] * 5, 5)),
        (["--recipe", "bars", "--option", "recipe.hidden=[4,4]"], ([0.1] * 2, 2)),
    ],
)
def test_recipe_reaches_the_backbone(
    monkeypatch: pytest.MonkeyPatch, options: list[str], modules: tuple[list[float], int]
) -> None:
    job = job_of(monkeypatch, *options)
    model = CtrModel.build(job.spec, TINY.statistics)
    assert count_modules(model) == modules
    assert job.spec.tower == job.recipe.tower == Tower(job.recipe.hidden, job.recipe.dropout, job.recipe.batch_norm)


def test_category_std_and_dimension_reach_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(monkeypatch, "--option", "recipe.category_std=0.5", "--option", "recipe.embedding_dim=64")
    table = CtrModel.build(job.spec, TINY.statistics).categories.weight[2:8]
    assert table.shape == (6, 64)
    assert table.std().item() == pytest.approx(0.5, rel=0.2)


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_seed_that_no_generator_takes_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, seed: int) -> None:
    command = ["train", str(tmp_path), "--encoder", "deer", "--backbone", "dnn", "--input-scale", "raw", "--out", "run"]
    assert main([*command, f"--seed={seed}"]) == 2
    assert f"got {seed}" in capsys.readouterr().err


# Golden curves


def test_golden_curves() -> None:
    """Loss and validation AUC of every epoch, as committed; `python tests/golden/regenerate.py` writes them anew."""
    expected = json.loads((GOLDEN / "training.json").read_text())
    found = runpy.run_path(str(GOLDEN / "regenerate.py"))["training_curves"]()
    assert found.keys() == expected.keys() == {"scalarlens", "deer"}
    for encoder, curve in expected.items():
        assert len(found[encoder]) == len(curve) > 2
        for entry, committed in zip(found[encoder], curve, strict=True):
            assert entry == pytest.approx(committed, rel=0, abs=1e-5), encoder


def test_golden_curves_are_of_a_training_that_learns() -> None:
    """A curve that stands still would be golden for a loop that does nothing."""
    for curve in json.loads((GOLDEN / "training.json").read_text()).values():
        assert curve[-1]["train_loss"] < curve[0]["train_loss"] - 0.01
        assert curve[-1]["valid_auc"] > 0.6
