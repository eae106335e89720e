"""AutoDis: its formula, its weights near zero and far out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from scalarlens.encoders import build
from scalarlens.encoders.autodis import AutoDis
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics

RNG = np.random.default_rng(0)
#: as many columns as Criteo has numbers
THIRTEEN = np.random.default_rng(1).normal(size=(500, 13))
TABLE = np.stack([RNG.normal(0, 2, 300), RNG.lognormal(0, 2, 300), np.full(300, 3.0), np.full(300, np.nan)], axis=1)
VALUES = np.nan_to_num(TABLE, nan=-0.7)


def encoder_of(part: type[AutoDis] = AutoDis, table: np.ndarray = TABLE, **options: float) -> AutoDis:
    torch.manual_seed(0)
    return part(TrainingStatistics.from_arrays(table), 0, 16, **options).double()


def check_formula(encoder: AutoDis, skip: float, temperature: float) -> None:
    w, mixing, meta = (p.detach().numpy() for p in (encoder.projection, encoder.mixing, encoder.meta_embeddings))
    xw = VALUES[:, :, None] * w
    h = np.where(xw > 0, xw, 0.01 * xw)
    scores = (np.einsum("bnh,nhk->bnk", h, mixing) + skip * h) / temperature
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bnk,nkd->bnd", weights, meta)
    tokens = encoder(torch.tensor(VALUES)).detach().numpy()
    np.testing.assert_allclose(tokens, expected, rtol=0, atol=1e-12)


class NoSkip(AutoDis):
    def scores(self, values: Tensor) -> Tensor:
        h = torch.nn.functional.leaky_relu(values.unsqueeze(-1) * self.projection)
        return torch.bmm(h.transpose(0, 1), self.mixing).transpose(0, 1)


class Cold(AutoDis):
    def weights(self, values: Tensor) -> Tensor:
        return torch.softmax(self.scores(values), dim=-1)


def test_formula() -> None:
    check_formula(encoder_of(), 0.8, 0.815)
    check_formula(encoder_of(meta_embeddings=5, skip=0.2, temperature=0.1), 0.2, 0.1)


@pytest.mark.parametrize("mutant", [NoSkip, Cold])
def test_formula_rejects(mutant: type[AutoDis]) -> None:
    with pytest.raises(AssertionError):
        check_formula(encoder_of(mutant), 0.8, 0.815)


def test_weights_are_shares() -> None:
    weights = encoder_of().weights(torch.tensor(VALUES))
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(300, 4).double(), rtol=0, atol=1e-12)


def test_zero_is_the_mean_of_the_meta_embeddings() -> None:
    encoder = encoder_of()
    token = encoder(torch.zeros(1, 4).double())[0]
    torch.testing.assert_close(token, encoder.meta_embeddings.mean(1), rtol=0, atol=1e-14)


def test_scores_of_positive_values_scale_with_them() -> None:
    encoder, values = encoder_of(), torch.tensor(np.abs(VALUES))
    torch.testing.assert_close(encoder.scores(2 * values), 2 * encoder.scores(values), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_far_out_one_meta_embedding_takes_all(sign: float) -> None:
    weights = encoder_of().float().weights(torch.tensor([[1e7], [1e12]]).double().expand(2, 4) * sign)
    assert (weights.max(-1).values > 1 - 1e-6).all()
    assert torch.equal(weights[0].argmax(-1), weights[1].argmax(-1))


def test_parameter_count() -> None:
    encoder = build("autodis", TrainingStatistics.from_arrays(THIRTEEN), 26)
    assert sum(p.numel() for n, p in encoder.named_parameters() if n != "missing") == 9620


def test_tokens_move_with_the_units() -> None:
    encoder, other = encoder_of(), encoder_of(table=3.7 * TABLE - 12)
    torch.testing.assert_close(encoder.mixing, other.mixing, rtol=0, atol=0)
    moved = other(torch.tensor(3.7 * TABLE - 12)) - encoder(torch.tensor(TABLE))
    assert moved.abs().max() > 1e-3


def test_tokens_are_finite_and_exports_with_a_free_batch_size() -> None:
    encoder = encoder_of().float()
    values = torch.tensor(np.vstack([TABLE[:20], np.full((1, 4), 1e12), np.full((1, 4), -1e12)]))
    context = torch.zeros(22, 2, 16)
    assert encoder(values, context).isfinite().all()
    rows = torch.export.Dim("rows")
    program = torch.export.export(encoder, (values[:5], context[:5]), dynamic_shapes=({0: rows}, {0: rows})).module()
    for n in (0, 1, 22):
        torch.testing.assert_close(program(values[:n], context[:n]), encoder(values[:n]), rtol=0, atol=1e-6)


def test_options_without_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="meta_embeddings must be at least 1; got 0"):
        encoder_of(meta_embeddings=0)
    with pytest.raises(UsageError, match="temperature must be positive; got 0"):
        encoder_of(temperature=0.0)
