"""How much a trained model leans on numerical context: a permutation within bins of the focal value."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scalarlens import metrics
from scalarlens.audits.base import Audit, Finding, audits
from scalarlens.audits.subject import Subject, largest_change
from scalarlens.table.statistics import QUANTILE_LEVELS

BINS = 16
SEED = 0
FIGURES = ("auc_drop", "log_loss_increase", "mean_probability_change", "relative_rms")


@audits.register("context-permutation")
class ContextPermutation(Audit):
    """`e_i` anew from `(x_ri, x_π(r),-i)`, put into the otherwise unchanged row, with `π` within bins of `x_i`.

    The other numbers move together, so that they stay consistent with each other and lose only their tie to the
    row. A measurement, averaged over the fields; but it has to be exactly 0 for an encoder that declares no
    numerical context, and for every encoder where nothing moves.

    NOTE[DIFF] The paper gives neither bins nor targets. Bins are those of 16 quantiles of the training rows,
    equal ones merged, and one for missing cells; every numerical field is a target once.
    """

    question = "how much does the model lean on the numbers around a number?"

    def examine(self, subject: Subject) -> Finding:
        n = subject.encoder.n_values
        if n < 2:
            return Finding(None, "fewer than two numerical fields: no number has another one around it")
        whole = Frozen.of(subject)
        fields = [whole.measure(subject, field, within_bins(subject, field)) for field in range(n)]
        names = [column.name for column in subject.artifact.schema.numeric]
        figures: dict[str, Any] = {key: _mean([entry[key] for entry in fields]) for key in FIGURES}
        figures["fields"] = dict(zip(names, fields, strict=True))
        warnings = () if subject.labels is not None else ("the rows have no labels, so AUC and log loss are not there",)
        if largest_change(Frozen.of(subject).tokens, whole.tokens):
            return Finding(False, "the same rows in the same order get other tokens", figures, warnings)
        if subject.encoder.context in ("none", "categorical"):
            changed = any(entry[key] not in (0, None) for entry in fields for key in FIGURES)
            reason = f"the encoder declares context {subject.encoder.context!r} but reads other numbers"
            return Finding(not changed, reason if changed else "", figures, warnings)
        return Finding(None, "a measurement: it judges nothing", figures, warnings)


def within_bins(subject: Subject, field: int) -> Tensor:
    """A permutation of the rows that keeps every row in its bin of this field."""
    grid = subject.artifact.tensorizer.statistics.quantiles[field]
    edges = np.unique(grid[:: QUANTILE_LEVELS // BINS])[1:-1]
    column = subject.values[:, field]
    bins = np.where(np.isnan(column), -1, np.searchsorted(edges, column, side="right"))
    order, rng = np.arange(len(column)), np.random.default_rng([SEED, field])
    for bin_ in np.unique(bins):
        rows = np.flatnonzero(bins == bin_)
        order[rows] = rng.permutation(rows)
    return torch.from_numpy(order).to(subject.device)


class Frozen(NamedTuple):
    """The model on the rows as they are: tokens of both kinds and logits."""

    tokens: Tensor
    category_tokens: Tensor
    logits: np.ndarray

    @classmethod
    def of(cls, subject: Subject) -> Frozen:
        values, ids = subject.inputs
        category_tokens = subject.category_tokens(ids)
        tokens = subject.encoder(values, category_tokens)
        return cls(tokens, category_tokens, _logits(subject, tokens, category_tokens))

    def measure(self, subject: Subject, field: int, order: Tensor) -> dict[str, float | None]:
        """What one token, made in the numerical context of other rows, does to the model when it is put back."""
        values, _ = subject.inputs
        focal = torch.arange(values.shape[1], device=values.device) == field
        permuted = subject.encoder(torch.where(focal, values, values[order]), self.category_tokens)[:, field]
        changed, own = self.tokens.clone(), self.tokens[:, field]
        changed[:, field] = permuted
        logits = _logits(subject, changed, self.category_tokens)
        before, after = metrics.sigmoid(self.logits), metrics.sigmoid(logits)
        found: dict[str, float | None] = {
            "auc_drop": None,
            "log_loss_increase": None,
            "mean_probability_change": float(np.abs(after - before).mean()),
            "relative_rms": float((permuted - own).norm() / own.norm().clamp(min=1e-30)),
        }
        if subject.labels is not None:
            drop = metrics.auc(subject.labels, self.logits) - metrics.auc(subject.labels, logits)
            found["auc_drop"] = None if math.isnan(drop) else drop
            found["log_loss_increase"] = metrics.log_loss(subject.labels, after) - metrics.log_loss(
                subject.labels, before
            )
        return found


def _logits(subject: Subject, value_tokens: Tensor, category_tokens: Tensor) -> np.ndarray:
    model = subject.artifact.model
    weights = []
    if model.category_weights is not None:
        weights.append(model.category_weights(subject.inputs[1]).squeeze(-1))
    logits: Tensor = model.backbone(value_tokens, category_tokens, *weights)
    return logits.double().cpu().numpy()


def _mean(found: list[float | None]) -> float | None:
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if known else None
