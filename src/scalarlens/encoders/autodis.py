"""AutoDis: a number is a soft choice among its field's meta-embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalarlens.encoders.base import Source, ValueEncoder, encoders, lookup_table
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics


@encoders.register("autodis")
class AutoDis(ValueEncoder):
    """`h = LeakyReLU(x_i w_i)`, `p = softmax((W_i h + skip h) / temperature)`, `e_i = sum_k p_k M_{ik}`.

    NOTE[DIFF] The paper gives no setting of AutoDis: the number of meta-embeddings, the skip and the
    temperature are those of a public Criteo configuration, and the meta-embeddings start as small as every
    other table.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> import numpy as np
    >>> autodis = AutoDis(TrainingStatistics.from_arrays(np.array([[1.0], [9.0]])), 0, 4)
    >>> autodis.weights(torch.tensor([[5.0]]).double()).sum().round(decimals=5).item()
    1.0
    """

    source = Source(
        citation="Guo et al., An Embedding Learning Framework for Numerical Features in CTR Prediction, KDD 2021",
        basis="public re-implementations of the full form",
        hazards="For positive values the scores are proportional to the value: in raw units with a wide range the"
        " softmax picks one meta-embedding for every large value, and its gradient vanishes.",
        fidelity=0.55,
        legitimacy=0.9,
    )

    def __init__(
        self,
        statistics: TrainingStatistics,
        n_categories: int,
        embedding_dim: int,
        *,
        meta_embeddings: int = 20,
        skip: float = 0.8,
        temperature: float = 0.815,
    ) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        if meta_embeddings < 1:
            raise UsageError(f"meta_embeddings must be at least 1; got {meta_embeddings}")
        if temperature <= 0:
            raise UsageError(f"temperature must be positive; got {temperature}")
        self.skip = skip
        self.temperature = temperature
        n, h = self.n_values, meta_embeddings
        self.projection = nn.Parameter(torch.randn(n, h) * (2 / (1 + h)) ** 0.5)
        self.mixing = nn.Parameter(torch.randn(n, h, h) * h**-0.5)
        self.meta_embeddings = nn.Parameter(lookup_table(n, h, embedding_dim))

    def scores(self, values: Tensor) -> Tensor:
        """`W_i h + skip h`, `[B, N, H]`."""
        h = F.leaky_relu(values.to(self.projection.dtype).unsqueeze(-1) * self.projection)
        return torch.bmm(h.transpose(0, 1), self.mixing).transpose(0, 1) + self.skip * h

    def weights(self, values: Tensor) -> Tensor:
        """`p`, the share of each meta-embedding, `[B, N, H]`."""
        return torch.softmax(self.scores(values) / self.temperature, dim=-1)

    def embed(self, values: Tensor) -> Tensor:
        return torch.bmm(self.weights(values).transpose(0, 1), self.meta_embeddings).transpose(0, 1)
