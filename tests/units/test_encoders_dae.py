"""dae and dae-x against formulas in NumPy, SciPy and fractions; the level curve that dae and daes share."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import betainc
from torch import Tensor

from scalarlens.encoders import dae as module
from scalarlens.encoders.dae import AnchorEncoder, Dae, DaeX, LevelCurve, expected_order_statistics
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics

Make = Callable[..., AnchorEncoder]
SCALES = (8, 16, 32)
COLUMNS = ("normal", "heavy", "zeros", "middle", "few", "constant", "missing", "narrow")


def table(rows: int = 500) -> np.ndarray:
    """`zeros` is mostly its lowest value, `middle` mostly a value inside its range."""
    rng = np.random.default_rng(5)
    heavy, normal = rng.lognormal(0, 4, rows), rng.normal(0, 1, rows)
    zeros = np.where(rng.random(rows) < 0.9, 0.0, heavy)
    middle = np.where(rng.random(rows) < 0.98, 0.3, normal)
    columns = [
        normal,
        heavy,
        zeros,
        middle,
        rng.integers(0, 4, rows),
        np.full(rows, 3.0),
        np.full(rows, np.nan),
    ]
    return np.stack([*columns, 1.46e7 + rng.random(rows)], axis=1)


def statistics() -> TrainingStatistics:
    return TrainingStatistics.from_arrays(table())


def probes() -> np.ndarray:
    """Training values, both ends, and values beyond them."""
    known = statistics()
    ends = np.stack([known.low, known.high])
    beyond = ends + (known.high - known.low + 1) * [[-3], [3]]
    return np.nan_to_num(np.concatenate([table(40), ends, beyond]), nan=0.0)


def scrambled(encoder: AnchorEncoder) -> AnchorEncoder:
    """In float64, with every parameter far from its start."""
    generator = torch.Generator().manual_seed(3)
    encoder = encoder.double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return encoder


def tokens_of(encoder: AnchorEncoder, values: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return encoder(torch.tensor(values)).numpy()


def anchors_by_beta_differences(quantiles: np.ndarray, size: int) -> np.ndarray:
    """`∫ Q(t) beta(t; k, M-k+1) dt` cell by cell, from differences of incomplete beta functions."""
    cells = quantiles.shape[1] - 1
    t, j = np.linspace(0, 1, cells + 1), np.arange(cells)
    anchors = []
    for k in range(1, size + 1):
        mass = np.diff(betainc(k, size - k + 1, t))
        first_moment = k / (size + 1) * np.diff(betainc(k + 1, size - k + 1, t))
        rise = np.diff(quantiles, axis=1)
        anchors.append(((quantiles[:, :-1] - rise * j) * mass + rise * cells * first_moment).sum(1))
    return np.stack(anchors, axis=1)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def level_of(x: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Linear through `(z_k, k/(M+1))`; anchors that agree to nine digits are one, with the middle level."""
    groups: list[list[int]] = [[0]]
    for k in range(1, len(anchors)):
        near = anchors[k] - anchors[k - 1] <= 1e-9 * abs(anchors[k])
        groups[-1].append(k) if near else groups.append([k])
    places = [(anchors[g[0]] + anchors[g[-1]]) / 2 for g in groups]
    levels = [(g[0] + g[-1] + 2) / 2 / (len(anchors) + 1) for g in groups]
    return np.interp(x, places, levels)


def formula(encoder: AnchorEncoder, values: np.ndarray, scales: tuple[int, ...], input_units: bool) -> np.ndarray:
    """The tokens, field by field and scale by scale, from statistics and parameters."""
    known = statistics()
    nodes, temperature = encoder.nodes.detach().numpy(), np.exp(encoder.log_temperature.detach().numpy())
    tokens = np.zeros((*values.shape, nodes.shape[-1]))
    for field, (x, low, high) in enumerate(zip(values.T, known.low, known.high, strict=True)):
        span = high - low or 1.0
        first = 0
        for s, size in enumerate(scales):
            z = expected_order_statistics((known.quantiles[field] - low)[None] / span, size)[0]
            if input_units:
                distance = np.abs(x[:, None] - (low + z * (high - low)))
            else:
                level = level_of(np.clip((x - low) / span, 0, 1), z)
                distance = np.abs(level[:, None] * (size + 1) - np.arange(1, size + 1))
            weights = softmax(-distance / temperature[field, s])
            tokens[:, field] += weights @ nodes[field, first : first + size] / len(scales)
            first += size
    return tokens


