"""What a backbone is: the interface, the registry, and the tower that most of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scalarlens.registry import Registry, bind_options


@dataclass(frozen=True)
class Tower:
    """The shape of a multi-layer perceptron: hidden widths, and what stands between its layers."""

    hidden: tuple[int, ...] = (256, 128, 64)
    dropout: float = 0.0
    batch_norm: bool = False

    def layers(self, n_inputs: int) -> nn.Sequential:
        """Linear, (batch norm,) ReLU, (dropout) per hidden width; ends at the last hidden layer."""
        modules: list[nn.Module] = []
        for width in self.hidden:
            modules.append(nn.Linear(n_inputs, width))
            if self.batch_norm:
                modules.append(nn.BatchNorm1d(width))
            modules.append(nn.ReLU())
            if self.dropout > 0:
                modules.append(nn.Dropout(self.dropout))
            n_inputs = width
        return nn.Sequential(*modules)

    def width(self, n_inputs: int) -> int:
        """Number of outputs of `layers(n_inputs)`."""
        return self.hidden[-1] if self.hidden else n_inputs

    def to_logit(self, n_inputs: int) -> nn.Sequential:
        """The layers and a head of one output."""
        return nn.Sequential(*self.layers(n_inputs), nn.Linear(self.width(n_inputs), 1))


class Backbone(nn.Module):
    """Reads field tokens, never a raw value, and returns a logit.

    *Shape*: value_tokens `[B, N, d]`, category_tokens `[B, C, d]` -> logits `[B]`. A backbone with a linear branch
    (`first_order`) also reads `category_weights [B, C]`: the one-dimensional weight of each category, which the
    model looks up.
    """

    first_order: ClassVar[bool] = False
    citation: ClassVar[str]

    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__()
        self.n_values = n_values
        self.n_categories = n_categories
        self.embedding_dim = embedding_dim
        self.n_fields = n_values + n_categories
        self.tower = tower

    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        raise NotImplementedError


class TokenBackbone(Backbone):
    """A backbone that treats all field tokens alike: numerical first, then categorical."""

    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        return self.score(torch.cat([value_tokens, category_tokens], dim=1))

    def score(self, tokens: Tensor) -> Tensor:
        """tokens `[B, F, d]` -> logits `[B]`."""
        raise NotImplementedError


backbones: Registry[type[Backbone]] = Registry("backbone", __package__, "scalarlens list backbones")


def build(
    name: str,
    n_values: int,
    n_categories: int,
    embedding_dim: int = 16,
    tower: Tower | None = None,
    **options: Any,
) -> Backbone:
    """Build a registered backbone; options are checked against its constructor.

    >>> backbone = build("dnn", n_values=2, n_categories=3)
    >>> backbone(torch.zeros(5, 2, 16), torch.zeros(5, 3, 16)).shape
    torch.Size([5])
    """
    part = backbones.get(name)
    bound = bind_options("backbone", name, part, options)
    backbone = part(n_values, n_categories, embedding_dim, tower or Tower(), **bound)
    backbone.apply(_start_linear)
    return backbone


#: NOTE[DIFF] The paper gives no start for the backbones: Xavier normal with zero bias, as FuxiCTR has it.
def _start_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
