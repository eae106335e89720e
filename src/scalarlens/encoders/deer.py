"""DEER: interpolation between adjacent nodes of a learned mesh, and nothing else."""

from __future__ import annotations

from torch import Tensor

from scalarlens.encoders.base import Source, encoders
from scalarlens.encoders.blocks import MeshEncoder


@encoders.register("deer")
class Deer(MeshEncoder):
    """The token is the coordinate: `e_i = (1 - a) E_{ik} + a E_{i,k+1}` on a learned monotone mesh.

    NOTE[DIFF] The text of the DEER paper was not available; this is the ScalarLens paper's account of it
    (`eq:monotone_mesh`, `eq:local_interpolation`), with the same start of the mesh as ScalarLens.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> import numpy as np, torch
    >>> from scalarlens.table import TrainingStatistics
    >>> deer = Deer(TrainingStatistics.from_arrays(np.array([[0.0], [10.0]])), 0, 4)
    >>> bool((deer(torch.tensor([[10.0], [99.0]]).double()) == deer.mesh.nodes[0, -1]).all())
    True
    """

    context = "none"
    source = Source(
        citation="Cheng, Dynamic Explicit Embedding Representation for Numerical Features, CIKM 2022",
        basis="reconstruction from the ScalarLens paper's equations",
        hazards="Rows beyond the training range are clipped and move no boundary. A uniform start on a heavy tail"
        " leaves nearly all rows in one interval.",
        fidelity=0.5,
        legitimacy=0.65,
        statistics=("range", "quantiles (start of the mesh)"),
    )

    def forward(self, values: Tensor, category_tokens: Tensor | None = None) -> Tensor:
        return self.coordinate(values)
