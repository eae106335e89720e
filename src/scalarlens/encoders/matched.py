"""Matched alternatives to ScalarLens: the same coordinate and norm, a simpler explanation for the rest."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalarlens.encoders.base import encoders
from scalarlens.encoders.blocks import MeshEncoder, PerFieldLinear
from scalarlens.encoders.scalarlens import Readout, ScalarLens
from scalarlens.registry import options_of


class MatchedAlternative(MeshEncoder):
    """ScalarLens's coordinate and norm, and a readout without drives and states: `e_i = Readout_i(ē_i)`.

    A subclass says what the readout is. At one seed the mesh starts as it does in ScalarLens.

    *Shape*: values `[B, N]` float64 (NaN = missing), category_tokens `[B, C, d]` -> value_tokens `[B, N, d]`.
    """

    def build_on_mesh(self) -> None:
        self.readout = self.build_readout()

    def build_readout(self) -> nn.Module:
        """The module that `read` hands the normalised coordinate to."""
        raise NotImplementedError

    def read(self, normalized: Tensor, category_tokens: Tensor) -> Tensor:
        """The tokens from normalised coordinates, `[B, N, d]`."""
        tokens: Tensor = self.readout(normalized)
        return tokens

    def forward(self, values: Tensor, category_tokens: Tensor) -> Tensor:
        return self.read(ScalarLens.normalize(self.coordinate(values)), category_tokens)


@encoders.register("deer-norm")
class DeerNorm(MatchedAlternative):
    """The normalised coordinate times a positive gain, `e_i = γ_i ē_i`: stabilisation and nothing else.

    NOTE[DIFF] The paper does not say whether its DEER+Norm has a gain. With that of ScalarLens a token can
    leave the size that the norm gives it.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> from scalarlens.table import TrainingStatistics
    >>> encoder = DeerNorm(TrainingStatistics.from_arrays(np.array([[1.0], [40.0]])), 3, 16)
    >>> values = torch.tensor([[7.0]]).double()
    >>> encoder(values, torch.zeros(1, 3, 16)).equal(ScalarLens.normalize(encoder.coordinate(values)))
    True
    """

    context = "none"
    source = replace(
        ScalarLens.source, basis="the paper's ablation study; the gain is ours", fidelity=0.6, legitimacy=0.9
    )

    def build_readout(self) -> nn.Module:
        return Gain(self.n_values)


@encoders.register("local-mlp")
class LocalMlp(MatchedAlternative):
    """As many parameters as ScalarLens, all of them local: `e_i = γ_i MLP_i(ē_i)` with one SiLU layer.

    NOTE[DIFF] The paper matches capacity without a rule. The hidden width is the one at which the parameters
    beyond the mesh come nearest in number to those of ScalarLens, by default and at the same shape.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> from scalarlens.table import TrainingStatistics
    >>> encoder = LocalMlp(TrainingStatistics.from_arrays(np.zeros((1, 13))), 26, 16)
    >>> encoder.readout.hidden.bias.shape
    torch.Size([13, 111])
    """

    context = "none"
    source = replace(
        ScalarLens.source,
        basis="the paper's ablation study; the matching rule is ours",
        fidelity=0.7,
        legitimacy=0.9,
    )

    def build_readout(self) -> nn.Module:
        n, d = self.n_values, self.embedding_dim
        budget = response_budget(n, self.n_categories, d)
        # A hidden unit has its inputs, its bias and its outputs; output biases and the gain are fixed.
        return Readout(n, d, matched_width(budget, n, fixed=d + 1, per_unit=2 * d + 1), d)


@encoders.register("context-film")
class ContextFilm(MatchedAlternative):
    """One affine update per numerical field from the categories: `e_i = γ_i ((1 + Γ_i) ⊙ ē_i + B_i)`.

    NOTE[DIFF] The paper names no rule by which categorical fields are selected, and none for the capacity.
    All of them are read, and the hidden width is found as for `local-mlp`.

    *Shape*: values `[B, N]` float64 (NaN = missing), category_tokens `[B, C, d]` -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> from scalarlens.table import TrainingStatistics
    >>> encoder = ContextFilm(TrainingStatistics.from_arrays(np.zeros((1, 13))), 26, 16)
    >>> encoder.readout.hidden.bias.shape
    torch.Size([13, 64])
    """

    context = "categorical"
    source = replace(
        ScalarLens.source,
        basis="the paper's ablation study, after FiLM; fields, widths and matching rule are ours",
        fidelity=0.5,
        legitimacy=0.9,
    )

    def build_readout(self) -> nn.Module:
        n, c, d = self.n_values, self.n_categories, self.embedding_dim
        budget = response_budget(n, c, d) - (c * d + 1) * CONTEXT_DIM
        width = matched_width(budget, n, fixed=2 * d + 1, per_unit=CONTEXT_DIM + 1 + 2 * d)
        return ContextModulation(n, c, d, width)

    def read(self, normalized: Tensor, category_tokens: Tensor) -> Tensor:
        context = ScalarLens.normalize(category_tokens.to(normalized.dtype))
        tokens: Tensor = self.readout(normalized, context)
        return tokens


class Gain(nn.Module):
    """A positive learned gain per field as in ScalarLens, from 1. *Shape*: `[B, N, d]` -> `[B, N, d]`."""

    def __init__(self, n_values: int) -> None:
        super().__init__()
        self.gain_logits = nn.Parameter(torch.zeros(n_values))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.gain_logits.exp().unsqueeze(-1)


#: as wide as the bottleneck through which ScalarLens sends its messages
CONTEXT_DIM = 16


class ContextModulation(nn.Module):
    """Scale and shift of every numerical token from one summary of the categories, then a gain.

    `c = SiLU(W vec(ē^cat) + b)`, `[Γ_i; B_i] = P_i SiLU(A_i c + a_i) + p_i`. `P` and `p` start at zero, so
    that the context says nothing at first.

    *Shape*: normalised tokens `[B, N, d]` and categories `[B, C, d]` -> `[B, N, d]`.
    """

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, hidden_dim: int) -> None:
        super().__init__()
        n_inputs = n_categories * embedding_dim
        bound = max(n_inputs, 1) ** -0.5
        self.context_weight = nn.Parameter(torch.empty(n_inputs, CONTEXT_DIM).uniform_(-bound, bound))
        self.context_bias = nn.Parameter(torch.empty(CONTEXT_DIM).uniform_(-bound, bound))
        self.hidden = PerFieldLinear(n_values, CONTEXT_DIM, hidden_dim)
        self.modulation = PerFieldLinear(n_values, hidden_dim, 2 * embedding_dim)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        self.gain = Gain(n_values)

    def forward(self, normalized: Tensor, category_tokens: Tensor) -> Tensor:
        context = F.silu(category_tokens.flatten(1) @ self.context_weight + self.context_bias)
        hidden = F.silu(self.hidden(context.unsqueeze(1).expand(-1, normalized.shape[1], -1)))
        scale, shift = self.modulation(hidden).chunk(2, dim=-1)
        tokens: Tensor = self.gain((1 + scale) * normalized + shift)
        return tokens


def scalarlens_budget(n_values: int, n_categories: int, embedding_dim: int) -> int:
    """How many parameters ScalarLens has by default at this shape, those of missing values left out.

    >>> scalarlens_budget(13, 26, 16)
    51600
    """
    intervals = options_of(ScalarLens)["intervals"]
    mesh = intervals + (intervals + 1) * embedding_dim
    return n_values * mesh + response_budget(n_values, n_categories, embedding_dim)


def response_budget(n_values: int, n_categories: int, embedding_dim: int) -> int:
    """The part of that budget beyond the mesh: what an alternative on the same mesh has to meet.

    >>> response_budget(13, 26, 16)
    47856
    """
    default = options_of(ScalarLens)
    m, rank, steps, hidden_dim = (default[name] for name in ("state_dim", "rank", "steps", "hidden_dim"))
    drive_and_gate = 2 * (embedding_dim + 1) * m
    messages = 2 * m * rank
    features = embedding_dim + m + steps * m
    readout = (features + 1) * hidden_dim + (hidden_dim + 1) * embedding_dim + 1
    return (n_values + n_categories) * (drive_and_gate + messages) + steps + n_values * readout


def matched_width(budget: int, n_values: int, fixed: int, per_unit: int) -> int:
    """The hidden width `h` at which `n_values * (fixed + h * per_unit)` parameters come nearest to a budget.

    >>> matched_width(budget=105, n_values=2, fixed=10, per_unit=4)
    11
    """
    return max(round((budget / max(n_values, 1) - fixed) / per_unit), 1)
