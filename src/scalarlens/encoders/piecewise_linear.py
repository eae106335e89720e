"""Piecewise-linear embeddings: how far a number has come through each of its field's quantile bins."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalarlens.encoders.base import Source, ValueEncoder, encoders
from scalarlens.encoders.blocks import ExactBuffers, PerFieldLinear, quantile_edges
from scalarlens.encoders.linear import OFFICIAL, Linear
from scalarlens.table.statistics import TrainingStatistics

TABM = "Gorishniy et al., TabM: Advancing Tabular Deep Learning with Parameter-Efficient Ensembling, ICLR 2025"

#: How far outside its range a value is followed, in bin widths: float32 tokens stay finite.
FARTHEST = 2.0**60


class PiecewiseLinearEncoding(ExactBuffers):
    """`phi_k(x) = (x - b_{k-1}) / (b_k - b_{k-1})`, clamped to [0, 1] save at the two open ends.

    The first component has no lower clamp and the last no upper one, unless values are clipped to the
    training range. Components beyond a field's own bins are zero.

    NOTE[DIFF] The official package forms `w x + b` in float32, which loses narrow bins far from zero; it
    refuses a constant column, and has no limit outside the range. Here differences are taken in float64, a
    constant column is one bin that starts at its value, and the open ends saturate far outside.

    *Shape*: values `[B, N]` float64 -> `[B, N, K]` float64.

    >>> encoding = PiecewiseLinearEncoding(TrainingStatistics.from_arrays(np.arange(9.0)[:, None]), bins=4)
    >>> encoding(torch.tensor([[3.0]]).double()).tolist()
    [[[1.0, 0.5, 0.0, 0.0]]]
    """

    edges: Tensor

    def __init__(self, statistics: TrainingStatistics, *, bins: int, clip_to_range: bool = False) -> None:
        super().__init__()
        self.farthest = 0.0 if clip_to_range else FARTHEST
        fields = [_bin_edges(row) for row in quantile_edges(statistics, bins)]
        edges = np.empty((len(fields), max(map(len, fields), default=2)))
        for padded, field_edges in zip(edges, fields, strict=True):
            padded[: len(field_edges)] = field_edges
            padded[len(field_edges) :] = field_edges[-1]
        self.register_buffer("edges", torch.from_numpy(edges))

    @property
    def bins(self) -> int:
        """The number of bins of the field that has most."""
        return self.edges.shape[1] - 1

    def forward(self, values: Tensor) -> Tensor:
        left, right = self.edges[:, :-1], self.edges[:, 1:]
        real = right > left
        inside = (values.double().unsqueeze(-1) - left) / torch.where(real, right - left, 1.0)
        first = torch.arange(self.bins, device=values.device) == 0
        last = real & (right == self.edges[:, -1:])
        return torch.minimum(
            torch.maximum(inside, torch.where(first, -self.farthest, 0.0)), real + self.farthest * last
        )


def _bin_edges(quantiles: np.ndarray) -> np.ndarray:
    """The distinct quantiles; a constant column gets one bin that starts at its value."""
    edges = np.unique(quantiles)
    low = edges[0]
    return edges if len(edges) > 1 else np.array([low, max(low + 1.0, np.nextafter(low, np.inf))])


@encoders.register("ple-a")
class PleA(ValueEncoder):
    """An affine map of the piecewise-linear encoding: `e_i = phi(x_i) W_i + b_i`.

    NOTE[DIFF] The paper gives neither the bins nor their number: those of the official quantile mode, read
    off a grid of 4096 quantile levels.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> ple = PleA(TrainingStatistics.from_arrays(np.arange(9.0)[:, None]), 0, 4)
    >>> bool((ple(torch.zeros(1, 1).double())[0] == ple.linear.bias).all())
    True
    """

    source = Source(
        citation=OFFICIAL,
        basis="official package rtdl_num_embeddings, version A; quantile bins are inferred",
        hazards="The outer bins have no clamp: beyond the training range the token goes on in a straight line, steeply "
        "where the outer bin is narrow. `clip_to_range` stops it.",
        fidelity=0.85,
        legitimacy=0.98,
        statistics=("quantiles",),
    )

    def __init__(
        self,
        statistics: TrainingStatistics,
        n_categories: int,
        embedding_dim: int,
        *,
        bins: int = 48,
        clip_to_range: bool = False,
    ) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        self.encoding = PiecewiseLinearEncoding(statistics, bins=bins, clip_to_range=clip_to_range)
        self.linear = PerFieldLinear(self.n_values, self.encoding.bins, embedding_dim)

    def embed(self, values: Tensor) -> Tensor:
        tokens: Tensor = self.linear(self.encoding(values).to(self.linear.weight.dtype))
        return tokens


@encoders.register("ple-relu-bounded")
class PleReluBounded(PleA):
    """The rectified form of the 2022 paper, bounded inside the range: `e_i = ReLU(phi(x_i) W_i + b_i)`.

    NOTE[DIFF] Not one of the 19 representations: what "PLE-ReLU" would be on version A, beside `ple-relu`.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> ple = PleReluBounded(TrainingStatistics.from_arrays(np.arange(9.0)[:, None]), 0, 4)
    >>> bool((ple(torch.tensor([[0.0], [3.3], [8.0]]).double()) >= 0).all())
    True
    """

    source = Source(
        citation=OFFICIAL,
        basis="official package rtdl_num_embeddings, version A with activation; unranked",
        hazards="Beyond the range it goes on as `ple-a` does; tokens that are never negative add up with one sign in"
        " pair sums.",
        fidelity=0.1,
        legitimacy=0.98,
        statistics=("quantiles",),
    )

    def embed(self, values: Tensor) -> Tensor:
        return F.relu(super().embed(values))


@encoders.register("ple-b")
class PleB(Linear):
    """A linear embedding and a piecewise-linear one from zero: `e_i = x_i w_i + b_i + phi(x_i) W_i`.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> ple = PleB(TrainingStatistics.from_arrays(np.arange(9.0)[:, None]), 0, 4)
    >>> bool((ple(torch.zeros(1, 1).double())[0] == ple.bias).all())
    True
    """

    source = Source(
        citation=TABM,
        basis="official package rtdl_num_embeddings, version B",
        hazards="The linear term is in the units of the input: on raw wide columns nothing trains. Beyond the range it "
        "goes on as `ple-a` does.",
        fidelity=0.95,
        legitimacy=0.98,
        statistics=("quantiles",),
    )

    def __init__(
        self,
        statistics: TrainingStatistics,
        n_categories: int,
        embedding_dim: int,
        *,
        bins: int = 48,
        clip_to_range: bool = False,
    ) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        self.encoding = PiecewiseLinearEncoding(statistics, bins=bins, clip_to_range=clip_to_range)
        self.piecewise = nn.Parameter(torch.zeros(self.n_values, self.encoding.bins, embedding_dim))

    def bend(self, values: Tensor) -> Tensor:
        """`phi(x_i) W_i`, what the piecewise part adds to the linear one, `[B, N, d]`."""
        phi = self.encoding(values).to(self.piecewise.dtype)
        return torch.bmm(phi.transpose(0, 1), self.piecewise).transpose(0, 1)

    def embed(self, values: Tensor) -> Tensor:
        return super().embed(values) + self.bend(values)


@encoders.register("ple-relu")
class PleRelu(PleB):
    """Version B with its activation: `e_i = x_i w_i + b_i + ReLU(phi(x_i) W_i)`, where `W` stays at zero.

    NOTE[DIFF] The paper does not say which PLE-ReLU it ran; its numbers are those of this one, down to the
    collapse on raw scales. ReLU has no slope at 0, so `W` never gets a gradient and the encoder stays a
    linear embedding.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> ple = PleRelu(TrainingStatistics.from_arrays(np.arange(9.0)[:, None]), 0, 4)
    >>> ple(torch.tensor([[3.0]]).double()).sum().backward()
    >>> bool((ple.piecewise.grad == 0).all())
    True
    """

    idle_parameters = ("piecewise",)
    source = Source(
        citation=OFFICIAL,
        basis="official package rtdl_num_embeddings, version B with activation, as the printed numbers imply",
        hazards="As `linear`, which it is.",
        fidelity=0.9,
        legitimacy=0.6,
        statistics=("quantiles",),
    )

    def bend(self, values: Tensor) -> Tensor:
        return F.relu(super().bend(values))
