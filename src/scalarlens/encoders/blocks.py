"""Pieces that several encoders share."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappush, heapreplace
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalarlens.encoders.base import NumericalEncoder, lookup_table
from scalarlens.errors import UsageError, unknown_name
from scalarlens.table.statistics import QUANTILE_LEVELS, TrainingStatistics

MeshStart = Literal["quantile", "uniform", "blend"]


class ExactBuffers(nn.Module):
    """A module whose float64 buffers keep their precision under `.float()`, `.half()` and `.to(dtype)`."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = {name: b for name, b in self._buffers.items() if b is not None and b.dtype == torch.float64}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            assert moved is not None
            self._buffers[name] = moved if moved.dtype == torch.float64 else buffer.to(moved.device)
        return self


class UnitRange(ExactBuffers):
    """Where a value lies in its field's training range: 0 at the lowest value, 1 at the highest, clipped.

    `u = clip((x - l) / (u - l), 0, 1)`, and 0 or 1 on either side of a constant column.

    *Shape*: values `[B, N]` float64 -> `[B, N]` float64.

    >>> import numpy as np
    >>> unit_range = UnitRange(TrainingStatistics.from_arrays(np.array([[2.0], [6.0]])))
    >>> unit_range(torch.tensor([[3.0], [99.0]], dtype=torch.float64)).flatten().tolist()
    [0.25, 1.0]
    """

    low: Tensor
    high: Tensor

    def __init__(self, statistics: TrainingStatistics) -> None:
        super().__init__()
        self.register_buffer("low", torch.from_numpy(statistics.low.copy()))
        self.register_buffer("high", torch.from_numpy(statistics.high.copy()))

    def span(self) -> Tensor:
        """Half of the range (a full one can overflow), or one half where the column is constant."""
        return torch.where(self.high > self.low, self.high * 0.5 - self.low * 0.5, 0.5)

    def forward(self, values: Tensor) -> Tensor:
        return ((values.double() * 0.5 - self.low * 0.5) / self.span()).clamp(0.0, 1.0)


