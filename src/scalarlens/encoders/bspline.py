"""B-spline embeddings: a number as a smooth mixture of the few coefficient rows around it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalarlens.encoders.base import Source, ValueEncoder, encoders, lookup_table
from scalarlens.encoders.blocks import ExactBuffers, UnitRange
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics

CITATION = "Shtoff et al., Function Basis Encoding of Numerical Features in Factorization Machines, TMLR 2024"


def spline_basis(position: Tensor, cells: int, degree: int) -> tuple[Tensor, Tensor]:
    """First active function and the values of all active ones, by the de Boor-Cox recurrence.

    The knots are uniform on [0, 1] and clamped: each end knot counts `degree + 1` times.

    *Shape*: position `[B, N]` float64 in [0, 1] -> first `[B, N]` int64, basis `[B, N, degree + 1]` float64.

    >>> first, basis = spline_basis(torch.tensor([[1.0]]).double(), cells=4, degree=2)
    >>> first.item(), basis.flatten().tolist()
    (3, [0.0, 0.0, 1.0])
    """
    t = position * cells
    cell = t.floor().clamp(max=cells - 1)
    # In units of a cell every knot is a whole number, so no distance to a knot is ever negative by rounding.
    left = [t - (cell - j).clamp(min=0) for j in range(degree)]
    right = [(cell + 1 + j).clamp(max=cells) - t for j in range(degree)]
    basis = [torch.ones_like(t)]
    for order in range(degree):
        shares = [b / (right[r] + left[order - r]) for r, b in enumerate(basis)]
        falling = [right[r] * share for r, share in enumerate(shares)]
        rising = [left[order - r] * share for r, share in enumerate(shares)]
        inner = [rise + fall for rise, fall in zip(rising[:-1], falling[1:], strict=True)]
        basis = [falling[0], *inner, rising[-1]]
    return cell.long(), torch.stack(basis, dim=-1)


def mix_rows(table: Tensor, first: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of consecutive rows of each field's table.

    *Shape*: table `[N, J, d]`, first `[B, N]`, weights `[B, N, r]` -> `[B, N, d]`.
    """
    offsets = torch.arange(table.shape[0], device=first.device) * table.shape[1]
    steps = torch.arange(weights.shape[-1], device=first.device)
    rows = F.embedding((first + offsets).unsqueeze(-1) + steps, table.flatten(0, 1))
    return (weights.to(table.dtype).unsqueeze(-1) * rows).sum(-2)


def cells_between(knots: int, degree: int) -> int:
    """The number of cells between so many distinct knots, after a check of both options."""
    if knots < 2:
        raise UsageError(f"knots must be at least 2; got {knots}")
    if degree < 0:
        raise UsageError(f"degree must be 0 or more; got {degree}")
    return knots - 1


@encoders.register("bspline")
class BSpline(ValueEncoder):
    """A spline over the training range `[l, h]`: `e_i = sum_j B_j(clip((x_i - l) / (h - l), 0, 1)) c_{ij}`.

    NOTE[DIFF] The paper names knots without their place, number or degree: uniform on the training range, as
    its unmoved results under standardization imply, with the number and degree of the authors' Criteo code.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> spline = BSpline(TrainingStatistics.from_arrays(np.array([[2.0], [6.0]])), 0, 4)
    >>> bool((spline(torch.tensor([[6.0], [99.0]]).double()) == spline.coefficients[0, -1]).all())
    True
    """

    source = Source(
        citation=CITATION,
        basis="authors' code; uniform knots on the training range are inferred",
        hazards="Knots are uniform on the training range, so on a heavy tail nearly all rows share one cell, where the "
        "token is a cubic of a tiny number. Values beyond the range are clipped.",
        fidelity=0.65,
        legitimacy=0.85,
        statistics=("range",),
    )

    def __init__(
        self,
        statistics: TrainingStatistics,
        n_categories: int,
        embedding_dim: int,
        *,
        knots: int = 20,
        degree: int = 3,
    ) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        self.cells = cells_between(knots, degree)
        self.degree = degree
        self.unit_range = UnitRange(statistics)
        self.coefficients = nn.Parameter(lookup_table(self.n_values, self.cells + degree, embedding_dim))

    def embed(self, values: Tensor) -> Tensor:
        first, basis = spline_basis(self.unit_range(values), self.cells, self.degree)
        return mix_rows(self.coefficients, first, basis)


