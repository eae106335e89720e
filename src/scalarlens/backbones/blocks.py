"""Pieces that several backbones share: the sum over pairs of fields, and the linear branch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scalarlens.backbones.base import TokenBackbone, Tower
from scalarlens.errors import UsageError


class PairSum(nn.Module):
    """`sum_{f<g} Z_f * Z_g = ((sum_f Z_f)^2 - sum_f Z_f^2) / 2`, per component (Rendle, ICDM 2010).

    The difference of squares is the usual form and linear in F. In float32 it loses what is below about 6e-8
    of the largest squared component: beside a component of 1e5, pairs that sum to less than a few hundred
    vanish.

    *Shape*: tokens `[B, F, d]` -> `[B, d]`.

    >>> PairSum()(torch.tensor([[[2.0], [3.0], [5.0]]])).item()
    31.0
    """

    def forward(self, tokens: Tensor) -> Tensor:
        return (tokens.sum(1).square() - tokens.square().sum(1)) / 2


class LinearBranch(nn.Module):
    """`b + sum_i <u_i, e_i> + sum_j t_j[c_j]`: a weight vector per numerical token, a number per category.

    NOTE[DIFF] The paper gives the linear branch the numerical token and does not say what categories give it:
    the one-dimensional weights of the original models, not one more map of the category tokens.

    *Shape*: value_tokens `[B, N, d]`, category_weights `[B, C]` -> `[B]`.

    >>> LinearBranch(2, 4)(torch.zeros(3, 2, 4), torch.tensor([[1.0, 2.0]]).expand(3, 2)).tolist()
    [3.0, 3.0, 3.0]
    """

    def __init__(self, n_values: int, embedding_dim: int) -> None:
        super().__init__()
        width = n_values * embedding_dim
        # The Xavier start of a layer with one output; `nn.Linear` itself warns when there are no values.
        self.weight = nn.Parameter(torch.randn(width) * (2 / (width + 1)) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, value_tokens: Tensor, category_weights: Tensor) -> Tensor:
        return value_tokens.flatten(1) @ self.weight + category_weights.sum(1) + self.bias


class FirstOrderBackbone(TokenBackbone):
    """A token backbone beside a linear branch: `y = y_lin + score(Z)`.

    *Shape*: value_tokens `[B, N, d]`, category_tokens `[B, C, d]`, category_weights `[B, C]` -> logits `[B]`.
    """

    first_order = True

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.linear = LinearBranch(n_values, embedding_dim)

    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        if category_weights is None:
            raise UsageError(
                f"{type(self).__name__} has a linear branch and needs category_weights [B, C]; got None; "
                "pass the one-dimensional weight of each category, as CtrModel does"
            )
        linear: Tensor = self.linear(value_tokens, category_weights)
        return linear + super().forward(value_tokens, category_tokens)
