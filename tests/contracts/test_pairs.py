"""Every backbone with every encoder on a tiny table: finite logits, and gradients that reach both sides."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from scalarlens import backbones, encoders
from scalarlens.backbones import Backbone, Tower
from scalarlens.model import CtrModel
from scalarlens.table.statistics import TrainingStatistics

from . import backbone_mutants
from .comparisons import assert_finite, seeded

ROWS, EMBEDDING_DIM = 32, 8


@cache
def tiny_table() -> tuple[np.ndarray, np.ndarray]:
    """Two numerical columns with a missing cell each, and ids of two categorical columns."""
    rng = np.random.default_rng(4)
    values = np.stack([rng.poisson(3, ROWS).astype(float), rng.normal(0, 1, ROWS)], axis=1)
    values[0, 0] = values[1, 1] = np.nan
    return values, rng.integers(0, 4, (ROWS, 2))


def check_trains_together(make: Callable[[int, int, int, Tower], Backbone], encoder: str) -> None:
    values, ids = tiny_table()
    statistics = TrainingStatistics.from_arrays(values, ids)
    model = seeded(
        lambda: CtrModel(
            encoders.build(encoder, statistics, 2, EMBEDDING_DIM),
            make(2, 2, EMBEDDING_DIM, Tower(hidden=(8,))),
            statistics.vocabulary_sizes,
        )
    )
    logits = model(torch.tensor(values), torch.tensor(ids))
    assert logits.shape == (ROWS,), f"logits must be [B] = [{ROWS}]; got {list(logits.shape)}"
    assert_finite(logits, "logits")
    F.binary_cross_entropy_with_logits(logits, (torch.arange(ROWS) % 2).float()).backward()
    for part in (model.categories, model.encoder, model.backbone):
        gradients = [p.grad for p in part.parameters() if p.grad is not None]
        for gradient in gradients:
            assert_finite(gradient, f"gradient in {type(part).__name__}")
        assert any(bool(gradient.any()) for gradient in gradients), f"{type(part).__name__} learns nothing"


@pytest.mark.parametrize("encoder", encoders.encoders.names())
@pytest.mark.parametrize("backbone", backbones.backbones.names())
def test_backbone_trains_with_encoder(backbone: str, encoder: str) -> None:
    check_trains_together(partial(backbones.build, backbone), encoder)


@pytest.mark.parametrize("mutant", [backbone_mutants.DetachesNumbers, backbone_mutants.KeepsUnitDimension])
def test_mutant_is_rejected(mutant: type[Backbone]) -> None:
    with pytest.raises(AssertionError, match=r"learns nothing|logits must be"):
        check_trains_together(mutant, "linear")
