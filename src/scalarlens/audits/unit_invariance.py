"""Whether a change of unit, with the range refitted, changes anything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from scalarlens.audits.base import Audit, Finding, audits
from scalarlens.audits.subject import Subject
from scalarlens.encoders import NumericalEncoder
from scalarlens.encoders.blocks import LearnedMesh, UnitRange
from scalarlens.registry import bind_options
from scalarlens.table.statistics import TrainingStatistics
from scalarlens.table.tensorizer import Tensorizer

#: `x -> a x + b`: feet to metres, and seconds to minutes after a shift by this part of the half range
UNITS = ((0.3048, 0.0), (1 / 60, 0.5))
#: relative to max(1, |token|)
TOLERANCE = 1e-5
#: how many roundings of float64 lie between a value and its place on [0, 1]
ROUNDINGS = 16


@audits.register("unit-invariance")
class UnitInvariance(Audit):
    """The same learned parameters over `a x + b` and over the statistics of `a x + b`: the same intervals and tokens.

    Only a mesh promises this. A value nearer to a node than float64 resolves may change sides; a constant column
    has no range to refit and keeps its unit.
    """

    question = "do intervals and tokens survive another unit, once the range is refitted?"

    def examine(self, subject: Subject) -> Finding:
        if not isinstance(getattr(subject.encoder, "mesh", None), LearnedMesh):
            return Finding(None, f"encoder {subject.encoder_name!r} has no mesh, and promises nothing about units")
        statistics = subject.artifact.tensorizer.statistics
        varied = statistics.high > statistics.low
        if not varied.any():
            return Finding(None, "no numerical column has a range")
        values, ids = subject.inputs
        tokens = subject.encoder(values, subject.category_tokens(ids))
        worst, moved = 0.0, 0
        for a, part in UNITS:
            scale, shift = np.where(varied, a, 1.0), np.where(varied, part * _half_range(statistics), 0.0)
            tensorizer = in_other_units(subject.artifact.tensorizer, scale, shift)
            other = refitted(subject, tensorizer)
            batch = tensorizer.batch(scale * subject.values + shift, subject.category_ids, subject.device)
            found = other(batch.values, subject.category_tokens(ids))
            gap = ((found - tokens).abs() / tokens.abs().clamp(min=1)).nan_to_num(nan=torch.inf)
            worst = max(worst, float(gap.max()))
            moved += _interval_changes(subject, other, values, batch.values)
        failures = [f"tokens moved by {worst:.3g}"] * (worst > TOLERANCE) + [f"{moved} intervals changed"] * (moved > 0)
        figures = {"largest_token_change": worst, "interval_changes": moved, "columns": int(varied.sum())}
        return Finding(not failures, " and ".join(failures), figures)


def in_other_units(tensorizer: Tensorizer, scale: np.ndarray, shift: np.ndarray) -> Tensorizer:
    """The tensorizer of a table whose numbers were `scale * x + shift` in training."""
    fitted = tensorizer.statistics
    moved = {name: scale * getattr(fitted, name) + shift for name in ("low", "high", "mean")}
    quantiles = scale[:, None] * fitted.quantiles + shift[:, None]
    statistics = replace(fitted, **moved, std=scale * fitted.std, quantiles=quantiles)
    return Tensorizer(tensorizer.schema, statistics, tensorizer.input_scale)


def refitted(subject: Subject, tensorizer: Tensorizer) -> NumericalEncoder:
    """The encoder over other statistics, with everything that it has learned."""
    trained = subject.encoder
    options = bind_options(
        "encoder", subject.encoder_name, type(trained), subject.artifact.spec["model"]["encoder_options"]
    )
    with torch.random.fork_rng(devices=[]):
        other = type(trained)(tensorizer.encoder_statistics, trained.n_categories, trained.embedding_dim, **options)
    other.load_state_dict({**other.state_dict(), **dict(trained.named_parameters())})
    return other.to(subject.device).eval()


def _half_range(statistics: TrainingStatistics) -> np.ndarray:
    half: np.ndarray = statistics.high * 0.5 - statistics.low * 0.5
    return half


def _interval_changes(subject: Subject, other: NumericalEncoder, values: Tensor, other_values: Tensor) -> int:
    """How many values lie in another interval, and are farther from every node than rounding reaches."""
    before, after = subject.encoder.mesh, other.mesh
    assert isinstance(before, LearnedMesh)
    assert isinstance(after, LearnedMesh)
    changed = before.locate(values)[0] != after.locate(other_values)[0]
    place = UnitRange.forward(before, values)
    distance = (place.unsqueeze(-1) - before.unit_boundaries()).abs().amin(-1)
    fitted = subject.artifact.tensorizer.statistics
    size = np.maximum(np.abs(fitted.low), np.abs(fitted.high)) / np.maximum(_half_range(fitted), 1e-300)
    reach = torch.from_numpy(ROUNDINGS * np.finfo(np.float64).eps * (1 + size)).to(values.device)
    return int((changed & (distance > reach) & ~values.isnan()).sum())
