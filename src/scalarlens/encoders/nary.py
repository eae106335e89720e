"""NaryDis: the digits of an integer code in several number systems, one vector per digit and position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalarlens.encoders.base import Source, ValueEncoder, encoders, lookup_table
from scalarlens.encoders.blocks import ExactBuffers
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics

NARY_SOURCE = "Chen et al., NaryDis, CIKM 2022"
#: codes stay below this, whatever the range of the column
CODE_LIMIT = 2**31


class IntegerCode(ExactBuffers):
    """The place of a value in its training range as an integer: `c = round(10^p (clip(x, l, u) - l))`.

    `p` is the number of decimal places that hold the training values exactly, as far as the code stays below
    `2^31`.

    NOTE[DIFF] The papers do not say how a real number becomes an integer. Where even whole units do not fit,
    `p` becomes negative and the code keeps about nine leading digits of the range.

    *Shape*: values `[B, N]` float64 -> codes `[B, N]` int64.

    >>> code = IntegerCode(TrainingStatistics.from_arrays(np.array([[-0.5, -1e30], [1.25, 1e30]])))
    >>> code(torch.tensor([[0.0, 0.0], [99.0, 1e300]]).double()).tolist()
    [[50, 1000000000], [175, 2000000000]]
    """

    low: Tensor
    high: Tensor
    scale: Tensor

    def __init__(self, statistics: TrainingStatistics) -> None:
        super().__init__()
        fields = zip(statistics.low, statistics.high, statistics.decimals, strict=True)
        scales = [_scale(*field) for field in fields]
        self.register_buffer("low", torch.from_numpy(statistics.low.copy()))
        self.register_buffer("high", torch.from_numpy(statistics.high.copy()))
        self.register_buffer("scale", torch.tensor(scales, dtype=torch.float64))

    def forward(self, values: Tensor) -> Tensor:
        inside = values.double().clamp(self.low, self.high)
        # Half of the difference, doubled at the end: the same number, without the overflow of a full range.
        return ((inside * 0.5 - self.low * 0.5) * self.scale * 2.0).round().long()


def _scale(low: float, high: float, decimals: int) -> float:
    """`10^p`, with `p` from `decimals` downwards until the largest code fits."""
    places = int(decimals)
    while (float(high) * 0.5 - float(low) * 0.5) * 10.0**places >= (CODE_LIMIT - 0.5) * 0.5:
        places -= 1
    return 10.0**places


class DigitTable(nn.Module):
    """One vector per position and digit of a number system, for every field, in one flat table.

    A field has as many positions as its largest code, so that a shorter code shows its leading zeros. For one
    batched product the positions are padded to the longest field; a padded one is never selected.

    *Shape*: codes `[B, N]` int64 -> selected `[B, N, L n]` bool; slot `k n + δ` stands for digit δ at
    position k.

    >>> table = DigitTable([51, 2], base=3, width=4)
    >>> table.digits(torch.tensor([[51, 2]])).tolist()
    [[[0, 2, 2, 1], [2, 0, 0, 0]]]
    >>> table.weight.shape, table.vectors().shape
    (torch.Size([15, 4]), torch.Size([2, 12, 4]))
    """

    powers: Tensor
    present: Tensor
    rows: Tensor

    def __init__(self, largest: Sequence[int], base: int, width: int) -> None:
        super().__init__()
        self.base = base
        lengths = np.array([_length(code, base) for code in largest], dtype=np.int64)
        longest = int(lengths.max(initial=1))
        present = np.arange(longest) < lengths[:, None]
        starts = (np.cumsum(lengths) - lengths) * base
        rows = (starts[:, None] + np.arange(longest * base)) * present.repeat(base, axis=1)
        self.register_buffer("powers", torch.tensor([base**k for k in range(longest + 1)]))
        self.register_buffer("present", torch.from_numpy(present))
        self.register_buffer("rows", torch.from_numpy(rows))
        self.weight = nn.Parameter(lookup_table(int(lengths.sum()) * base, width))

    def digits(self, codes: Tensor) -> Tensor:
        """`δ_k = floor(c / n^k) mod n`, lowest position first: `[B, N]` -> `[B, N, L]` int64."""
        # Below 2^31 a float64 quotient never rounds up to the next integer, and int64 division is slow.
        quotients = (codes.double().unsqueeze(-1) / self.powers).floor().long()
        return quotients[..., :-1] - self.base * quotients[..., 1:]

    def forward(self, codes: Tensor) -> Tensor:
        chosen = self.digits(codes).unsqueeze(-1) == torch.arange(self.base, device=codes.device)
        return (chosen & self.present.unsqueeze(-1)).flatten(-2)

    def vectors(self) -> Tensor:
        """The vector of every slot, `[N, L n, width]`; a padded slot holds some other slot's."""
        return F.embedding(self.rows, self.weight)


def _length(code: int, base: int) -> int:
    """Number of digits of a code; zero has one."""
    length = 1
    while code >= base**length:
        length += 1
    return length


class NaryEncoder(ValueEncoder):
    """An encoder that sees a value as the digits of its integer code in several bases."""

    def __init__(
        self,
        statistics: TrainingStatistics,
        n_categories: int,
        embedding_dim: int,
        bases: Sequence[int],
        width: int,
    ) -> None:
        if not bases or min(bases) < 2:
            raise UsageError(f"bases must be one or more integers from 2; got {bases!r}")
        super().__init__(statistics, n_categories, embedding_dim)
        self.integer_code = IntegerCode(statistics)
        largest = self.integer_code(self.integer_code.high.unsqueeze(0))[0].tolist()
        tables = nn.ModuleList(DigitTable(largest, base, width) for base in bases)
        self.tables = cast("Sequence[DigitTable]", tables)


