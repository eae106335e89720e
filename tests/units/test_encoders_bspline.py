"""B-spline embeddings: the basis, the two placements of a value, and the rows of negatives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scalarlens.encoders import build
from scalarlens.encoders.base import ValueEncoder
from scalarlens.encoders.bspline import NEGATIVE_ROWS, BSpline, BSplineArcsinh, mix_rows, spline_basis
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics

RNG = np.random.default_rng(0)
#: as many columns as Criteo has numbers
THIRTEEN = np.random.default_rng(1).normal(size=(500, 13))
TABLE = np.stack(
    [
        RNG.normal(0, 3, 1000),
        RNG.lognormal(0, 2, 1000),
        np.full(1000, 3.0),
        np.full(1000, np.nan),
        1.46e7 + RNG.random(1000),
        RNG.integers(-3, 40, 1000).astype(float),
    ],
    axis=1,
)
PRESENT = np.nan_to_num(TABLE)
STATISTICS = TrainingStatistics.from_arrays(TABLE)
UNITS = torch.tensor(np.concatenate([[0.0, 1.0], np.arange(20) / 19, RNG.random(400)]))[:, None]
Basis = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


def encoder_of(part: type[ValueEncoder], table: np.ndarray = TABLE, **options: int) -> ValueEncoder:
    torch.manual_seed(0)
    return part(TrainingStatistics.from_arrays(table), 0, 16, **options)


def cox_de_boor(u: np.ndarray, knots: int, degree: int) -> np.ndarray:
    """All basis functions on clamped uniform knots, from the recursive definition, `[..., J]`."""
    t = np.pad(np.linspace(0.0, 1.0, knots), degree, mode="edge")
    last = len(t) - degree - 2
    inside = [(u >= t[j]) & ((u < t[j + 1]) | ((j == last) & (u == 1.0))) for j in range(len(t) - 1)]
    basis = np.stack(inside, -1).astype(float)
    for k in range(1, degree + 1):
        columns = []
        for j in range(basis.shape[-1] - 1):
            rise, fall = t[j + k] - t[j], t[j + k + 1] - t[j + 1]
            left = (u - t[j]) / rise * basis[..., j] if rise > 0 else 0.0
            right = (t[j + k + 1] - u) / fall * basis[..., j + 1] if fall > 0 else 0.0
            columns.append(left + right + np.zeros_like(u))
        basis = np.stack(columns, -1)
    return basis


def dense(basis: Basis, u: Tensor, cells: int, degree: int) -> np.ndarray:
    """The active functions at their places among all of them, `[B, N, J]`."""
    first, active = basis(u, cells, degree)
    width = cells + degree
    rows = torch.zeros(*u.shape, width, dtype=torch.float64)
    return rows.scatter(-1, first.unsqueeze(-1) + torch.arange(degree + 1), active).numpy()


def check_basis(basis: Basis, knots: int, degree: int) -> None:
    actual = dense(basis, UNITS, knots - 1, degree)
    np.testing.assert_allclose(actual, cox_de_boor(UNITS.numpy(), knots, degree), rtol=0, atol=1e-12)


def unclamped(position: Tensor, cells: int, degree: int) -> tuple[Tensor, Tensor]:
    """The cubic on uniform knots that run on beyond the ends."""
    t = position * cells
    cell = t.floor().clamp(max=cells - 1)
    s = t - cell
    pieces = [(1 - s) ** 3, 3 * s**3 - 6 * s**2 + 4, -3 * s**3 + 3 * s**2 + 3 * s + 1, s**3]
    return cell.long(), torch.stack(pieces, -1) / 6


@pytest.mark.parametrize(("knots", "degree"), [(20, 3), (20, 0), (20, 1), (20, 2), (5, 4), (2, 3)])
def test_basis_is_that_of_the_recursive_definition(knots: int, degree: int) -> None:
    check_basis(spline_basis, knots, degree)


def test_basis_check_rejects_knots_that_are_not_clamped() -> None:
    with pytest.raises(AssertionError):
        check_basis(unclamped, 20, 3)


@given(place=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_basis_is_a_partition_of_unity_with_four_active_functions(place: float) -> None:
    first, active = spline_basis(torch.tensor([[place]], dtype=torch.float64), 19, 3)
    assert active.shape == (1, 1, 4)
    assert (active >= 0).all()
    assert abs(active.sum().item() - 1) < 1e-6
    assert 0 <= first.item() <= 18


@pytest.mark.parametrize(("place", "function"), [(0.0, 0), (1.0, 21)])
def test_one_function_has_each_end_for_itself(place: float, function: int) -> None:
    rows = dense(spline_basis, torch.tensor([[place]], dtype=torch.float64), 19, 3)
    np.testing.assert_array_equal(rows[0, 0], np.arange(22) == function)


def test_greville_coefficients_give_the_identity() -> None:
    knots = np.pad(np.linspace(0.0, 1.0, 20), 3, mode="edge")
    greville = np.array([knots[j + 1 : j + 4].mean() for j in range(22)])
    first, active = spline_basis(UNITS, 19, 3)
    spline = mix_rows(torch.from_numpy(greville).view(1, 22, 1), first, active)
    torch.testing.assert_close(spline.squeeze(-1), UNITS, rtol=0, atol=1e-12)


def check_formula(encoder: BSpline) -> None:
    values = np.vstack([PRESENT, STATISTICS.low - 9, STATISTICS.high + 9, np.full(6, 1e12), np.full(6, -1e12)])
    span = np.where(STATISTICS.high > STATISTICS.low, STATISTICS.high - STATISTICS.low, 1.0)
    u = np.clip((values - STATISTICS.low) / span, 0.0, 1.0)
    expected = np.einsum("bnj,njd->bnd", cox_de_boor(u, 20, 3), encoder.coefficients.detach().numpy())
    tokens = encoder.double()(torch.tensor(values)).detach().numpy()
    np.testing.assert_allclose(tokens, expected, rtol=0, atol=1e-9)


class NotClipped(BSpline):
    def embed(self, values: Tensor) -> Tensor:
        low, span = self.unit_range.low, 2 * self.unit_range.span()
        first, basis = spline_basis(((values - low) / span).clamp(min=0).remainder(1.0), self.cells, self.degree)
        return mix_rows(self.coefficients, first, basis)


def test_formula() -> None:
    check_formula(encoder_of(BSpline))
    with pytest.raises(AssertionError):
        check_formula(encoder_of(NotClipped))


def check_affine_invariance(part: type[ValueEncoder]) -> None:
    table = TABLE[:, [0, 1, 2, 3, 5]]
    encoder, mapped = encoder_of(part, table), encoder_of(part, 3.7 * table - 12)
    torch.testing.assert_close(mapped(torch.tensor(3.7 * table - 12)), encoder(torch.tensor(table)), rtol=0, atol=1e-5)


def test_tokens_survive_other_units_unless_bent() -> None:
    check_affine_invariance(BSpline)
    with pytest.raises(AssertionError):
        check_affine_invariance(BSplineArcsinh)


def test_parameter_count() -> None:
    encoder = build("bspline", TrainingStatistics.from_arrays(THIRTEEN), 26)
    assert sum(p.numel() for n, p in encoder.named_parameters() if n != "missing") == 4576


def check_arcsinh_position(part: type[BSplineArcsinh]) -> None:
    encoder = encoder_of(part)
    grid = STATISTICS.quantiles
    tops = np.array([np.quantile(row[row >= 0], 0.99) for row in grid])
    scale = np.where(tops > 0, np.arcsinh(tops), 1.0)
    expected = np.square(np.arcsinh(np.clip(PRESENT, 0.0, tops)) / scale)
    actual = encoder.position(torch.tensor(PRESENT)).numpy()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)
    assert actual.max() == 1.0


class NotSquared(BSplineArcsinh):
    def position(self, values: Tensor) -> Tensor:
        return super().position(values).sqrt()


def test_arcsinh_position() -> None:
    check_arcsinh_position(BSplineArcsinh)
    with pytest.raises(AssertionError):
        check_arcsinh_position(NotSquared)


def test_arcsinh_top_is_near_the_quantile_of_what_is_not_negative() -> None:
    encoder = encoder_of(BSplineArcsinh)
    for field in (0, 1, 4, 5):
        column = TABLE[:, field]
        low, high = np.quantile(column[column >= 0], [0.985, 0.995])
        assert low <= encoder.top[field].item() <= high


def test_arcsinh_tokens_of_positive_values_are_the_spline() -> None:
    encoder = encoder_of(BSplineArcsinh).double()
    rows = PRESENT[(PRESENT >= 0).all(1)]
    u = encoder.position(torch.tensor(rows)).numpy()
    spline = encoder.coefficients.detach().numpy()[:, NEGATIVE_ROWS:]
    expected = np.einsum("bnj,njd->bnd", cox_de_boor(u, 20, 3), spline)
    np.testing.assert_allclose(encoder(torch.tensor(rows)).detach().numpy(), expected, rtol=0, atol=1e-12)


def test_negative_values_have_rows_down_to_the_training_minimum() -> None:
    low = np.array([[-3.0, -900.0, 0.0], [5.0, 5.0, 5.0]])
    encoder = encoder_of(BSplineArcsinh, low)
    values = torch.tensor([-0.2, -1.0, -1.5, -2.0, -3.0, -4.0, -15.5, -16.0, -1e12], dtype=torch.float64)
    tokens, rows = encoder(values[:, None].expand(-1, 3)), encoder.coefficients
    places = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2, 2])
    assert torch.equal(tokens[:, 0], rows[0, places])
    places = torch.tensor([0, 0, 1, 1, 2, 3, 15, 15, 15])
    assert torch.equal(tokens[:, 1], rows[1, places])
    assert torch.equal(tokens[:, 2], rows[2, NEGATIVE_ROWS].expand(9, -1))


@pytest.mark.parametrize("part", [BSpline, BSplineArcsinh])
def test_state_dict_is_the_whole_encoder(part: type[ValueEncoder]) -> None:
    trained, other = encoder_of(part), encoder_of(part, -2 * TABLE[:, ::-1])
    other.load_state_dict(trained.state_dict())
    assert torch.equal(other(torch.tensor(PRESENT)), trained(torch.tensor(PRESENT)))


@pytest.mark.parametrize("part", [BSpline, BSplineArcsinh])
def test_statistics_keep_float64(part: type[ValueEncoder]) -> None:
    encoder = encoder_of(part)
    exact = {name: b.clone() for name, b in encoder.named_buffers()}
    assert exact
    for name, buffer in encoder.half().float().named_buffers():
        assert torch.equal(buffer, exact[name])
    assert encoder.double()(torch.tensor(TABLE[:3])).dtype == torch.float64


@pytest.mark.parametrize("part", [BSpline, BSplineArcsinh])
def test_tokens_are_finite_and_exports_with_a_free_batch_size(part: type[ValueEncoder]) -> None:
    encoder = encoder_of(part)
    values = torch.tensor(np.vstack([TABLE[:20], np.full((1, 6), 1e12), np.full((1, 6), -1e12)]))
    context = torch.zeros(22, 2, 16)
    assert encoder(values, context).isfinite().all()
    rows = torch.export.Dim("rows")
    program = torch.export.export(encoder, (values[:5], context[:5]), dynamic_shapes=({0: rows}, {0: rows})).module()
    for n in (0, 1, 22):
        torch.testing.assert_close(program(values[:n], context[:n]), encoder(values[:n]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("part", [BSpline, BSplineArcsinh])
def test_options_without_sense_are_refused(part: type[ValueEncoder]) -> None:
    with pytest.raises(UsageError, match="knots must be at least 2; got 1"):
        encoder_of(part, knots=1)
    with pytest.raises(UsageError, match="degree must be 0 or more; got -1"):
        encoder_of(part, degree=-1)
