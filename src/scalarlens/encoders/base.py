"""What an encoder is: the interface, the registry, and the two kinds (value only, value in context)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from scalarlens.registry import Registry, bind_options
from scalarlens.table.statistics import TrainingStatistics

Context = Literal["none", "categorical", "numerical", "all"]


@dataclass(frozen=True)
class Source:
    """Where an encoder comes from, what to beware of, and how sure we are that this is what its authors ran.

    `fidelity` is the confidence that the default equals what the ScalarLens paper compared with,
    `legitimacy` that it is a legitimate form of the method; both in [0, 1].
    """

    citation: str
    basis: str
    hazards: str
    fidelity: float
    legitimacy: float
    statistics: tuple[str, ...] = ()


class NumericalEncoder(nn.Module):
    """One vector per numerical field, from the row's values and, where a subclass says so, its context.

    *Shape*: values `[B, N]` float64 (NaN = missing), category_tokens `[B, C, d]` -> value_tokens `[B, N, d]`.
    """

    source: ClassVar[Source]
    context: ClassVar[Context]
    #: whether `coordinate(values)` exists and never moves with the context
    promises_coordinate: ClassVar[bool] = False
    #: parameters that cannot receive a gradient, by design of the method
    idle_parameters: ClassVar[tuple[str, ...]] = ()

    def __init__(self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int) -> None:
        super().__init__()
        self.n_values = statistics.n_values
        self.n_categories = n_categories
        self.embedding_dim = embedding_dim

    def forward(self, values: Tensor, category_tokens: Tensor) -> Tensor:
        raise NotImplementedError


class ValueEncoder(NumericalEncoder):
    """An encoder whose token depends on the number alone: `embed` never sees the context.

    A missing value gets its field's own learned token; `embed` only ever meets numbers.
    """

    context = "none"

    def __init__(self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        self.missing = nn.Parameter(lookup_table(self.n_values, embedding_dim))

    def embed(self, values: Tensor) -> Tensor:
        """values `[B, N]` without NaN -> tokens `[B, N, d]`."""
        raise NotImplementedError

    def forward(self, values: Tensor, category_tokens: Tensor | None = None) -> Tensor:
        absent = values.isnan()
        tokens = self.embed(values.masked_fill(absent, 0.0))
        return torch.where(absent.unsqueeze(-1), self.missing, tokens)


#: NOTE[DIFF] The paper gives no start for lookup-like tables. Normal with this standard deviation: a start at 1
#: saturates the backbones that multiply tokens, and one at 1e-4 would be ruled by the epsilon of the token norm.
TABLE_STD = 0.01


def lookup_table(*shape: int) -> Tensor:
    """The start of every lookup-like table: normal, small."""
    return torch.randn(*shape) * TABLE_STD


encoders: Registry[type[NumericalEncoder]] = Registry("encoder", __package__, "scalarlens list encoders")


def build(
    name: str, statistics: TrainingStatistics, n_categories: int, embedding_dim: int = 16, **options: Any
) -> NumericalEncoder:
    """Build a registered encoder; options are checked against its constructor.

    >>> import numpy as np
    >>> statistics = TrainingStatistics.from_arrays(np.array([[0.0, 3.0], [2.0, 5.0], [9.0, np.nan]]))
    >>> encoder = build("scalarlens", statistics, n_categories=4, embedding_dim=16, rank=8)
    >>> encoder(torch.zeros(5, 2, dtype=torch.float64), torch.zeros(5, 4, 16)).shape
    torch.Size([5, 2, 16])
    """
    part = encoders.get(name)
    return part(statistics, n_categories, embedding_dim, **bind_options("encoder", name, part, options))
