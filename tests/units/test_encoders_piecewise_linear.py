"""Piecewise-linear embeddings: the encoding, its ends and precision, and the four ways to use it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scalarlens.encoders import build
from scalarlens.encoders.base import ValueEncoder
from scalarlens.encoders.linear import Linear
from scalarlens.encoders.piecewise_linear import (
    FARTHEST,
    PiecewiseLinearEncoding,
    PleA,
    PleB,
    PleRelu,
    PleReluBounded,
)
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics

RNG = np.random.default_rng(0)
#: as many columns as Criteo has numbers
THIRTEEN = np.random.default_rng(1).normal(size=(500, 13))
SMOOTH, HEAVY, TIED, BINARY, CONSTANT, MISSING, NARROW = range(7)
TABLE = np.stack(
    [
        RNG.normal(0, 1, 2000),
        RNG.lognormal(0, 2, 2000),
        np.where(RNG.random(2000) < 0.3, 0.0, RNG.poisson(4, 2000)),
        RNG.integers(0, 2, 2000).astype(float),
        np.full(2000, 3.0),
        np.full(2000, np.nan),
        1.46e7 + RNG.random(2000),
    ],
    axis=1,
)
PRESENT = np.nan_to_num(TABLE)
STATISTICS = TrainingStatistics.from_arrays(TABLE)
ALL = [PleA, PleB, PleRelu, PleReluBounded]


def encoder_of(part: type[ValueEncoder], table: np.ndarray = TABLE, **options: bool) -> ValueEncoder:
    torch.manual_seed(0)
    return part(TrainingStatistics.from_arrays(table), 0, 16, **options)


def randomised(encoder: ValueEncoder) -> ValueEncoder:
    """With weights in the piecewise part, which starts at zero in version B."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return encoder


def own_edges(encoding: PiecewiseLinearEncoding) -> list[np.ndarray]:
    return [np.unique(row) for row in encoding.edges.numpy()]


def staircase(values: np.ndarray, fields: list[np.ndarray], clip_to_range: bool = False) -> np.ndarray:
    """`phi` bin by bin, as the equation has it."""
    width = max(len(edges) for edges in fields) - 1
    phi = np.zeros((*values.shape, width))
    for field, edges in enumerate(fields):
        last = len(edges) - 2
        for k in range(last + 1):
            share = (values[:, field] - edges[k]) / (edges[k + 1] - edges[k])
            lower = -np.inf if k == 0 and not clip_to_range else 0.0
            upper = np.inf if k == last and not clip_to_range else 1.0
            phi[:, field, k] = np.clip(share, lower, upper)
    return phi


def rows_around_the_range() -> np.ndarray:
    low, high = STATISTICS.low, STATISTICS.high
    return np.vstack([PRESENT[:500], low, high, low - 5.0, high + 5.0, low - 1e3, high + 1e3])


def check_encoding(part: type[PiecewiseLinearEncoding], clip_to_range: bool) -> None:
    encoding, values = part(STATISTICS, bins=48, clip_to_range=clip_to_range), rows_around_the_range()
    expected = staircase(values, own_edges(encoding), clip_to_range)
    np.testing.assert_allclose(encoding(torch.tensor(values)).numpy(), expected, rtol=1e-12, atol=1e-12)


class ClosedEnds(PiecewiseLinearEncoding):
    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values).clamp(0.0, 1.0)


class AffineInSinglePrecision(PiecewiseLinearEncoding):
    def forward(self, values: Tensor) -> Tensor:
        left, right = self.edges[:, :-1], self.edges[:, 1:]
        slope = torch.where(right > left, 1 / (right - left), 0.0)
        return (values.float().unsqueeze(-1) * slope.float() - (left * slope).float()).clamp(0.0, 1.0).double()


@pytest.mark.parametrize("clip_to_range", [False, True])
def test_encoding_is_the_staircase(clip_to_range: bool) -> None:
    check_encoding(PiecewiseLinearEncoding, clip_to_range)