def check_formula(make: Make, input_units: bool, atol: float) -> None:
    encoder = scrambled(make(statistics(), 0, 8))
    values = probes()
    expected = formula(encoder, values, SCALES, input_units)
    np.testing.assert_allclose(tokens_of(encoder, values), expected, rtol=0, atol=atol)


def test_dae_follows_the_formula() -> None:
    # Beside the value that fills nearly all of a column, anchors lie so close that levels amplify rounding.
    check_formula(Dae, input_units=False, atol=2e-7)


def test_dae_x_follows_the_formula() -> None:
    check_formula(DaeX, input_units=True, atol=1e-10)


class SumOfScales(Dae):
    """The scales are added up instead of averaged."""

    def embed(self, values: Tensor) -> Tensor:
        return super().embed(values) * len(self.scales)


class SharedTemperature(Dae):
    """The first scale's temperature serves all."""

    def weights(self, values: Tensor) -> list[Tensor]:
        heat = self.log_temperature[:, :1].exp()
        return [torch.softmax(-distance / heat, dim=-1) for distance in self.distances(values)]


class SquaredDistance(Dae):
    """A Gaussian kernel."""

    def distances(self, values: Tensor) -> list[Tensor]:
        return [distance.square() for distance in super().distances(values)]


@pytest.mark.parametrize("mutant", [SumOfScales, SharedTemperature, SquaredDistance], ids=lambda part: part.__name__)
def test_mutant_formulas_are_rejected(mutant: type) -> None:
    with pytest.raises(AssertionError, match="Not equal"):
        check_formula(mutant, input_units=False, atol=2e-7)