class LearnedMesh(UnitRange):
    """A learned monotone mesh over each field's raw range, with linear interpolation between its nodes.

    Equations `eq:monotone_mesh` and `eq:local_interpolation`, on the value mapped to [0, 1]; a missing value is a
    node of its own beside the mesh.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> tokens `[B, N, d]`.

    >>> import numpy as np
    >>> mesh = LearnedMesh(TrainingStatistics.from_arrays(np.arange(9.0)[:, None]), 16, intervals=4)
    >>> mesh.boundaries().tolist()
    [[0.0, 2.0, 4.0, 6.0, 8.0]]
    """

    def __init__(
        self,
        statistics: TrainingStatistics,
        embedding_dim: int,
        *,
        intervals: int = 16,
        mesh_start: MeshStart = "quantile",
        width_floor: float = 1e-7,
        temperature: float = 1.0,
    ) -> None:
        if width_floor <= 0 or temperature <= 0:
            raise UsageError(f"a mesh needs width_floor and temperature above 0; got {width_floor=}, {temperature=}")
        super().__init__(statistics)
        self.intervals = intervals
        self.width_floor = width_floor
        self.temperature = temperature
        widths = starting_widths(statistics, intervals, mesh_start)
        share = np.maximum(widths * (1 + intervals * width_floor) - width_floor, width_floor * 1e-3)
        self.width_logits = nn.Parameter(torch.from_numpy(temperature * np.log(share)).float())
        self.missing = nn.Parameter(lookup_table(statistics.n_values, embedding_dim))
        self.nodes = nn.Parameter(self.start_nodes(statistics.n_values, embedding_dim))

    def start_nodes(self, n_values: int, embedding_dim: int) -> Tensor:
        """What the nodes start from, `[N, K+1, d]`."""
        return lookup_table(n_values, self.intervals + 1, embedding_dim)

    def unit_boundaries(self) -> Tensor:
        """`b` on [0, 1], `[N, K+1]` float64: cumulative sums of the floored softmax widths."""
        p = torch.softmax(self.width_logits.double() / self.temperature, dim=-1)
        q = (p + self.width_floor) / (1 + self.intervals * self.width_floor)
        inner = q.cumsum(-1)[:, :-1]
        return torch.cat([torch.zeros_like(q[:, :1]), inner, torch.ones_like(q[:, :1])], dim=-1)

    @torch.no_grad()
    def boundaries(self) -> Tensor:
        """The mesh in the units that the values are served in, `[N, K+1]` float64."""
        unit = self.unit_boundaries()
        raw = (self.low[:, None] * 0.5 + self.span()[:, None] * unit) * 2.0
        raw[:, 0] = self.low
        raw[:, -1] = torch.where(self.high > self.low, self.high, raw[:, -1])
        return raw

    def locate(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Interval index `k` and interpolation coefficient `a` of each value, `[B, N]` each."""
        u = super().forward(values)
        b = self.unit_boundaries()
        k = (u.detach().unsqueeze(-1) >= b.detach()[:, 1:-1]).sum(-1)
        rows = k + self._offsets(self.intervals + 1, k)
        left = F.embedding(rows, b.reshape(-1, 1)).squeeze(-1)
        right = F.embedding(rows + 1, b.reshape(-1, 1)).squeeze(-1)
        return k, (u - left) / (right - left)

    def forward(self, values: Tensor) -> Tensor:
        absent = values.isnan()
        k, a = self.locate(torch.where(absent, self.low, values))
        rows = k + self._offsets(self.intervals + 1, k)
        nodes = self.nodes.flatten(0, 1)
        a = a.to(nodes.dtype).unsqueeze(-1)
        tokens = (1 - a) * F.embedding(rows, nodes) + a * F.embedding(rows + 1, nodes)
        return torch.where(absent.unsqueeze(-1), self.missing, tokens)

    def _offsets(self, stride: int, like: Tensor) -> Tensor:
        return torch.arange(self.low.shape[0], device=like.device) * stride


class MeshEncoder(NumericalEncoder):
    """An encoder whose coordinate is a place on a learned mesh; a subclass says in `build_on_mesh` what stands on it.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> coordinate `[B, N, d]`.
    """

    promises_coordinate = True
    mesh_type: ClassVar[type[LearnedMesh]] = LearnedMesh

    def __init__(
        self,
        statistics: TrainingStatistics,
        n_categories: int,
        embedding_dim: int,
        *,
        intervals: int = 16,
        mesh_start: MeshStart = "quantile",
        width_floor: float = 1e-7,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        self.mesh = self.mesh_type(
            statistics,
            embedding_dim,
            intervals=intervals,
            mesh_start=mesh_start,
            width_floor=width_floor,
            temperature=temperature,
        )
        self.build_on_mesh()

    def build_on_mesh(self) -> None:
        """Make the modules that stand on the mesh."""

    def coordinate(self, values: Tensor) -> Tensor:
        """`e^loc`, `[B, N, d]`: interpolation on the learned mesh (`eq:local_interpolation`)."""
        tokens: Tensor = self.mesh(values)
        return tokens


#: NOTE[DIFF] The paper gives neither the start of the mesh, nor its temperature, nor its floor. A uniform start on a
#: heavy-tailed column leaves nearly all rows in one interval for good, so the start follows the training quantiles.
def starting_widths(statistics: TrainingStatistics, intervals: int, start: MeshStart) -> np.ndarray:
    """Normalised interval widths `[N, K]` that a mesh starts from; each positive, each row summing to 1."""
    if start not in get_args(MeshStart):
        raise unknown_name("mesh_start", start, get_args(MeshStart))
    if start == "uniform":
        return np.full((statistics.n_values, intervals), 1.0 / intervals)
    place = distinct_quantiles if start == "quantile" else _blended_boundaries
    rows = [np.diff(place(grid, intervals)) for grid in statistics.unit_quantiles()]
    return np.array(rows, dtype=np.float64).reshape(-1, intervals)


def distinct_quantiles(grid: np.ndarray, intervals: int) -> np.ndarray:
    """`intervals + 1` distinct boundaries from 0 to 1 at quantiles of a field on [0, 1].

    The number of quantile levels is raised until enough distinct values exist; those are thinned evenly in rank.
    """
    values = np.unique(grid)
    levels = intervals
    while levels < QUANTILE_LEVELS:
        step = np.unique(grid[np.linspace(0, QUANTILE_LEVELS, levels + 1).round().astype(int)])
        if len(step) > intervals:
            values = step
            break
        levels *= 2
    if len(values) > intervals:
        values = values[np.linspace(0, len(values) - 1, intervals + 1).round().astype(int)]
    return _fill_up(values, intervals)


def _blended_boundaries(grid: np.ndarray, intervals: int) -> np.ndarray:
    """Boundaries at the quantiles of the even mixture of the field's distribution and the uniform one."""
    mixture = 0.5 * np.linspace(0.0, 1.0, QUANTILE_LEVELS + 1) + 0.5 * grid
    return _fill_up(np.unique(np.interp(np.linspace(0, 1, intervals + 1), mixture, grid)), intervals)


def _fill_up(boundaries: np.ndarray, intervals: int) -> np.ndarray:
    """Add 0 and 1 where absent, then halve the widest gaps until there are enough boundaries."""
    edges = np.union1d(boundaries, [0.0, 1.0]).tolist()
    gaps = [(left - right, left, right) for left, right in pairwise(edges)]
    heapify(gaps)
    while len(gaps) < intervals:
        _, left, right = gaps[0]
        middle = (left + right) / 2
        heapreplace(gaps, (left - middle, left, middle))
        heappush(gaps, (middle - right, middle, right))
    return np.array(sorted([left for _, left, _ in gaps] + [1.0]))


def per_field(tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`y_f = x_f W_f + b_f` for all fields in one product: `[B, F, a]`, `[F, a, b]`, `[F, b]` -> `[B, F, b]`."""
    return torch.baddbmm(bias.unsqueeze(1), tokens.transpose(0, 1), weight).transpose(0, 1)


class PerFieldLinear(nn.Module):
    """One affine map per field, all in one batched product: `y_f = x_f W_f + b_f`.

    *Shape*: `[B, F, a]` -> `[B, F, b]`.

    >>> PerFieldLinear(3, 16, 8)(torch.zeros(5, 3, 16)).shape
    torch.Size([5, 3, 8])
    """

    def __init__(self, n_fields: int, n_inputs: int, n_outputs: int) -> None:
        super().__init__()
        bound = n_inputs**-0.5
        self.weight = nn.Parameter(torch.empty(n_fields, n_inputs, n_outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(n_fields, n_outputs).uniform_(-bound, bound))

    def forward(self, tokens: Tensor) -> Tensor:
        return per_field(tokens, self.weight, self.bias)


def quantile_edges(statistics: TrainingStatistics, bins: int) -> np.ndarray:
    """The training quantiles at 0, 1/bins, ..., 1 of every field, `[N, bins + 1]`, equal ones included.

    >>> quantile_edges(TrainingStatistics.from_arrays(np.array([[0.0], [4.0]])), 4).tolist()
    [[0.0, 1.0, 2.0, 3.0, 4.0]]
    """
    if bins < 1:
        raise UsageError(f"the number of bins must be at least 1; got {bins}")
    levels, grid_levels = np.arange(bins + 1) / bins, np.arange(QUANTILE_LEVELS + 1) / QUANTILE_LEVELS
    edges = [np.interp(levels, grid_levels, grid) for grid in statistics.quantiles]
    return np.array(edges).reshape(statistics.n_values, bins + 1)
