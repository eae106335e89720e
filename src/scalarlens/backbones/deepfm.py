"""DeepFM: a linear branch, a factorization machine and a deep tower."""

from __future__ import annotations

from torch import Tensor

from scalarlens.backbones.base import Tower, backbones
from scalarlens.backbones.blocks import FirstOrderBackbone, PairSum


@backbones.register("deepfm")
class DeepFm(FirstOrderBackbone):
    """`y = y_lin + sum_{f<g} <Z_f, Z_g> + MLP(z)`; all three read the same tokens.

    *Shape*: value_tokens `[B, N, d]`, category_tokens `[B, C, d]`, category_weights `[B, C]` -> logits `[B]`.

    >>> import torch
    >>> DeepFm(1, 1, 4, Tower())(torch.ones(3, 1, 4), torch.ones(3, 1, 4), torch.ones(3, 1)).shape
    torch.Size([3])
    """

    citation = "Guo et al., DeepFM, IJCAI 2017"

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.pair_sum = PairSum()
        self.mlp = tower.to_logit(self.n_fields * embedding_dim)

    def score(self, tokens: Tensor) -> Tensor:
        pairs: Tensor = self.pair_sum(tokens)
        deep: Tensor = self.mlp(tokens.flatten(1))
        return pairs.sum(-1) + deep.squeeze(-1)
