"""Periodic embeddings: a number as the cosines and sines of trainable frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalarlens.encoders.base import Source, ValueEncoder, encoders
from scalarlens.encoders.blocks import PerFieldLinear
from scalarlens.encoders.linear import OFFICIAL
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics


@encoders.register("periodic")
class Periodic(ValueEncoder):
    """An affine map of waves: `e_i = [cos(2 pi c_i x_i), sin(2 pi c_i x_i)] W_i + b_i`.

    NOTE[DIFF] The paper does not say what "Periodic" is beside PLR: the official module without its
    activation.

    NOTE[DIFF] The official package takes the phase in float32, where at 1e7 it is noise that differs between
    devices. Here whole turns are removed in float64, so eager, compiled and exported tokens agree.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> periodic = Periodic(TrainingStatistics.from_arrays(np.array([[1.0], [9.0]])), 0, 4, frequencies=3)
    >>> periodic.waves(torch.zeros(1, 1).double()).tolist()
    [[[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]]]
    """

    source = Source(
        citation=OFFICIAL,
        basis="official package rtdl_num_embeddings, without activation",
        hazards="At large values neighbours get unrelated phases: the token is a hash, and a training step moves it"
        " far. It is bounded, so nothing collapses.",
        fidelity=0.75,
        legitimacy=0.9,
    )

    def __init__(
        self,
        statistics: TrainingStatistics,
        n_categories: int,
        embedding_dim: int,
        *,
        frequencies: int = 48,
        frequency_std: float = 0.01,
    ) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        if frequencies < 1:
            raise UsageError(f"frequencies must be at least 1; got {frequencies}")
        if frequency_std <= 0:
            raise UsageError(f"frequency_std must be positive; got {frequency_std}")
        start = torch.empty(self.n_values, frequencies)
        bound = 3 * frequency_std
        self.frequencies = nn.Parameter(nn.init.trunc_normal_(start, 0.0, frequency_std, -bound, bound))
        self.linear = PerFieldLinear(self.n_values, 2 * frequencies, embedding_dim)

    def waves(self, values: Tensor) -> Tensor:
        """Cosines, then sines, of every frequency, `[B, N, 2K]`."""
        turns = self.frequencies.double() * values.double().unsqueeze(-1)
        phase = 2 * math.pi * (turns - turns.round()).to(self.frequencies.dtype)
        return torch.cat([phase.cos(), phase.sin()], dim=-1)

    def embed(self, values: Tensor) -> Tensor:
        tokens: Tensor = self.linear(self.waves(values))
        return tokens


@encoders.register("plr")
class Plr(Periodic):
    """Periodic, linear, ReLU: `e_i = ReLU([cos(2 pi c_i x_i), sin(2 pi c_i x_i)] W_i + b_i)`.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> plr = Plr(TrainingStatistics.from_arrays(np.array([[1.0], [9.0]])), 0, 4)
    >>> bool((plr(torch.tensor([[5.0]]).double()) >= 0).all())
    True
    """

    source = Source(
        citation=OFFICIAL,
        basis="official package rtdl_num_embeddings",
        hazards="As for `periodic`; tokens that are never negative add up with one sign in pair sums.",
        fidelity=0.9,
        legitimacy=0.98,
    )

    def embed(self, values: Tensor) -> Tensor:
        return F.relu(super().embed(values))