@encoders.register("nary-dis-lite")
class NaryDisLite(NaryEncoder):
    """The digit vectors of each base are summed, `v_n = Σ_k T_in[k, δ_k]`, and the bases stand side by side.

    NOTE[DIFF] What "Lite" leaves out is not published; here it is the attention of `nary-dis`, as in the
    public implementations, which pool the digits and concatenate the bases.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> nary = NaryDisLite(TrainingStatistics.from_arrays(np.array([[0.0], [51.0]])), 0, 4)
    >>> [len(table.weight) for table in nary.tables]  # 6 binary digits, 2 digits to the base 9
    [12, 18]
    """

    source = Source(
        citation=NARY_SOURCE,
        basis="public implementations that pool the digits; the integer code is ours",
        hazards="Neighbouring values can share no digit. A standardised column is coded to four decimal places.",
        fidelity=0.45,
        legitimacy=0.8,
        statistics=("range", "decimal places"),
    )

    def __init__(
        self,
        statistics: TrainingStatistics,
        n_categories: int,
        embedding_dim: int,
        *,
        bases: Sequence[int] = (2, 9),
    ) -> None:
        if embedding_dim % max(len(bases), 1):
            raise UsageError(f"the bases must share embedding_dim evenly; got {bases=} and {embedding_dim=}")
        super().__init__(statistics, n_categories, embedding_dim, bases, embedding_dim // max(len(bases), 1))

    def embed(self, values: Tensor) -> Tensor:
        codes = self.integer_code(values)
        pooled = []
        for table in self.tables:
            vectors = table.vectors()
            pooled.append(torch.einsum("bns,nsw->bnw", table(codes).to(vectors.dtype), vectors))
        return torch.cat(pooled, dim=-1)


@encoders.register("nary-dis")
class NaryDis(NaryEncoder):
    """Attention pools the digits of each base (intra-ary), then the bases (inter-ary).

    `a_nk = softmax_k(q_in · tanh(A_i t_nk + a_i))`, `v_n = Σ_k a_nk t_nk` with `t_nk = T_in[k, δ_k]`;
    `β_n = softmax_n(r_i · tanh(D_i v_n + g_i))`, `e_i = Σ_n β_n v_n`.

    NOTE[DIFF] The formulas of the NaryDis paper were not available; the two attentions are known by name.
    Both are additive here, per field, and trained by the task alone. Codes and bases are those of
    `nary-dis-lite`.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> nary = NaryDis(TrainingStatistics.from_arrays(np.array([[0.0], [51.0]])), 0, 4)
    >>> [weights.shape for weights in nary.digit_weights(torch.tensor([[7.0]]).double())]
    [torch.Size([1, 1, 12]), torch.Size([1, 1, 18])]
    """

    source = Source(
        citation=NARY_SOURCE,
        basis="reconstruction from the names of its two attentions; the integer code is ours",
        hazards="Neighbouring values can share no digit. A standardised column is coded to four decimal places.",
        fidelity=0.3,
        legitimacy=0.6,
        statistics=("range", "decimal places"),
    )

    def __init__(
        self,
        statistics: TrainingStatistics,
        n_categories: int,
        embedding_dim: int,
        *,
        bases: Sequence[int] = (2, 9),
        attention_dim: int = 16,
    ) -> None:
        super().__init__(statistics, n_categories, embedding_dim, bases, embedding_dim)
        self.digit_attention = AdditiveScores(self.n_values, embedding_dim, attention_dim, len(bases))
        self.base_attention = AdditiveScores(self.n_values, embedding_dim, attention_dim, 1)

    def digit_weights(self, values: Tensor) -> list[Tensor]:
        """Attention over the slots of each base, `[B, N, L n]` each; it sums to 1 over the value's digits."""
        codes = self.integer_code(values)
        # A score depends on the digit's vector alone, so one per table slot serves the whole batch.
        weights = []
        for n, table in enumerate(self.tables):
            scores = self.digit_attention(table.vectors(), n)
            weights.append(torch.softmax(scores.masked_fill(~table(codes), -torch.inf), dim=-1))
        return weights

    def systems(self, values: Tensor) -> Tensor:
        """The vector `v_n` of every base, `[B, N, bases, d]`."""
        pairs = zip(self.digit_weights(values), self.tables, strict=True)
        return torch.stack([torch.einsum("bns,nsd->bnd", w, table.vectors()) for w, table in pairs], dim=2)

    def base_weights(self, systems: Tensor) -> Tensor:
        """Attention over the bases, `[B, N, bases, d]` -> `[B, N, bases]`; it sums to 1."""
        return torch.softmax(self.base_attention(systems), dim=-1)

    def embed(self, values: Tensor) -> Tensor:
        systems = self.systems(values)
        return (self.base_weights(systems).unsqueeze(-1) * systems).sum(2)


class AdditiveScores(nn.Module):
    """`q_i · tanh(A_i t + a_i)` for vectors `t` of field i, with one of several queries `q_i`.

    *Shape*: vectors `[..., N, S, d]` -> scores `[..., N, S]`.
    """

    def __init__(self, n_values: int, embedding_dim: int, attention_dim: int, queries: int) -> None:
        super().__init__()
        bound = (6 / (embedding_dim + attention_dim)) ** 0.5
        weight = torch.empty(n_values, embedding_dim, attention_dim).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(n_values, attention_dim))
        self.query = nn.Parameter(torch.randn(queries, n_values, attention_dim) * attention_dim**-0.5)

    def forward(self, vectors: Tensor, query: int = 0) -> Tensor:
        hidden = torch.tanh(torch.einsum("...nsd,ndh->...nsh", vectors, self.weight) + self.bias.unsqueeze(1))
        return (hidden * self.query[query].unsqueeze(1)).sum(-1)
