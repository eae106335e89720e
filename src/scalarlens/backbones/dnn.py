"""DNN: a multi-layer perceptron over the flattened tokens."""

from __future__ import annotations

from torch import Tensor

from scalarlens.backbones.base import TokenBackbone, Tower, backbones


@backbones.register("dnn")
class Dnn(TokenBackbone):
    """`y = MLP(z)` on the flattened field tokens `z`.

    *Shape*: tokens `[B, F, d]` -> logits `[B]`.

    >>> import torch
    >>> Dnn(1, 1, 4, Tower(hidden=(8,)))(torch.ones(3, 1, 4), torch.ones(3, 1, 4)).shape
    torch.Size([3])
    """

    citation = "Covington et al., Deep Neural Networks for YouTube Recommendations, RecSys 2016"

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.mlp = tower.to_logit(self.n_fields * embedding_dim)

    def score(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.mlp(tokens.flatten(1))
        return logits.squeeze(-1)
