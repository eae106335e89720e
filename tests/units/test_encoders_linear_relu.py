"""Linear-ReLU: its formula, its shape as a function of the value, its start."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scalarlens.encoders import build
from scalarlens.encoders.linear_relu import LinearRelu
from scalarlens.table.statistics import TrainingStatistics

RNG = np.random.default_rng(0)
#: as many columns as Criteo has numbers
THIRTEEN = np.random.default_rng(1).normal(size=(500, 13))
TABLE = np.stack([RNG.normal(0, 2, 300), RNG.lognormal(0, 2, 300), np.full(300, 3.0)], axis=1)
NUMBERS = st.floats(-50, 50)


def encoder_of(part: type[LinearRelu] = LinearRelu, table: np.ndarray = TABLE, dim: int = 16) -> LinearRelu:
    torch.manual_seed(0)
    return part(TrainingStatistics.from_arrays(table), 0, dim).double()


def check_formula(encoder: LinearRelu) -> None:
    weight, bias = encoder.weight.detach().numpy(), encoder.bias.detach().numpy()
    expected = np.maximum(TABLE[:, :, None] * weight + bias, 0.0)
    np.testing.assert_allclose(encoder(torch.tensor(TABLE)).detach().numpy(), expected, rtol=0, atol=1e-12)


class Leaky(LinearRelu):
    def embed(self, values: Tensor) -> Tensor:
        linear = values.unsqueeze(-1) * self.weight + self.bias
        return torch.where(linear > 0, linear, 0.01 * linear)


def test_formula() -> None:
    check_formula(encoder_of())
    with pytest.raises(AssertionError):
        check_formula(encoder_of(Leaky))


@given(a=NUMBERS, b=NUMBERS)
@settings(max_examples=30, deadline=None)
def test_every_coordinate_is_convex_and_not_negative(a: float, b: float) -> None:
    rows = torch.tensor([[a], [(a + b) / 2], [b]], dtype=torch.float64).expand(3, 3)
    left, middle, right = encoder_of()(rows).detach()
    assert (middle >= 0).all()
    assert (middle <= (left + right) / 2 + 1e-12).all()


def test_every_coordinate_has_one_kink_at_most() -> None:
    grid = torch.linspace(-40, 40, 2001, dtype=torch.float64)[:, None].expand(-1, 3)
    bends = encoder_of()(grid).detach().diff(n=2, dim=0).abs() > 1e-9
    # A kink between two grid points shows in the second differences at both.
    assert bends.any()
    assert (bends.sum(0) <= 2).all()
    assert (bends[:-1] & bends[1:]).sum() == (bends.sum(0) == 2).sum()


def test_start_and_parameter_count() -> None:
    encoder = build("linear-relu", TrainingStatistics.from_arrays(THIRTEEN), 26)
    sizes = {name: p.numel() for name, p in encoder.named_parameters()}
    assert sum(sizes.values()) - sizes["missing"] == 416
    for name in ("weight", "bias"):
        start = dict(encoder.named_parameters())[name].detach().abs()
        assert 0.2 < start.max() <= 0.25


def test_tokens_move_with_the_units() -> None:
    encoder, other = encoder_of(), encoder_of(table=3.7 * TABLE - 12)
    torch.testing.assert_close(encoder.weight, other.weight, rtol=0, atol=0)
    moved = other(torch.tensor(3.7 * TABLE - 12)) - encoder(torch.tensor(TABLE))
    assert moved.abs().max() > 1e-2


def test_exports_with_a_free_batch_size() -> None:
    encoder, values = encoder_of(), torch.tensor(TABLE)
    context = torch.zeros(300, 0, 16)
    rows = torch.export.Dim("rows")
    program = torch.export.export(encoder, (values[:5], context[:5]), dynamic_shapes=({0: rows}, {0: rows})).module()
    for n in (0, 1, 300):
        torch.testing.assert_close(program(values[:n], context[:n]), encoder(values[:n]), rtol=0, atol=1e-12)