def test_encoding_check_rejects_closed_ends() -> None:
    with pytest.raises(AssertionError):
        check_encoding(ClosedEnds, clip_to_range=False)


def test_edges_are_the_distinct_quantiles_and_a_constant_column_is_one_bin() -> None:
    encoding = PiecewiseLinearEncoding(STATISTICS, bins=48)
    edges = own_edges(encoding)
    levels = np.arange(49) / 48
    for field in (SMOOTH, HEAVY, TIED, BINARY, NARROW):
        grid = np.interp(levels, np.arange(4097) / 4096, STATISTICS.quantiles[field])
        np.testing.assert_array_equal(edges[field], np.unique(grid))
    assert [len(e) - 1 for e in edges][:4] == [48, 48, len(np.unique(edges[TIED])) - 1, 1]
    np.testing.assert_array_equal(edges[CONSTANT], [3.0, 4.0])
    np.testing.assert_array_equal(edges[MISSING], [0.0, 1.0])


def test_encoding_inside_the_range_is_ones_a_share_and_zeros() -> None:
    phi = PiecewiseLinearEncoding(STATISTICS, bins=48)(torch.tensor(PRESENT)).numpy()
    assert ((phi >= 0) & (phi <= 1)).all()
    assert (np.diff(phi, axis=-1) <= 0).all()
    assert (((phi > 0) & (phi < 1)).sum(-1) <= 1).all()


def test_an_edge_has_as_many_ones_as_bins_below_it() -> None:
    encoding = PiecewiseLinearEncoding(STATISTICS, bins=48)
    for field, edges in enumerate(own_edges(encoding)):
        values = np.tile(STATISTICS.low, (len(edges), 1))
        values[:, field] = edges
        phi = encoding(torch.tensor(values))[:, field].numpy()
        np.testing.assert_array_equal(phi, np.arange(48) < np.arange(len(edges))[:, None])


@given(place=st.floats(-0.5, 1.5))
@settings(max_examples=30, deadline=None)
def test_encoding_is_continuous(place: float) -> None:
    encoding = PiecewiseLinearEncoding(STATISTICS, bins=48)
    values = STATISTICS.low + place * (STATISTICS.high - STATISTICS.low)
    near = np.stack([values, np.nextafter(values, np.inf)])
    phi = encoding(torch.tensor(near)).numpy()
    narrowest = np.array([np.diff(edges).min() for edges in own_edges(encoding)])
    step = (near[1] - near[0]) / narrowest
    assert (np.abs(phi[1] - phi[0]).max(-1) <= step * 1.001 + 1e-9 * np.abs(phi[0]).max(-1)).all()


def check_precision_far_from_zero(part: type[PiecewiseLinearEncoding]) -> None:
    column = np.repeat(1.4e7 + 3.0 * np.arange(5), 40)[:, None]
    encoding = part(TrainingStatistics.from_arrays(column), bins=4)
    place = encoding(torch.tensor([[1.4e7 + 7.0]]).double())[0, 0]
    torch.testing.assert_close(place, torch.tensor([1, 1, 1 / 3, 0]).double(), rtol=0, atol=1e-8)


def test_narrow_bins_far_from_zero_keep_their_precision() -> None:
    check_precision_far_from_zero(PiecewiseLinearEncoding)
    with pytest.raises(AssertionError):
        check_precision_far_from_zero(AffineInSinglePrecision)


@pytest.mark.parametrize("part", ALL)
def test_formula(part: type[PleA] | type[PleB]) -> None:
    encoder, values = randomised(encoder_of(part)).double(), rows_around_the_range()
    phi = staircase(values, own_edges(encoder.encoding))
    arrays = {name: p.detach().numpy() for name, p in encoder.named_parameters()}
    if isinstance(encoder, PleA):
        expected = np.einsum("bnk,nkd->bnd", phi, arrays["linear.weight"]) + arrays["linear.bias"]
        expected = np.maximum(expected, 0) if part is PleReluBounded else expected
    else:
        bend = np.einsum("bnk,nkd->bnd", phi, arrays["piecewise"])
        bend = np.maximum(bend, 0) if part is PleRelu else bend
        expected = values[:, :, None] * arrays["weight"] + arrays["bias"] + bend
    np.testing.assert_allclose(encoder(torch.tensor(values)).detach().numpy(), expected, rtol=1e-9, atol=1e-9)


