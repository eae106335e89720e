"""DEER: interpolation between adjacent nodes of a learned mesh, and nothing else."""

from __future__ import annotations

from torch import Tensor

from scalarlens.encoders.base import NumericalEncoder, Source, encoders
from scalarlens.encoders.blocks import LearnedMesh, MeshStart
from scalarlens.table.statistics import TrainingStatistics


@encoders.register("deer")
class Deer(NumericalEncoder):
    """The token is the coordinate: `e_i = (1 - a) E_{ik} + a E_{i,k+1}` on a learned monotone mesh.

    NOTE[DIFF] The text of the DEER paper was not available; this is the ScalarLens paper's account of it
    (`eq:monotone_mesh`, `eq:local_interpolation`), with the same start of the mesh as ScalarLens.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> import numpy as np, torch
    >>> deer = Deer(TrainingStatistics.from_arrays(np.array([[0.0], [10.0]])), 0, 4)
    >>> bool((deer(torch.tensor([[10.0], [99.0]]).double()) == deer.mesh.nodes[0, -1]).all())
    True
    """

    context = "none"
    promises_coordinate = True
    source = Source(
        citation="Cheng, Dynamic Explicit Embedding Representation for Numerical Features, CIKM 2022",
        basis="reconstruction from the ScalarLens paper's equations",
        hazards="Rows beyond the training range are clipped and move no boundary. A uniform start on a heavy tail"
        " leaves nearly all rows in one interval.",
        fidelity=0.5,
        legitimacy=0.65,
        statistics=("range", "quantiles (start of the mesh)"),
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
        super().__init__(statistics, n_categories, embedding_dim)
        self.mesh = LearnedMesh(
            statistics,
            embedding_dim,
            intervals=intervals,
            mesh_start=mesh_start,
            width_floor=width_floor,
            temperature=temperature,
        )

    def coordinate(self, values: Tensor) -> Tensor:
        """The local token, `[B, N, d]`."""
        tokens: Tensor = self.mesh(values)
        return tokens

    def forward(self, values: Tensor, category_tokens: Tensor | None = None) -> Tensor:
        return self.coordinate(values)
