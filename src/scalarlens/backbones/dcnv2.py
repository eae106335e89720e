"""DCNv2: full-matrix cross layers beside a deep tower."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scalarlens.backbones.base import TokenBackbone, Tower, backbones


@backbones.register("dcnv2")
class DcnV2(TokenBackbone):
    """`x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`, in parallel with an MLP; one head over both.

    NOTE[DIFF] The paper does not state the depth or the structure: three full-matrix layers in parallel with the
    tower, as FuxiCTR's template has it.

    *Shape*: tokens `[B, F, d]` -> logits `[B]`.

    >>> DcnV2(1, 1, 4, Tower())(torch.ones(3, 1, 4), torch.ones(3, 1, 4)).shape
    torch.Size([3])
    """

    citation = "Wang et al., DCN V2, WWW 2021"

    def __init__(
        self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower, *, cross_layers: int = 3
    ) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        width = self.n_fields * embedding_dim
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(cross_layers))
        self.deep = tower.layers(width)
        self.head = nn.Linear(width + tower.width(width), 1)

    def score(self, tokens: Tensor) -> Tensor:
        first = tokens.flatten(1)
        crossed = first
        for cross in self.crosses:
            crossed = first * cross(crossed) + crossed
        logits: Tensor = self.head(torch.cat([crossed, self.deep(first)], dim=-1))
        return logits.squeeze(-1)