#: negative whole numbers below this many share the last of their rows
NEGATIVE_ROWS = 16


@encoders.register("bspline-arcsinh")
class BSplineArcsinh(ExactBuffers, ValueEncoder):
    """The authors' Criteo recipe: a spline over `(arcsinh(min(x, q)) / arcsinh(q))^2`, rows for negatives.

    `q` is the 99 % quantile of the values that are not negative.

    NOTE[DIFF] Not one of the 19 representations. The authors give every negative value seen in training a row
    of its own; here the rows are for `floor(x)` from -1 down to the training minimum or a cap, negative
    values beyond share the last row, and a field that was never negative takes them for 0.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> spline = BSplineArcsinh(TrainingStatistics.from_arrays(np.array([[-1.0], [0.0], [6.0]])), 0, 4)
    >>> bool((spline(torch.tensor([[-1.0]]).double()) == spline.coefficients[0, 0]).all())
    True
    """

    source = Source(
        citation=CITATION,
        basis="authors' Criteo code; the rows of negative values come from the range; unranked",
        hazards="Everything above the 99 % quantile is one value. Negative values are rows of a table, so that nearby "
        "ones know nothing of each other.",
        fidelity=0.05,
        legitimacy=0.9,
        statistics=("range", "quantiles"),
    )
    top: Tensor
    negatives: Tensor

    def __init__(
        self,
        statistics: TrainingStatistics,
        n_categories: int,
        embedding_dim: int,
        *,
        knots: int = 20,
        degree: int = 3,
    ) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        self.cells = cells_between(knots, degree)
        self.degree = degree
        self.register_buffer("top", torch.tensor([_top(grid) for grid in statistics.quantiles]).double())
        negatives = np.clip(-np.floor(statistics.low), 0.0, NEGATIVE_ROWS)
        self.register_buffer("negatives", torch.from_numpy(negatives))
        rows = NEGATIVE_ROWS + self.cells + degree
        self.coefficients = nn.Parameter(lookup_table(self.n_values, rows, embedding_dim))

    def position(self, values: Tensor) -> Tensor:
        """`u`, where the spline is evaluated, `[B, N]` float64 in [0, 1]."""
        scale = _arcsinh(self.top)
        clipped = torch.minimum(values.double().clamp(min=0.0), self.top)
        return (_arcsinh(clipped) / torch.where(scale > 0, scale, 1.0)).square().clamp(max=1.0)

    def embed(self, values: Tensor) -> Tensor:
        first, basis = spline_basis(self.position(values), self.cells, self.degree)
        row = torch.minimum(-values.double().floor(), self.negatives) - 1
        negative = row >= 0
        alone = torch.arange(self.degree + 1, device=values.device) == 0
        weights = torch.where(negative.unsqueeze(-1), alone.to(basis.dtype), basis)
        return mix_rows(self.coefficients, torch.where(negative, row.long(), first + NEGATIVE_ROWS), weights)


def _top(grid: np.ndarray) -> np.float64:
    """The 99 % quantile of what is not negative, 0 where there is nothing."""
    kept = grid[grid >= 0]
    return np.quantile(kept, 0.99) if len(kept) else np.float64(0.0)


def _arcsinh(values: Tensor) -> Tensor:
    """For values from 0: spelled out, because exported graphs seldom have it in float64."""
    return (values + (values.square() + 1).sqrt()).log()
