"""AutoInt: self-attention between field tokens beside a deep tower."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scalarlens.backbones.base import TokenBackbone, Tower, backbones
from scalarlens.errors import UsageError


class FieldAttention(nn.Module):
    """`relu(concat_h softmax(Q_h K_h^T / sqrt(d_h)) V_h + Z W_res)`: every field looks at every field.

    *Shape*: tokens `[B, F, d]` -> `[B, F, d]`.

    >>> attention = FieldAttention(4, heads=2)
    >>> attention.weights(torch.ones(1, 5, 4)).shape, attention(torch.ones(1, 5, 4)).shape
    (torch.Size([1, 2, 5, 5]), torch.Size([1, 5, 4]))
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(f"heads must divide embedding_dim; got heads={heads} for embedding_dim={width}")
        self.heads = heads
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.residual = nn.Linear(width, width, bias=False)

    def weights(self, tokens: Tensor) -> Tensor:
        """How much each field takes from each field, `[B, heads, F, F]`; every row sums to 1."""
        # Written out: by default the fused float32 kernel on CUDA has a nondeterministic backward pass.
        query = self._per_head(self.query(tokens) / self.head_width**0.5)
        key = self._per_head(self.key(tokens))
        return torch.softmax(query @ key.transpose(-1, -2), dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = self.weights(tokens) @ self._per_head(self.value(tokens))
        return torch.relu(seen.transpose(1, 2).flatten(2) + self.residual(tokens))

    def _per_head(self, tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (self.heads, self.head_width)).transpose(1, 2)


@backbones.register("autoint")
class AutoInt(TokenBackbone):
    """`y = <a, A(Z)> + MLP(z)`, with `A` a stack of self-attention layers over the field tokens.

    NOTE[DIFF] The paper states neither depth, heads nor width: three layers of two heads, as wide as a token.
    NOTE[DIFF] The paper gives hidden widths to every backbone, so this is the form with an MLP beside the
    attention (AutoInt+), without a linear branch.
    NOTE[DIFF] Scores are scaled by 1/sqrt(d_h), which the original does not do: unscaled, large tokens turn
    the softmax into a hard choice. The residual map is learned, as in the original.

    *Shape*: tokens `[B, F, d]` -> logits `[B]`.

    >>> AutoInt(1, 1, 4, Tower())(torch.ones(3, 1, 4), torch.ones(3, 1, 4)).shape
    torch.Size([3])
    """

    citation = "Song et al., AutoInt, CIKM 2019"

    def __init__(
        self,
        n_values: int,
        n_categories: int,
        embedding_dim: int,
        tower: Tower,
        *,
        attention_layers: int = 3,
        heads: int = 2,
    ) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        width = self.n_fields * embedding_dim
        self.attention = nn.Sequential(*(FieldAttention(embedding_dim, heads) for _ in range(attention_layers)))
        self.head = nn.Linear(width, 1)
        self.mlp = tower.to_logit(width)

    def score(self, tokens: Tensor) -> Tensor:
        attended: Tensor = self.head(self.attention(tokens).flatten(1))
        deep: Tensor = self.mlp(tokens.flatten(1))
        return (attended + deep).squeeze(-1)
