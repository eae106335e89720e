"""Linear consumer: one weight per token component."""

from __future__ import annotations

from torch import Tensor, nn

from scalarlens.backbones.base import TokenBackbone, Tower, backbones


@backbones.register("linear")
class LinearConsumer(TokenBackbone):
    """`y = b + <a, z>`: whatever is not linear must come from the tokens themselves.

    *Shape*: tokens `[B, F, d]` -> logits `[B]`.

    >>> import torch
    >>> LinearConsumer(1, 1, 4, Tower())(torch.ones(3, 1, 4), torch.ones(3, 1, 4)).shape
    torch.Size([3])
    """

    citation = "the shared linear consumer of the ScalarLens paper's controlled study"

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.head = nn.Linear(self.n_fields * embedding_dim, 1)

    def score(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(tokens.flatten(1))
        return logits.squeeze(-1)
