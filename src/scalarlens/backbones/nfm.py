"""NFM: a deep tower over the pooled products of all pairs, beside a linear branch."""

from __future__ import annotations

from torch import Tensor

from scalarlens.backbones.base import Tower, backbones
from scalarlens.backbones.blocks import FirstOrderBackbone, PairSum


@backbones.register("nfm")
class Nfm(FirstOrderBackbone):
    """`y = y_lin + MLP(sum_{f<g} Z_f * Z_g)`.

    NOTE[DIFF] The original has dropout and batch norm on the pooled vector; the paper's protocol has neither.

    *Shape*: value_tokens `[B, N, d]`, category_tokens `[B, C, d]`, category_weights `[B, C]` -> logits `[B]`.

    >>> import torch
    >>> Nfm(1, 1, 4, Tower())(torch.ones(3, 1, 4), torch.ones(3, 1, 4), torch.ones(3, 1)).shape
    torch.Size([3])
    """

    citation = "He and Chua, Neural Factorization Machines for Sparse Predictive Analytics, SIGIR 2017"

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.pair_sum = PairSum()
        self.mlp = tower.to_logit(embedding_dim)

    def score(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.mlp(self.pair_sum(tokens))
        return logits.squeeze(-1)
