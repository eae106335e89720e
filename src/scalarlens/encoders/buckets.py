"""Bucket embeddings: a number picks one row of its field's table, by quantile or by squared logarithm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalarlens.encoders.base import Source, ValueEncoder, encoders, lookup_table
from scalarlens.encoders.blocks import ExactBuffers, quantile_edges
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics

#: stands where a field has fewer edges than another; finite, because a state dict is
BEYOND_VALUES = float(np.finfo(np.float64).max)
LARGEST_VALUE = float(np.nextafter(BEYOND_VALUES, 0.0))


class BucketTable(nn.Module):
    """One flat table for all fields, of which each owns as many rows as it has buckets.

    *Shape*: buckets `[B, N]` int64 -> `[B, N, d]`.
    """

    offsets: Tensor

    def __init__(self, sizes: Sequence[int], embedding_dim: int) -> None:
        super().__init__()
        ends = np.cumsum(sizes, dtype=np.int64)
        self.register_buffer("offsets", torch.from_numpy(ends - np.asarray(sizes, dtype=np.int64)))
        self.weight = nn.Parameter(lookup_table(int(sum(sizes)), embedding_dim))

    def forward(self, buckets: Tensor) -> Tensor:
        return F.embedding(buckets + self.offsets, self.weight)


@encoders.register("quantile-bucket")
class QuantileBucket(ExactBuffers, ValueEncoder):
    """A row per equal-frequency bucket: `e_i = T_i[k(x_i)]` with `k(x) = #{j : q_j <= x}`.

    A value equal to an edge belongs to the upper bucket; values beyond the training range fall in the end
    buckets.

    NOTE[DIFF] The paper gives no rule for the quantile buckets: equal edges are merged, an edge at the
    training minimum is left out because nothing in training lies below it, and there are as many buckets as
    PLE has bins.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> encoder = QuantileBucket(TrainingStatistics.from_arrays(np.arange(9.0)[:, None]), 0, 4, buckets=4)
    >>> encoder.bucket(torch.tensor([[-5.0], [1.9], [2.0], [99.0]]).double()).flatten().tolist()
    [0, 0, 1, 3]
    """

    source = Source(
        citation="equal-frequency discretisation",
        basis="definition; the number of buckets is ours",
        hazards="Values next to each other can fall into different buckets, and the order of buckets is not known to"
        " the table. Zero-inflated columns collapse to few buckets.",
        fidelity=0.5,
        legitimacy=0.95,
        statistics=("quantiles",),
    )
    edges: Tensor

    def __init__(
        self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int, *, buckets: int = 48
    ) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        inner = [np.unique(row[1:-1][row[1:-1] > row[0]]) for row in quantile_edges(statistics, buckets)]
        edges = np.full((self.n_values, max(map(len, inner), default=0)), BEYOND_VALUES)
        for padded, field_edges in zip(edges, inner, strict=True):
            padded[: len(field_edges)] = field_edges
        self.register_buffer("edges", torch.from_numpy(edges))
        self.table = BucketTable([len(field_edges) + 1 for field_edges in inner], embedding_dim)

    def bucket(self, values: Tensor) -> Tensor:
        """`k`, the bucket of each value within its field, `[B, N]`."""
        return (values.double().clamp(max=LARGEST_VALUE).unsqueeze(-1) >= self.edges).sum(-1)

    def embed(self, values: Tensor) -> Tensor:
        tokens: Tensor = self.table(self.bucket(values))
        return tokens


@encoders.register("log-squared-bucket")
class LogSquaredBucket(ValueEncoder):
    """A row per squared logarithm: `e_i = T_i[floor(ln(v)^2)]` for `v = trunc(x_i) > 2`, one per smaller `v`.

    NOTE[DIFF] The original knows the buckets that training rows fell in. An encoder sees the training range
    only, so a field's vocabulary is every bucket between those of its lowest and its highest value, and one
    row for all others. Whole numbers below the cap on negatives share a bucket; the original has no cap.

    *Shape*: values `[B, N]` float64 (NaN = missing) -> value_tokens `[B, N, d]`.

    >>> encoder = LogSquaredBucket(TrainingStatistics.from_arrays(np.array([[0.0], [500.0]])), 0, 4)
    >>> tokens = encoder(torch.tensor([[3.0], [4.0], [5.0]]).double())
    >>> torch.equal(tokens[0], tokens[1]), torch.equal(tokens[1], tokens[2])
    (True, False)
    """

    source = Source(
        citation="Juan, Zhuang and Chin, 3 Idiots' Approach for Display Advertising Challenge, 2014",
        basis="original code; the vocabulary comes from the range and the cap on negatives is ours",
        hazards="Fractions share a bucket, and so do all standardised values near zero: it is meant for counts.",
        fidelity=0.85,
        legitimacy=0.97,
        statistics=("range",),
    )
    first: Tensor
    known: Tensor

    def __init__(
        self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int, *, negative_cap: int = 16
    ) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        if negative_cap < 0:
            raise UsageError(f"negative_cap must be 0 or more; got {negative_cap}")
        self.negative_cap = negative_cap
        first, last = (self.code(torch.from_numpy(bound)) for bound in (statistics.low, statistics.high))
        self.register_buffer("first", first)
        self.register_buffer("known", last - first + 1)
        self.table = BucketTable([n + 1 for n in self.known.tolist()], embedding_dim)

    def code(self, values: Tensor) -> Tensor:
        """The buckets in the order of their values, from the cap on negatives up; same shape as `values`."""
        whole = values.double().trunc()
        small = whole.clamp(-self.negative_cap, 2) + self.negative_cap
        large = whole.clamp(min=3).log().square().floor()
        return torch.where(whole > 2, small + large, small).long()

    def embed(self, values: Tensor) -> Tensor:
        bucket = self.code(values) - self.first
        inside = (bucket >= 0) & (bucket < self.known)
        tokens: Tensor = self.table(torch.where(inside, bucket, self.known))
        return tokens
