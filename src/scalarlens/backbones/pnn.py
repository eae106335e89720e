"""PNN: a deep tower over the tokens and the inner products of all pairs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scalarlens.backbones.base import TokenBackbone, Tower, backbones


class InnerProducts(nn.Module):
    """`<Z_f, Z_g>` for every pair of fields f < g: the strict upper triangle of `Z Z^T`, row by row.

    *Shape*: tokens `[B, F, d]` -> `[B, F (F - 1) / 2]`.

    >>> InnerProducts(3)(torch.tensor([[[2.0], [3.0], [5.0]]])).tolist()
    [[6.0, 10.0, 15.0]]
    """

    pairs: Tensor

    def __init__(self, n_fields: int) -> None:
        super().__init__()
        left, right = torch.triu_indices(n_fields, n_fields, offset=1)
        self.register_buffer("pairs", left * n_fields + right, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.bmm(tokens, tokens.transpose(1, 2)).flatten(1).index_select(1, self.pairs)


@backbones.register("pnn")
class Pnn(TokenBackbone):
    """`y = MLP([z; <Z_f, Z_g> for f < g])`.

    NOTE[DIFF] The paper does not say which product: the inner one, each pair once, without learned kernels,
    as FuxiCTR has it.

    *Shape*: tokens `[B, F, d]` -> logits `[B]`.

    >>> Pnn(1, 1, 4, Tower())(torch.ones(3, 1, 4), torch.ones(3, 1, 4)).shape
    torch.Size([3])
    """

    citation = "Qu et al., Product-based Neural Networks for User Response Prediction, ICDM 2016"

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.products = InnerProducts(self.n_fields)
        self.mlp = tower.to_logit(self.n_fields * embedding_dim + len(self.products.pairs))

    def score(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.mlp(torch.cat([tokens.flatten(1), self.products(tokens)], dim=-1))
        return logits.squeeze(-1)