def test_the_lowest_edge_has_the_bias_as_its_token() -> None:
    encoder = encoder_of(PleA)
    lowest = torch.tensor(STATISTICS.low[None, :])
    assert torch.equal(encoder(lowest)[0], encoder.linear.bias)


def check_affine_invariance(part: type[ValueEncoder], scale: float, shift: float) -> None:
    table = TABLE[:, [SMOOTH, HEAVY, TIED, BINARY]]
    encoder = randomised(encoder_of(part, table))
    mapped = randomised(encoder_of(part, scale * table + shift))
    torch.testing.assert_close(
        mapped(torch.tensor(scale * table + shift)), encoder(torch.tensor(table)), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("part", [PleA, PleReluBounded])
@pytest.mark.parametrize(("scale", "shift"), [(3.7, -12.0), (1e-3, 0.25), (64.0, 0.0)])
def test_tokens_survive_other_units(part: type[ValueEncoder], scale: float, shift: float) -> None:
    check_affine_invariance(part, scale, shift)


@pytest.mark.parametrize("part", [PleB, PleRelu])
def test_version_b_moves_with_the_units(part: type[ValueEncoder]) -> None:
    with pytest.raises(AssertionError):
        check_affine_invariance(part, 3.7, -12.0)


class StartsAnywhere(PleB):
    def __init__(self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        torch.nn.init.normal_(self.piecewise, std=0.01)


def check_starts_as_linear(part: type[PleB]) -> None:
    assert torch.equal(encoder_of(part)(torch.tensor(TABLE))[PRESENT == TABLE], _linear_tokens(part))


def _linear_tokens(part: type[PleB]) -> Tensor:
    encoder, linear = encoder_of(part), encoder_of(Linear)
    with torch.no_grad():
        linear.weight.copy_(encoder.weight)
        linear.bias.copy_(encoder.bias)
    return linear(torch.tensor(TABLE))[PRESENT == TABLE]


@pytest.mark.parametrize("part", [PleB, PleRelu])
def test_version_b_starts_as_linear_to_the_bit(part: type[PleB]) -> None:
    check_starts_as_linear(part)


def test_start_check_rejects_a_random_piecewise_part() -> None:
    with pytest.raises(AssertionError):
        check_starts_as_linear(StartsAnywhere)


def test_version_b_less_its_linear_part_is_bounded_and_keeps_with_the_units() -> None:
    table = TABLE[:, [SMOOTH, HEAVY, TIED, BINARY]]
    encoder = randomised(encoder_of(PleB, table))
    mapped = randomised(encoder_of(PleB, 3.7 * table - 12))
    bend, moved = encoder.bend(torch.tensor(table)), mapped.bend(torch.tensor(3.7 * table - 12))
    torch.testing.assert_close(moved, bend, rtol=0, atol=1e-5)
    assert (bend.abs() <= encoder.piecewise.abs().sum(1) + 1e-5).all()


def train(encoder: ValueEncoder) -> Tensor:
    """Twenty steps of Adam on the first four columns; the tokens afterwards."""
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-2)
    values = torch.tensor(TABLE[:64, :4])
    target = torch.randn(64, 4, 16, generator=torch.Generator().manual_seed(2))
    for _ in range(20):
        optimizer.zero_grad()
        (encoder(values) - target).square().mean().backward()
        optimizer.step()
    return encoder(values)


def check_stays_linear(part: type[PleB]) -> None:
    encoder, linear = encoder_of(part, TABLE[:, :4]), encoder_of(Linear, TABLE[:, :4])
    state = encoder.state_dict()
    linear.load_state_dict({name: state[name] for name in linear.state_dict()})
    assert torch.equal(train(encoder), train(linear))
    assert (encoder.piecewise == 0).all()


def test_ple_relu_trains_as_linear_to_the_bit() -> None:
    check_stays_linear(PleRelu)
    with pytest.raises(AssertionError):
        check_stays_linear(PleB)


def test_ple_relu_declares_what_cannot_learn() -> None:
    encoder = encoder_of(PleRelu)
    encoder(torch.tensor(TABLE)).sum().backward()
    still = {name for name, p in encoder.named_parameters() if not (p.grad != 0).any()}
    assert still == set(PleRelu.idle_parameters)
    assert PleB.idle_parameters == ()


def test_bounded_ple_relu_is_bounded_in_the_range_and_not_negative() -> None:
    encoder = randomised(encoder_of(PleReluBounded))
    tokens = encoder(torch.tensor(PRESENT))
    assert (tokens >= 0).all()
    bound = encoder.linear.weight.abs().sum(1) + encoder.linear.bias.abs()
    assert (tokens <= bound + 1e-5).all()


@pytest.mark.parametrize(
    ("name", "count"),
    [("ple-a", 10_192), ("ple-relu-bounded", 10_192), ("ple-b", 10_400), ("ple-relu", 10_400)],
)
def test_parameter_count(name: str, count: int) -> None:
    encoder = build(name, TrainingStatistics.from_arrays(THIRTEEN), 26)
    assert sum(p.numel() for n, p in encoder.named_parameters() if n != "missing") == count


@pytest.mark.parametrize("part", ALL)
def test_state_dict_carries_edges_and_bin_counts(part: type[ValueEncoder]) -> None:
    trained, other = randomised(encoder_of(part)), encoder_of(part, TABLE[:, ::-1])
    other.load_state_dict(trained.state_dict())
    values = torch.tensor(rows_around_the_range())
    assert torch.equal(other(values), trained(values))


@pytest.mark.parametrize("part", ALL)
def test_edges_keep_float64(part: type[ValueEncoder]) -> None:
    encoder = encoder_of(part)
    exact = encoder.encoding.edges.clone()
    assert torch.equal(encoder.half().float().encoding.edges, exact)
    assert encoder.double()(torch.tensor(TABLE[:3])).dtype == torch.float64


@pytest.mark.parametrize("part", ALL)
def test_tokens_are_finite_and_exports_with_a_free_batch_size(part: type[ValueEncoder]) -> None:
    encoder = randomised(encoder_of(part))
    values = torch.tensor(np.vstack([TABLE[:20], np.full((1, 7), 1e12), np.full((1, 7), -1e12)]))
    context = torch.zeros(22, 2, 16)
    assert encoder(values, context).isfinite().all()
    rows = torch.export.Dim("rows")
    program = torch.export.export(encoder, (values[:5], context[:5]), dynamic_shapes=({0: rows}, {0: rows})).module()
    for n in (0, 1, 22):
        actual, expected = program(values[:n], context[:n]), encoder(values[:n])
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_open_ends_saturate() -> None:
    column = np.array([[0.0], [1e-30], [1.0]])
    encoder = PleA(TrainingStatistics.from_arrays(column), 0, 4, bins=2)
    values = torch.tensor([[-1e12], [1e300]], dtype=torch.float64)
    phi = encoder.encoding(values)
    assert phi[0, 0, 0] == -FARTHEST
    assert phi[1, 0, -1] == FARTHEST
    assert encoder(values).isfinite().all()


def test_clipping_to_the_range_gives_the_tokens_of_its_ends() -> None:
    encoder = randomised(encoder_of(PleA, clip_to_range=True))
    low, high = torch.tensor(STATISTICS.low[None]), torch.tensor(STATISTICS.high[None])
    assert torch.equal(encoder(low - 9), encoder(low))
    far = [SMOOTH, HEAVY, TIED, BINARY, NARROW]
    assert torch.equal(encoder(high + 9)[:, far], encoder(high)[:, far])


def test_options_without_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1; got 0"):
        PleA(STATISTICS, 0, 4, bins=0)
