"""Field embedding: one direction per field, scaled by the value."""

from __future__ import annotations

from torch import Tensor, nn

from scalarlens.encoders.base import Source, ValueEncoder, encoders, lookup_table
from scalarlens.table.statistics import TrainingStatistics


@encoders.register("field")
class Field(ValueEncoder):
    """Every value of a field lies on one line: `e_i = x_i v_i`.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> import numpy as np, torch
    >>> field = Field(TrainingStatistics.from_arrays(np.array([[1.0], [9.0]])), 0, 4)
    >>> bool((field(torch.zeros(1, 1).double()) == 0).all())
    True
    """

    source = Source(
        citation="field embedding, as named in Guo et al., AutoDis, KDD 2021",
        basis="definition; the start is ours",
        hazards="The token grows with the value: products of tokens grow with its square, and a raw heavy tail"
        " saturates the logit.",
        fidelity=0.85,
        legitimacy=0.99,
    )

    def __init__(self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        self.weight = nn.Parameter(lookup_table(self.n_values, embedding_dim))

    def embed(self, values: Tensor) -> Tensor:
        return values.to(self.weight.dtype).unsqueeze(-1) * self.weight
