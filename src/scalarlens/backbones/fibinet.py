"""FiBiNET: bilinear products of all pairs, of the tokens and of the tokens rescaled by their importance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scalarlens.backbones.base import TokenBackbone, Tower, backbones
from scalarlens.errors import UsageError


class PairwiseBilinear(nn.Module):
    """`(Z_f W_fg) * Z_g` for every pair of fields f < g, with a matrix per pair.

    The output is one block per first field f, with its pairs (f, f+1), ..., (f, F-1). All blocks joined are
    the pairs in row-major order; they are left apart so that a caller with two branches copies them once.

    *Shape*: tokens `[B, F, d]` -> F - 1 blocks `[B, (F - 1 - f) d]`.

    >>> torch.cat(PairwiseBilinear(5, 4)(torch.ones(3, 5, 4)), dim=-1).shape
    torch.Size([3, 40])
    """

    def __init__(self, n_fields: int, embedding_dim: int) -> None:
        super().__init__()
        #: pairs that each first field has
        self.sizes = list(range(n_fields - 1, 0, -1))
        self.weight = nn.Parameter(torch.randn(embedding_dim, sum(self.sizes), embedding_dim) * embedding_dim**-0.5)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        # One matrix product per first field, on views of the tokens: no gather as large as all pairs, and no
        # gradient scattered back.
        return [
            (tokens[:, f] @ weight.flatten(1)) * tokens[:, f + 1 :].flatten(1)
            for f, weight in enumerate(self.weight.split(self.sizes, dim=1))
        ]


class FieldImportance(nn.Module):
    """`relu(W_2 relu(W_1 mean_d Z))`: one factor per field, zero or more (SENET).

    *Shape*: tokens `[B, F, d]` -> `[B, F]`.

    >>> FieldImportance(7, reduction=3)(torch.ones(3, 7, 4)).shape
    torch.Size([3, 7])
    """

    def __init__(self, n_fields: int, reduction: int) -> None:
        super().__init__()
        squeezed = max(1, n_fields // reduction)
        self.excitation = nn.Sequential(
            nn.Linear(n_fields, squeezed, bias=False),
            nn.ReLU(),
            nn.Linear(squeezed, n_fields, bias=False),
            nn.ReLU(),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        importance: Tensor = self.excitation(tokens.mean(-1))
        return importance


@backbones.register("fibinet")
class FiBiNet(TokenBackbone):
    """`y = MLP([bilinear(Z); bilinear'(s(Z) Z)])`, with `s` the importance of each field.

    NOTE[DIFF] The paper states neither the kind of bilinear map, nor whether both branches share it, nor the
    reduction: a matrix per pair, not shared, and a reduction of three, as FuxiCTR has it. Each matrix has the
    Xavier start of its own; all of them taken as one tensor would start far smaller.

    *Shape*: tokens `[B, F, d]` -> logits `[B]`.

    >>> FiBiNet(1, 1, 4, Tower())(torch.ones(3, 1, 4), torch.ones(3, 1, 4)).shape
    torch.Size([3])
    """

    citation = "Huang et al., FiBiNET, RecSys 2019"

    def __init__(
        self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower, *, reduction: int = 3
    ) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        if self.n_fields < 2:
            raise UsageError(f"fibinet reads pairs of fields only and needs two; got {self.n_fields}; use 'dnn'")
        self.importance = FieldImportance(self.n_fields, reduction)
        self.bilinear = PairwiseBilinear(self.n_fields, embedding_dim)
        self.rescaled_bilinear = PairwiseBilinear(self.n_fields, embedding_dim)
        self.mlp = tower.to_logit(self.n_fields * (self.n_fields - 1) * embedding_dim)

    def score(self, tokens: Tensor) -> Tensor:
        rescaled = tokens * self.importance(tokens).unsqueeze(-1)
        logits: Tensor = self.mlp(torch.cat([*self.bilinear(tokens), *self.rescaled_bilinear(rescaled)], dim=-1))
        return logits.squeeze(-1)
