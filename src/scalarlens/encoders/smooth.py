"""Beyond the paper: nodes that start as a smooth curve along the mesh, and deeper heads."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from scalarlens.encoders.base import encoders
from scalarlens.encoders.blocks import MeshStart, PerFieldLinear
from scalarlens.encoders.deer import Deer
from scalarlens.encoders.scalarlens import ScalarLens
from scalarlens.table.statistics import TrainingStatistics

#: hidden units of the head that gives drive and gate of a field
HEAD_DIM = 32
#: what both were tried with, in the controlled study and on real tables
COMPANY = " Meant for categorical tables that start at .1 (`recipe.category_std`) and for averaged weights."


@encoders.register("deer-smooth")
class DeerSmooth(Deer):
    """DEER with nodes that start on a curve, `E(t) = Σ_j (a_j cos(π j t) + .3 b_j) / j` at `t = k / K`, of std 1.

    NOTE[DIFF] Beyond the paper, whose DEER is `deer`. The token of a missing value starts small, as there.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> nodes = DeerSmooth(TrainingStatistics.from_arrays(np.array([[0.0], [10.0]])), 0, 16).mesh.nodes[0]
    >>> bool((nodes[1] - nodes[0]).norm() < (nodes[8] - nodes[0]).norm())
    True
    """

    source = replace(
        Deer.source,
        basis="ours: `deer` from another start of its nodes",
        hazards=Deer.source.hazards
        + " Nodes start at size 1: beside categorical tables that start small, numbers outweigh categories at first."
        + COMPANY,
        fidelity=0.0,
        legitimacy=0.6,
    )

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
        super().__init__(
            statistics,
            n_categories,
            embedding_dim,
            intervals=intervals,
            mesh_start=mesh_start,
            width_floor=width_floor,
            temperature=temperature,
        )
        self.mesh.start_smooth()


@encoders.register("scalarlens-smooth")
class ScalarLensSmooth(ScalarLens):
    """ScalarLens with nodes that start on a curve, and two-layer heads: `[δ_f; g_f] = P_f SiLU(A_f ē_f + a_f) + p_f`.

    The curve is `E(t) = Σ_j (a_j cos(π j t) + .3 b_j) / j` over `j = 1, 2, 3` at `t = k / K`, of std 1. A field has
    one hidden layer of 32 units for drive and gate together; what follows the heads is ScalarLens.

    NOTE[DIFF] Beyond the paper, whose method is `scalarlens`. The token of a missing value starts small, as there.

    *Shape*: values `[B, N]` float64 (NaN = missing), category_tokens `[B, C, d]` -> value_tokens `[B, N, d]`.

    >>> import numpy as np, torch
    >>> encoder = ScalarLensSmooth(TrainingStatistics.from_arrays(np.array([[1.0, 5.0], [40.0, -2.0]])), 3, 16)
    >>> encoder(torch.zeros(5, 2).double(), torch.zeros(5, 3, 16)).shape
    torch.Size([5, 2, 16])
    """

    source = replace(
        ScalarLens.source,
        basis="ours: `scalarlens` from another start of its nodes, with deeper heads",
        hazards=ScalarLens.source.hazards + COMPANY,
        fidelity=0.0,
        legitimacy=0.9,
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
            state_dim=state_dim,
            rank=rank,
            steps=steps,
            hidden_dim=hidden_dim,
            mesh_start=mesh_start,
            width_floor=width_floor,
            temperature=temperature,
        )
        self.mesh.start_smooth()
        n_fields = self.n_values + n_categories
        self.hidden = PerFieldLinear(n_fields, embedding_dim, HEAD_DIM)
        self.drive = PerFieldLinear(n_fields, HEAD_DIM, state_dim)
        self.gate = PerFieldLinear(n_fields, HEAD_DIM, state_dim)

    def force(self, normalized: Tensor) -> tuple[Tensor, Tensor]:
        return super().force(F.silu(self.hidden(normalized)))
