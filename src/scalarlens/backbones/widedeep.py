"""Wide & Deep: a linear branch beside a deep tower."""

from __future__ import annotations

from torch import Tensor

from scalarlens.backbones.base import Tower, backbones
from scalarlens.backbones.blocks import FirstOrderBackbone


@backbones.register("widedeep")
class WideDeep(FirstOrderBackbone):
    """`y = y_lin + MLP(z)`.

    NOTE[DIFF] The paper names no crossed features for the wide part, so there are none.

    *Shape*: value_tokens `[B, N, d]`, category_tokens `[B, C, d]`, category_weights `[B, C]` -> logits `[B]`.

    >>> import torch
    >>> WideDeep(1, 1, 4, Tower())(torch.ones(3, 1, 4), torch.ones(3, 1, 4), torch.ones(3, 1)).shape
    torch.Size([3])
    """

    citation = "Cheng et al., Wide & Deep Learning for Recommender Systems, DLRS 2016"

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.mlp = tower.to_logit(self.n_fields * embedding_dim)

    def score(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.mlp(tokens.flatten(1))
        return logits.squeeze(-1)
