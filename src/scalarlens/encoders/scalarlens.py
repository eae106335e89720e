"""ScalarLens: a stable coordinate from the value alone, a bounded response from the value and its context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalarlens.encoders.base import Context, Source, encoders
from scalarlens.encoders.blocks import MeshEncoder, MeshStart, PerFieldLinear, per_field
from scalarlens.table.statistics import TrainingStatistics


@dataclass(frozen=True)
class Trace:
    """Everything that one forward pass of ScalarLens went through, for audits.

    *Shape*: coordinate `[B, N, d]`, drive and gate `[B, F, m]`, states `[T+1, B, F, m]`, tokens `[B, N, d]`.
    """

    coordinate: Tensor
    drive: Tensor
    gate: Tensor
    states: Tensor
    tokens: Tensor


@encoders.register("scalarlens")
class ScalarLens(MeshEncoder):
    """A learned monotone mesh locates the value; a few bounded low-rank steps driven by the row shape its response.

    `e_i = Readout_i([norm(e_i^loc); g_i; s_i^(1); ...; s_i^(T)])` (equations `eq:monotone_mesh` to
    `eq:readout_features`). Fields are ordered numerical first, then categorical; `M = F m` is field-major.

    *Shape*: values `[B, N]` float64 (NaN = missing), category_tokens `[B, C, d]` -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> encoder = ScalarLens(TrainingStatistics.from_arrays(np.array([[1.0, 5.0], [40.0, -2.0]])), 3, 16)
    >>> values, one, other = torch.tensor([[7.0, 0.0]]).double(), torch.zeros(1, 3, 16), torch.ones(1, 3, 16)
    >>> bool((encoder(values, one) == encoder(values, other)).all())  # the response follows the context
    False
    >>> encoder.trace(values, one).coordinate.equal(encoder.trace(values, other).coordinate)  # the coordinate stays
    True
    """

    context: ClassVar[Context] = "all"
    source = Source(
        citation="Yao et al., ScalarLens",
        basis="the paper's equations; what they leave open is listed in docs/deviations.md",
        hazards="As `deer` for the coordinate. Unseen categories reach the response as a neutral token. The response "
        "costs several times what the coordinate does.",
        fidelity=0.8,
        legitimacy=0.99,
        statistics=("range", "quantiles (start of the mesh)"),
    )

    def __init__(
        self,
        statistics: TrainingStatistics,
        n_categories: int,
        embedding_dim: int,
        *,
        intervals: int = 16,
        state_dim: int = 8,
        rank: int = 16,
        steps: int = 3,
        hidden_dim: int = 32,
        mesh_start: MeshStart = "quantile",
        width_floor: float = 1e-7,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(
            statistics,
            n_categories,
            embedding_dim,
            intervals=intervals,
            mesh_start=mesh_start,
            width_floor=width_floor,
            temperature=temperature,
        )
        n_fields = self.n_values + n_categories
        self.state_dim = state_dim
        self.build_heads(n_fields)
        self.messages = LowRankMessages(n_fields * state_dim, rank)
        self.step_logits = nn.Parameter(torch.zeros(steps))
        features = embedding_dim + state_dim + steps * state_dim
        self.readout = Readout(self.n_values, features, hidden_dim, embedding_dim)

    def build_heads(self, n_fields: int) -> None:
        """A head for the drive and one for the gate of each field."""
        self.drive = PerFieldLinear(n_fields, self.embedding_dim, self.state_dim)
        self.gate = PerFieldLinear(n_fields, self.embedding_dim, self.state_dim)

    def forward(self, values: Tensor, category_tokens: Tensor) -> Tensor:
        return self.trace(values, category_tokens).tokens

    def trace(self, values: Tensor, category_tokens: Tensor) -> Trace:
        """One forward pass with all of its intermediate results."""
        coordinate = self.coordinate(values)
        normalized = self.normalize(torch.cat([coordinate, category_tokens.to(coordinate.dtype)], dim=1))
        drive, gate = self.force(normalized)
        states = self.respond(drive, gate)
        tokens = self.read(normalized, gate, states)
        return Trace(coordinate, drive, gate, torch.stack(states), tokens)

    @staticmethod
    def normalize(tokens: Tensor) -> Tensor:
        """Each token over its root mean square, without an affine map (`eq:rms_token`)."""
        return tokens * torch.rsqrt(tokens.square().mean(-1, keepdim=True) + NORM_EPSILON)

    def force(self, normalized: Tensor) -> tuple[Tensor, Tensor]:
        """Drive and gate of every field from its own heads, `[B, F, m]` each; both heads share one product."""
        weight = torch.cat([self.drive.weight, self.gate.weight], dim=-1)
        bias = torch.cat([self.drive.bias, self.gate.bias], dim=-1)
        drive, gate = per_field(normalized, weight, bias).chunk(2, dim=-1)
        return drive.contiguous(), gate.contiguous()

    def respond(self, drive: Tensor, gate: Tensor) -> list[Tensor]:
        """The states `s^(0), ..., s^(T)`, each a convex step towards a bounded proposal (`eq:state_update`)."""
        states = [torch.tanh(drive)]
        for step_size in torch.sigmoid(self.step_logits):
            proposal = torch.tanh(drive + gate * self.message(states[-1]))
            states.append(torch.lerp(states[-1], proposal, step_size))
        return states

    def message(self, state: Tensor) -> Tensor:
        """`u = (s U) V` over all fields at once, `[B, F, m]` (`eq:lowrank_message`)."""
        received: Tensor = self.messages(state)
        return received

    def read(self, normalized: Tensor, gate: Tensor, states: list[Tensor]) -> Tensor:
        """The numerical tokens from coordinate, gate and all transient states (`eq:readout_features`)."""
        n = self.n_values
        features = [normalized[:, :n], gate[:, :n], *(state[:, :n] for state in states[1:])]
        tokens: Tensor = self.readout(torch.cat(features, dim=-1))
        return tokens


#: NOTE[DIFF] The paper names this epsilon without a value; small against the mean square of a fresh lookup table.
NORM_EPSILON = 1e-6


class LowRankMessages(nn.Module):
    """The operator `U V` that all fields share. *Shape*: `[B, F, m]` -> `[B, F, m]`.

    NOTE[DIFF] The paper gives no start for `U` and `V`: normal with variances `1/M` and `1/r`, so that a message
    starts at the size of the state that sent it.
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.compress = nn.Parameter(torch.randn(width, rank) * max(width, 1) ** -0.5)
        self.expand = nn.Parameter(torch.randn(rank, width) * rank**-0.5)

    def forward(self, state: Tensor) -> Tensor:
        return ((state.flatten(1) @ self.compress) @ self.expand).view_as(state)


class Readout(nn.Module):
    """A two-layer SiLU head per field, times a positive gain. *Shape*: `[B, N, z]` -> `[B, N, d]`.

    NOTE[DIFF] The paper asks for a positive learned gain without its form: `exp(gain_logits)`, one per field,
    starting at 1. Its heads have biases; weights and biases start uniform in `±fan_in^-0.5`.
    """

    def __init__(self, n_values: int, features: int, hidden_dim: int, embedding_dim: int) -> None:
        super().__init__()
        self.hidden = PerFieldLinear(n_values, features, hidden_dim)
        self.output = PerFieldLinear(n_values, hidden_dim, embedding_dim)
        self.gain_logits = nn.Parameter(torch.zeros(n_values))

    def forward(self, features: Tensor) -> Tensor:
        tokens: Tensor = self.output(F.silu(self.hidden(features)))
        return tokens * self.gain_logits.exp().unsqueeze(-1)
