"""Linear-ReLU embedding: one affine map per field, cut off below zero."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from scalarlens.encoders.base import Source, encoders
from scalarlens.encoders.linear import OFFICIAL, Linear


@encoders.register("linear-relu")
class LinearRelu(Linear):
    """A rectified affine map of the number: `e_i = ReLU(x_i w_i + b_i)`.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> import numpy as np, torch
    >>> from scalarlens.table.statistics import TrainingStatistics
    >>> linear_relu = LinearRelu(TrainingStatistics.from_arrays(np.array([[1.0], [9.0]])), 0, 4)
    >>> bool((linear_relu(torch.tensor([[-7.0], [7.0]]).double()) >= 0).all())
    True
    """

    source = Source(
        citation=OFFICIAL,
        basis="official package rtdl_num_embeddings",
        hazards="For a column of large positive numbers the sign of a weight decides whether its coordinate is ever on."
        " Tokens that are never negative add up with one sign in pair sums.",
        fidelity=0.95,
        legitimacy=0.99,
    )

    def embed(self, values: Tensor) -> Tensor:
        return F.relu(super().embed(values))
