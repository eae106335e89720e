"""DCN: rank-one cross layers beside a deep tower."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scalarlens.backbones.base import TokenBackbone, Tower, backbones


@backbones.register("dcn")
class Dcn(TokenBackbone):
    """`x_{l+1} = x_0 (w_l^T x_l) + b_l + x_l`, in parallel with an MLP; one head over both.

    NOTE[DIFF] The paper does not state the depth: three cross layers, as FuxiCTR has it.

    *Shape*: tokens `[B, F, d]` -> logits `[B]`.

    >>> Dcn(1, 1, 4, Tower())(torch.ones(3, 1, 4), torch.ones(3, 1, 4)).shape
    torch.Size([3])
    """

    citation = "Wang et al., Deep & Cross Network for Ad Click Predictions, ADKDD 2017"

    def __init__(
        self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower, *, cross_layers: int = 3
    ) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        width = self.n_fields * embedding_dim
        self.crosses = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(cross_layers))
        self.biases = nn.Parameter(torch.zeros(cross_layers, width))
        self.deep = tower.layers(width)
        self.head = nn.Linear(width + tower.width(width), 1)

    def score(self, tokens: Tensor) -> Tensor:
        first = tokens.flatten(1)
        crossed = self.cross(first)
        logits: Tensor = self.head(torch.cat([crossed, self.deep(first)], dim=-1))
        return logits.squeeze(-1)

    def cross(self, first: Tensor) -> Tensor:
        """`x_L` from `x_0`, `[B, F d]` each."""
        crossed = first
        for weight, bias in zip(self.crosses, self.biases, strict=True):
            crossed = first * weight(crossed) + bias + crossed
        return crossed