def test_dae_averages_its_scales() -> None:
    known = statistics()
    encoder = scrambled(Dae(known, 0, 8))
    alone, first = [], 0
    for s, size in enumerate(SCALES):
        single = Dae(known, 0, 8, scales=(size,)).double()
        with torch.no_grad():
            single.nodes.copy_(encoder.nodes[:, first : first + size])
            single.log_temperature.copy_(encoder.log_temperature[:, s : s + 1])
        alone.append(tokens_of(single, probes()))
        first += size
    np.testing.assert_allclose(tokens_of(encoder, probes()), np.mean(alone, axis=0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("part", [Dae, DaeX])
def test_weights_sum_to_one(part: type) -> None:
    for weights, size in zip(scrambled(part(statistics(), 0, 8)).weights(torch.tensor(probes())), SCALES, strict=True):
        assert weights.shape == (len(probes()), len(COLUMNS), size)
        assert bool((weights >= 0).all())
        torch.testing.assert_close(
            weights.sum(-1), torch.ones(len(probes()), len(COLUMNS)).double(), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("part", [Dae, DaeX])
def test_tokens_are_constant_beyond_the_outer_anchors(part: type) -> None:
    encoder, known = scrambled(part(statistics(), 0, 8)), statistics()
    outer = [expected_order_statistics(known.unit_quantiles(), size)[:, [0, -1]] for size in SCALES]
    below, above = np.min(outer, axis=0)[:, 0] / 2, (np.max(outer, axis=0)[:, 1] + 1) / 2
    spread = [COLUMNS.index(name) for name in COLUMNS if name not in ("constant", "missing")]
    for share, others in ((below, (known.low, -1e12, -np.inf)), (above, (known.high, 1e12, np.inf))):
        expected = tokens_of(encoder, (known.low + (known.high - known.low) * share)[None])
        for other in others:
            found = tokens_of(encoder, np.broadcast_to(other, (1, len(COLUMNS))).copy())
            np.testing.assert_array_equal(found[:, spread], expected[:, spread])


def check_affine(make: Make) -> None:
    """Refit in other units and keep the parameters: the tokens stay."""
    rows = table()[:, [COLUMNS.index(name) for name in ("normal", "heavy", "zeros", "middle", "few", "constant")]]
    encoder = make(TrainingStatistics.from_arrays(rows), 0, 8)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    expected = tokens_of(encoder, rows)
    units = np.random.default_rng(0).normal(size=(40, 2)) * [2, 20]
    for scale, shift in [(1e4, 0.0), *zip(np.exp(units[:, 0]), units[:, 1], strict=True)]:
        moved = make(TrainingStatistics.from_arrays(rows * scale + shift), 0, 8)
        moved.load_state_dict(dict(encoder.named_parameters()), strict=False)
        np.testing.assert_allclose(tokens_of(moved, rows * scale + shift), expected, rtol=0, atol=1e-5)


def test_dae_does_not_depend_on_units() -> None:
    check_affine(Dae)


def test_dae_x_depends_on_units() -> None:
    with pytest.raises(AssertionError, match="Not equal"):
        check_affine(DaeX)


def test_anchors_that_are_one_place_must_be_united(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANCHOR_TOLERANCE", 0.0)
    with pytest.raises(AssertionError, match="Not equal"):
        check_affine(Dae)


@pytest.mark.parametrize("size", [1, 2, 8, 16, 32])
def test_anchors_of_a_uniform_column(size: int) -> None:
    uniform = np.linspace(-2.0, 6.0, 4097)[None]
    expected = -2 + 8 * np.arange(1, size + 1) / (size + 1)
    np.testing.assert_allclose(expected_order_statistics(uniform, size)[0], expected, rtol=0, atol=1e-12)


def test_anchors_are_the_mean_of_sorted_samples() -> None:
    column = np.random.default_rng(1).gamma(0.7, 2.0, 20_000)
    known = TrainingStatistics.from_arrays(column[:, None])
    draws = np.sort(np.random.default_rng(2).choice(column, (20_000, 16)), axis=1)
    error = np.abs(expected_order_statistics(known.quantiles, 16)[0] - draws.mean(0))
    assert bool((error < 4.5 * draws.std(0) / len(draws) ** 0.5).all())


@pytest.mark.parametrize("size", [3, 8, 32])
def test_anchors_agree_with_incomplete_beta_functions(size: int) -> None:
    u = statistics().unit_quantiles()
    found = expected_order_statistics(u, size)
    np.testing.assert_allclose(found, anchors_by_beta_differences(u, size), rtol=0, atol=2e-13)
    assert bool((np.diff(found, axis=1) >= 0).all())


def check_tiny_anchors(anchors_of: Callable[[np.ndarray, int], np.ndarray]) -> None:
    """A column that is 0 up to its last two grid points: the anchors in exact fractions."""
    size, cells = 8, 4096
    grid = np.zeros((1, cells + 1))
    grid[0, -2:] = 1.0, 1e9
    found = anchors_of(grid, size)[0]

    def below(k: int, t: Fraction) -> Fraction:
        """`∫_0^t P(Bin(size, s) < k) ds`."""
        whole = Fraction(0)
        for i in range(k):
            for j in range(size - i + 1):
                whole += comb(size, i) * comb(size - i, j) * (-1) ** j * t ** (i + j + 1) / (i + j + 1)
        return whole

    for k in range(1, size + 1):
        exact = Fraction(0)
        for j in (cells - 2, cells - 1):
            rise = Fraction(float(grid[0, j + 1])) - Fraction(float(grid[0, j]))
            exact += rise * cells * (below(k, Fraction(j + 1, cells)) - below(k, Fraction(j, cells)))
        assert found[k - 1] == pytest.approx(float(exact), rel=1e-11, abs=0)


def test_tiny_anchors_keep_their_relative_precision() -> None:
    check_tiny_anchors(expected_order_statistics)


def test_anchors_out_of_differences_are_rejected() -> None:
    with pytest.raises(AssertionError):
        check_tiny_anchors(anchors_by_beta_differences)


@given(
    steps=st.lists(st.sampled_from([0.0, 0.0, 1e-12, 0.25, 1.0, 1e6]), min_size=1, max_size=40),
    start=st.floats(-1e6, 1e6),
    share=st.floats(-0.2, 1.2),
)
@settings(max_examples=80, deadline=None)
def test_level_curve_is_linear_interpolation_between_distinct_places(
    steps: list[float], start: float, share: float
) -> None:
    places = start + np.cumsum([0.0, *steps])
    levels = np.linspace(0.1, 0.9, len(places))
    distinct = np.unique(places)
    middle = [(levels[places == place][0] + levels[places == place][-1]) / 2 for place in distinct]
    values = np.array([places[0] + share * (places[-1] - places[0]), *places])
    found = LevelCurve(places[None], levels[None])(torch.tensor(values)[:, None]).numpy()[:, 0]
    np.testing.assert_allclose(found[1:], np.interp(places, distinct, middle), rtol=0, atol=1e-12)
    near = np.interp(values[0] + np.array([-1, 1]) * 4 * np.spacing(abs(values[0])), distinct, middle)
    assert near[0] - 1e-12 <= found[0] <= near[1] + 1e-12


@pytest.mark.parametrize("points", [1, 2, 3, 4, 5, 8, 9, 33])
def test_level_curve_finds_every_interval(points: int) -> None:
    places = np.cumsum(np.arange(1.0, points + 1))
    levels = np.arange(points) / points
    values = np.concatenate([places, (places[1:] + places[:-1]) / 2, [-1e300, 1e300, -np.inf, np.inf]])
    found = LevelCurve(places[None], levels[None])(torch.tensor(values)[:, None]).numpy()[:, 0]
    np.testing.assert_allclose(found, np.interp(values, places, levels), rtol=0, atol=1e-15)


def test_level_curve_over_the_widest_range() -> None:
    curve = LevelCurve(np.array([[-8.9e307, 8.9e307]]), np.array([[0.0, 1.0]]))
    found = curve(torch.tensor([[-8.9e307], [0.0], [4.45e307], [1.7e308]], dtype=torch.float64))
    np.testing.assert_allclose(found.numpy()[:, 0], [0, 0.5, 0.75, 1], rtol=0, atol=1e-15)


def test_dae_x_is_sharp_on_a_wide_column_and_flat_on_a_narrow_one() -> None:
    wide, narrow = (TrainingStatistics.from_arrays(np.linspace(0, end, 4097)[:, None]) for end in (1e6, 1e-6))
    place = torch.tensor([[0.3]]).double()
    sharp = DaeX(wide, 0, 8, scales=(9,)).weights(place * 1e6)[0]
    assert sharp.argmax().item() == 2  # anchors at 1e5, 2e5, ...
    assert sharp.max().item() > 0.999
    flat = DaeX(narrow, 0, 8, scales=(9,)).weights(place * 1e-6)[0]
    torch.testing.assert_close(flat, torch.full_like(flat, 1 / 9), rtol=0, atol=1e-6)


@pytest.mark.parametrize("part", [Dae, DaeX])
def test_parameter_count_on_the_shape_of_criteo(part: type) -> None:
    encoder = part(TrainingStatistics.from_arrays(np.random.default_rng(0).normal(size=(50, 13))), 26, 16)
    assert sum(p.numel() for name, p in encoder.named_parameters() if name != "missing") == 11_687


@pytest.mark.parametrize("part", [Dae, DaeX])
def test_state_dict_is_the_whole_encoder(part: type) -> None:
    trained = scrambled(part(statistics(), 0, 8))
    other = scrambled(part(TrainingStatistics.from_arrays(table()[:, ::-1] * 2 + 1), 0, 8))
    values = torch.tensor(probes())
    assert not torch.equal(trained(values), other(values))
    other.load_state_dict(trained.state_dict())
    assert torch.equal(trained(values), other(values))


@pytest.mark.parametrize("part", [Dae, DaeX])
def test_half_precision_keeps_the_anchors(part: type) -> None:
    values = torch.tensor([[1.46e7 + 0.25]], dtype=torch.float64)
    known = TrainingStatistics.from_arrays(1.46e7 + np.linspace(0, 1, 4097)[:, None])
    encoder = part(known, 0, 8)
    expected = [distance.clone() for distance in encoder.distances(values)]
    for found, before in zip(encoder.half().float().distances(values), expected, strict=True):
        assert torch.equal(found, before)


@pytest.mark.parametrize("part", [Dae, DaeX])
def test_exports_with_a_free_batch(part: type) -> None:
    encoder = scrambled(part(statistics(), 0, 8, scales=(3, 5)))
    free = {0: torch.export.Dim("rows")}
    example = torch.tensor(probes()[:6]), torch.zeros(6, 0, 8).double()
    program = torch.export.export(encoder, example, dynamic_shapes=(free, free)).module()
    for rows in (0, 1, 11):
        batch, none = torch.tensor(probes()[:rows]), torch.zeros(rows, 0, 8).double()
        torch.testing.assert_close(program(batch, none), encoder(batch), rtol=0, atol=1e-12)


@pytest.mark.parametrize("part", [Dae, DaeX])
@pytest.mark.parametrize("scales", [(), (0,), (8, 1000)])
def test_bad_scales(part: type, scales: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="scales"):
        part(statistics(), 0, 8, scales=scales)
