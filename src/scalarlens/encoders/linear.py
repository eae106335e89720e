"""Linear embedding: one affine map per field."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scalarlens.encoders.base import Source, ValueEncoder, encoders
from scalarlens.table.statistics import TrainingStatistics

OFFICIAL = "Gorishniy et al., On Embeddings for Numerical Features in Tabular Deep Learning, NeurIPS 2022"


@encoders.register("linear")
class Linear(ValueEncoder):
    """An affine map of the number: `e_i = x_i w_i + b_i`.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> linear = Linear(TrainingStatistics.from_arrays(np.array([[1.0], [9.0]])), 0, 4)
    >>> bool((linear(torch.zeros(1, 1).double())[0] == linear.bias).all())
    True
    """

    source = Source(
        citation=OFFICIAL,
        basis="official package rtdl_num_embeddings",
        hazards="The token grows with the value: on raw wide columns nothing trains.",
        fidelity=0.95,
        legitimacy=0.99,
    )

    def __init__(self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        bound = embedding_dim**-0.5
        self.weight = nn.Parameter(torch.empty(self.n_values, embedding_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(self.n_values, embedding_dim).uniform_(-bound, bound))

    def embed(self, values: Tensor) -> Tensor:
        return values.to(self.weight.dtype).unsqueeze(-1) * self.weight + self.bias
