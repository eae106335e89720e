"""Ablations of ScalarLens: each is the method with one of its own methods replaced."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from scalarlens.encoders.base import encoders
from scalarlens.encoders.blocks import MeshStart
from scalarlens.encoders.scalarlens import ScalarLens
from scalarlens.table.statistics import TrainingStatistics

#: NOTE[DIFF] The paper masks context sources without saying where. Here a masked source sends zeros at every
#: step: each field keeps its drive, gate and state, a masked one is not heard through a third one either, and
#: both masks together are Local Only. Zeros replace what is sent: a product with a mask lets NaN through.
SOURCE_MASK = "the paper's ablation study; that senders are masked is ours"


@encoders.register("numerical-context-only")
class NumericalContextOnly(ScalarLens):
    """Categorical fields send nothing: `u = ([s^num; 0] U) V`.

    NOTE[DIFF] The paper's numerical context is other fields, never the focal value. Here a field also hears
    itself through `U V`, as it does in ScalarLens.

    *Shape*: values `[B, N]` float64 (NaN = missing), category_tokens `[B, C, d]` -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> statistics = TrainingStatistics.from_arrays(np.array([[1.0, 5.0], [40.0, -2.0]]))
    >>> encoder = NumericalContextOnly(statistics, 3, 16)
    >>> values, one, other = torch.tensor([[7.0, 0.0]]).double(), torch.zeros(1, 3, 16), torch.ones(1, 3, 16)
    >>> encoder(values, one).equal(encoder(values, other))
    True
    """

    context = "numerical"
    source = replace(ScalarLens.source, basis=SOURCE_MASK, fidelity=0.6, legitimacy=0.9)

    def message(self, state: Tensor) -> Tensor:
        n = self.n_values
        return super().message(torch.cat([state[:, :n], torch.zeros_like(state[:, n:])], dim=1))


@encoders.register("categorical-context-only")
class CategoricalContextOnly(ScalarLens):
    """Numerical fields send nothing: `u = ([0; s^cat] U) V`.

    The focal value still acts through its coordinate and through the drive that each step adds again.

    *Shape*: values `[B, N]` float64 (NaN = missing), category_tokens `[B, C, d]` -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> statistics = TrainingStatistics.from_arrays(np.array([[1.0, 5.0], [40.0, -2.0]]))
    >>> encoder = CategoricalContextOnly(statistics, 3, 16)
    >>> tokens = encoder(torch.tensor([[7.0, 0.0], [7.0, 3.0]]).double(), torch.ones(2, 3, 16))
    >>> tokens[0, 0].equal(tokens[1, 0])  # 7.0 beside 0.0, and beside 3.0
    True
    """

    context = "categorical"
    source = replace(ScalarLens.source, basis=SOURCE_MASK, fidelity=0.6, legitimacy=0.9)

    def message(self, state: Tensor) -> Tensor:
        n = self.n_values
        return super().message(torch.cat([torch.zeros_like(state[:, :n]), state[:, n:]], dim=1))


@encoders.register("local-only")
class LocalOnly(ScalarLens):
    """No field sends anything: `u = 0`, so that `s_i^(t) = tanh(δ_i)` at every step.

    NOTE[DIFF] The paper says that both response paths are removed, not what the readout then gets. Gate and
    states stay, as functions of the focal value alone; messages and step sizes are left without a use.

    *Shape*: values `[B, N]` float64 (NaN = missing), category_tokens `[B, C, d]` -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> encoder = LocalOnly(TrainingStatistics.from_arrays(np.array([[1.0], [40.0]])), 3, 16)
    >>> trace = encoder.trace(torch.tensor([[7.0]]).double(), torch.ones(1, 3, 16))
    >>> bool((trace.states == torch.tanh(trace.drive)).all())
    True
    """

    context = "none"
    idle_parameters = ("messages.compress", "messages.expand", "step_logits")
    source = replace(ScalarLens.source, basis=SOURCE_MASK, fidelity=0.6, legitimacy=0.9)

    def message(self, state: Tensor) -> Tensor:
        return torch.zeros_like(state)


@encoders.register("no-norm")
class NoNorm(ScalarLens):
    """Tokens reach the heads and the readout as they are: `ē_f = e_f`.

    NOTE[DIFF] The paper does not say where the norm is removed: here everywhere, for all fields. Lookup
    tables start small, and so does what drives and gates get from them.

    *Shape*: values `[B, N]` float64 (NaN = missing), category_tokens `[B, C, d]` -> value_tokens `[B, N, d]`.

    >>> NoNorm.normalize(torch.tensor([3.0, 4.0])).tolist()
    [3.0, 4.0]
    """

    source = replace(ScalarLens.source, basis="the paper's ablation study", fidelity=0.9, legitimacy=0.95)

    @staticmethod
    def normalize(tokens: Tensor) -> Tensor:
        return tokens


@encoders.register("frozen-message")
class FrozenMessage(ScalarLens):
    """The message is computed once: every step moves towards `tanh(δ + g ⊙ u^(0))`.

    *Shape*: values `[B, N]` float64 (NaN = missing), category_tokens `[B, C, d]` -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> statistics = TrainingStatistics.from_arrays(np.array([[1.0, 5.0], [40.0, -2.0]]))
    >>> frozen, full = (kind(statistics, 3, 16, steps=1) for kind in (FrozenMessage, ScalarLens))
    >>> full.load_state_dict(frozen.state_dict())
    <All keys matched successfully>
    >>> values, context = torch.tensor([[7.0, 0.0]]).double(), torch.ones(1, 3, 16)
    >>> frozen(values, context).equal(full(values, context))  # a single step has a single message
    True
    """

    source = replace(ScalarLens.source, basis="the paper's ablation study", fidelity=0.9, legitimacy=0.95)

    def respond(self, drive: Tensor, gate: Tensor) -> list[Tensor]:
        states = [torch.tanh(drive)]
        proposal = torch.tanh(drive + gate * self.message(states[0]))
        for step_size in torch.sigmoid(self.step_logits):
            states.append(torch.lerp(states[-1], proposal, step_size))
        return states


@encoders.register("stop-grad")
class StopGrad(ScalarLens):
    """No gradient leaves the heads for the tokens: `(δ_f, g_f) = heads_f(sg(ē_f))` with a constant copy `sg(ē_f)`.

    NOTE[DIFF] The paper stops contextual gradients without saying where. Here tables and meshes learn nothing
    from the response, while heads, messages and readout do; the mesh learns through `ē_i` in the readout.

    *Shape*: values `[B, N]` float64 (NaN = missing), category_tokens `[B, C, d]` -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> encoder = StopGrad(TrainingStatistics.from_arrays(np.array([[1.0], [40.0]])), 3, 16)
    >>> category_tokens = torch.ones(1, 3, 16, requires_grad=True)
    >>> encoder(torch.tensor([[7.0]]).double(), category_tokens).sum().backward()
    >>> int(category_tokens.grad.count_nonzero())
    0
    """

    source = replace(
        ScalarLens.source,
        basis="the paper's ablation study; where the gradient stops is ours",
        fidelity=0.6,
        legitimacy=0.85,
    )

    def force(self, normalized: Tensor) -> tuple[Tensor, Tensor]:
        return super().force(normalized.detach())


@encoders.register("one-step")
class OneStep(ScalarLens):
    """A single update: `T = 1`, so that the readout has `[ē_i; g_i; s_i^(1)]`.

    NOTE[DIFF] The readout is built for its shorter input instead of being given `s_i^(1)` several times:
    `2 m h` weights fewer per numerical field than with three steps.

    *Shape*: values `[B, N]` float64 (NaN = missing), category_tokens `[B, C, d]` -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> encoder = OneStep(TrainingStatistics.from_arrays(np.array([[1.0], [40.0]])), 3, 16)
    >>> encoder.trace(torch.tensor([[7.0]]).double(), torch.ones(1, 3, 16)).states.shape  # s^(0) and s^(1)
    torch.Size([2, 1, 4, 8])
    """

    source = replace(ScalarLens.source, basis="the paper's ablation study", fidelity=0.9, legitimacy=0.95)

    def __init__(
        self,
        statistics: TrainingStatistics,
        n_categories: int,
        embedding_dim: int,
        *,
        intervals: int = 16,
        state_dim: int = 8,
        rank: int = 16,
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
            state_dim=state_dim,
            rank=rank,
            steps=1,
            hidden_dim=hidden_dim,
            mesh_start=mesh_start,
            width_floor=width_floor,
            temperature=temperature,
        )
