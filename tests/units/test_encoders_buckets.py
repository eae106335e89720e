"""Bucket embeddings: which row a value takes, which rows exist, and what does not move them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scalarlens.encoders import build
from scalarlens.encoders.base import ValueEncoder
from scalarlens.encoders.blocks import quantile_edges
from scalarlens.encoders.buckets import BEYOND_VALUES, LogSquaredBucket, QuantileBucket
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics

RNG = np.random.default_rng(0)
#: 2049 rows: every row sits on a level of the quantile grid, so edges follow any increasing map of the column
ROWS = 2049
SMOOTH, HEAVY, TIED, CONSTANT, NARROW = range(5)
TABLE = np.stack(
    [
        RNG.normal(0, 1, ROWS),
        RNG.lognormal(0, 2, ROWS),
        np.where(RNG.random(ROWS) < 0.3, 0.0, RNG.poisson(4, ROWS)),
        np.full(ROWS, 3.0),
        1.46e7 + RNG.random(ROWS),
    ],
    axis=1,
)


def statistics_of(table: np.ndarray = TABLE) -> TrainingStatistics:
    return TrainingStatistics.from_arrays(table)


def with_parameters_of(encoder: ValueEncoder, other: ValueEncoder) -> ValueEncoder:
    """`encoder` on its own statistics, with the parameters of `other`."""
    with torch.no_grad():
        for mine, theirs in zip(encoder.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    return encoder


def tokens_of(encoder: ValueEncoder, table: np.ndarray) -> Tensor:
    with torch.no_grad():
        return encoder(torch.tensor(table))


def check_quantile_formula(encoder: QuantileBucket, buckets: int) -> None:
    tokens, start = tokens_of(encoder, TABLE), 0
    for field, column in enumerate(TABLE.T):
        edges = np.unique(np.quantile(column, np.arange(1, buckets) / buckets))
        edges = edges[edges > column.min()]
        rows = start + np.searchsorted(edges, column, side="right")
        assert torch.equal(tokens[:, field], encoder.table.weight.detach()[rows])
        start += len(edges) + 1
    assert len(encoder.table.weight) == start


class EqualGoesBelow(QuantileBucket):
    def bucket(self, values: Tensor) -> Tensor:
        return (values.unsqueeze(-1) > self.edges).sum(-1)


class EqualWidths(QuantileBucket):
    def __init__(self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        low, high = statistics.low[:, None], statistics.high[:, None]
        steps = np.arange(1, self.edges.shape[1] + 1) / (self.edges.shape[1] + 1)
        self.edges = torch.where(self.edges == BEYOND_VALUES, self.edges, torch.from_numpy(low + (high - low) * steps))


@pytest.mark.parametrize("buckets", [1, 2, 48, 100])
def test_quantile_formula(buckets: int) -> None:
    check_quantile_formula(QuantileBucket(statistics_of(), 0, 16, buckets=buckets), buckets)


def test_quantile_formula_rejects_the_wrong_side_of_an_edge() -> None:
    with pytest.raises(AssertionError):
        check_quantile_formula(EqualGoesBelow(statistics_of(), 0, 16), 48)


def test_edges_are_the_quantiles_of_the_column() -> None:
    edges = quantile_edges(statistics_of(), 48)
    expected = np.quantile(TABLE, np.arange(49) / 48, axis=0).T
    np.testing.assert_allclose(edges, expected, rtol=1e-12, atol=1e-12)


def test_a_value_on_an_edge_belongs_to_the_upper_bucket() -> None:
    encoder = QuantileBucket(statistics_of(), 0, 4)
    edge = encoder.edges[:, :1].T
    below = torch.nextafter(edge, torch.tensor(-torch.inf).double())
    real = edge < BEYOND_VALUES
    assert torch.equal(encoder.bucket(edge)[real], torch.ones(int(real.sum()), dtype=torch.int64))
    assert (encoder.bucket(below)[real] == 0).all()


def test_training_mass_of_a_bucket_is_even_up_to_ties() -> None:
    encoder = QuantileBucket(statistics_of(), 0, 4)
    buckets = encoder.bucket(torch.tensor(TABLE)).numpy()
    for field in (SMOOTH, HEAVY, TIED, NARROW):
        largest_tie = np.unique(TABLE[:, field], return_counts=True)[1].max() / ROWS
        mass = np.bincount(buckets[:, field]) / ROWS
        assert (np.abs(mass - 1 / 48) <= largest_tie + 2 / ROWS).all()
        assert (mass > 0).all()


def check_monotone_invariance(part: type[QuantileBucket], increasing: Callable[[np.ndarray], np.ndarray]) -> None:
    columns = TABLE[:, [SMOOTH, HEAVY, TIED, CONSTANT]]
    columns = columns / np.abs(columns).max(0)
    encoder = part(statistics_of(columns), 0, 16)
    mapped = with_parameters_of(part(statistics_of(increasing(columns)), 0, 16), encoder)
    assert torch.equal(tokens_of(mapped, increasing(columns)), tokens_of(encoder, columns))


@pytest.mark.parametrize("increasing", [np.exp, np.arctan, lambda x: x**3 + x, lambda x: 3.7 * x - 120.0])
def test_quantile_tokens_survive_any_increasing_map(increasing: Callable[[np.ndarray], np.ndarray]) -> None:
    check_monotone_invariance(QuantileBucket, increasing)


def test_monotone_invariance_rejects_equal_widths() -> None:
    with pytest.raises(AssertionError):
        check_monotone_invariance(EqualWidths, np.exp)


def test_constant_and_all_missing_columns_are_one_bucket() -> None:
    encoder = QuantileBucket(statistics_of(np.array([[3.0, np.nan], [3.0, np.nan]])), 0, 4)
    assert len(encoder.table.weight) == 2
    values = torch.tensor([[-1e12, -1e12], [3.0, 0.0], [1e12, 1e12]], dtype=torch.float64)
    assert (encoder.bucket(values) == 0).all()


@pytest.mark.parametrize("part", [QuantileBucket, LogSquaredBucket])
def test_state_dict_carries_the_place_of_every_row(part: type[ValueEncoder]) -> None:
    def check(part: type[ValueEncoder]) -> None:
        trained, other = part(statistics_of(), 0, 4), part(statistics_of(TABLE[:, ::-1]), 0, 4)
        other.load_state_dict(trained.state_dict())
        assert torch.equal(tokens_of(other, TABLE), tokens_of(trained, TABLE))

    class Forgetful(part):
        def __init__(self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int) -> None:
            super().__init__(statistics, n_categories, embedding_dim)
            self.table.register_buffer("offsets", self.table.offsets, persistent=False)

    check(part)
    with pytest.raises(AssertionError):
        check(Forgetful)


def squared_log(value: float, cap: int = 16) -> int:
    """The original rule on one number; log buckets follow the small ones."""
    whole = int(value)
    return cap + 2 + math.floor(math.log(whole) ** 2) if whole > 2 else max(whole, -cap) + cap


def check_log_squared_code(encoder: LogSquaredBucket, values: list[float]) -> None:
    codes = encoder.code(torch.tensor(values, dtype=torch.float64)).tolist()
    assert codes == [squared_log(value, encoder.negative_cap) for value in values]


class Floored(LogSquaredBucket):
    def code(self, values: Tensor) -> Tensor:
        return super().code(values.floor())


class SinglePrecision(LogSquaredBucket):
    def code(self, values: Tensor) -> Tensor:
        whole = values.float().trunc()
        small = whole.clamp(-self.negative_cap, 2) + self.negative_cap
        large = whole.clamp(min=3).log().square().floor()
        return torch.where(whole > 2, small + large, small).long()


def boundary_values() -> list[float]:
    """The first whole number of every log bucket, and the one before it."""
    starts = [math.ceil(math.exp(math.sqrt(k))) for k in range(2, 700)]
    return [float(v) for start in starts for v in (start - 1, start)]


def test_log_squared_codes() -> None:
    encoder = LogSquaredBucket(statistics_of(), 0, 4)
    check_log_squared_code(encoder, boundary_values())
    check_log_squared_code(encoder, [2.0, 1.0, 0.0, -1.0, -0.9, 0.3, 2.99, -15.5, -16.0, -17.0, -1e12, 1e12])
    with pytest.raises(AssertionError):
        check_log_squared_code(Floored(statistics_of(), 0, 4), [-0.9, -15.5])
    with pytest.raises(AssertionError):
        check_log_squared_code(SinglePrecision(statistics_of(), 0, 4), boundary_values())


@pytest.mark.parametrize(("value", "bucket"), [(3, 1), (4, 1), (5, 2), (100, 21), (1.46e7, 272), (23_159_456, 287)])
def test_log_squared_of_known_values(value: float, bucket: int) -> None:
    encoder = LogSquaredBucket(statistics_of(), 0, 4, negative_cap=0)
    assert encoder.code(torch.tensor([value]).double()).item() - 2 == bucket


def test_small_whole_numbers_are_buckets_of_their_own() -> None:
    encoder = LogSquaredBucket(statistics_of(np.array([[-40.0], [9.0]])), 0, 4)
    small = tokens_of(encoder, np.array([[2.0], [1.0], [0.0], [-1.0], [-15.0], [-16.0]]))
    assert len(small.unique(dim=0)) == 6
    zero = tokens_of(encoder, np.array([[0.3], [0.9], [-0.9], [0.0]]))
    assert len(zero.unique(dim=0)) == 1
    capped = tokens_of(encoder, np.array([[-16.0], [-17.0], [-1e12]]))
    assert len(capped.unique(dim=0)) == 1


@given(a=st.integers(3, 10**12), b=st.integers(3, 10**12))
@settings(max_examples=40, deadline=None)
def test_log_squared_is_monotone(a: int, b: int) -> None:
    encoder = LogSquaredBucket(statistics_of(np.zeros((2, 1))), 0, 4)
    low, high = encoder.code(torch.tensor([min(a, b), max(a, b)], dtype=torch.float64)).tolist()
    assert low <= high


def test_vocabulary_is_every_bucket_of_the_range_and_one_more() -> None:
    encoder = LogSquaredBucket(statistics_of(np.array([[-1.0, 5.0, np.nan], [100.0, 5.0, np.nan]])), 0, 4)
    sizes = [squared_log(100) - squared_log(-1) + 2, 2, 2]
    assert len(encoder.table.weight) == sum(sizes)
    weight = encoder.table.weight.detach()
    inside = tokens_of(encoder, np.array([[-1.0, 5.0, 0.0], [100.0, 5.9, 0.5]]))
    assert torch.equal(inside[:, 0], weight[[0, sizes[0] - 2]])
    assert torch.equal(inside[:, 1], weight[[sizes[0], sizes[0]]])
    outside = tokens_of(encoder, np.array([[-2.0, 4.0, 1.0], [124.0, 8.0, -1e12], [1e12, 1e12, 1e12]]))
    rows = np.cumsum(sizes) - 1
    assert torch.equal(outside, weight[rows].expand(3, 3, 4))


def test_log_squared_tokens_move_with_the_units() -> None:
    column = TABLE[:, [HEAVY]]
    encoder = LogSquaredBucket(statistics_of(column), 0, 4, negative_cap=16)
    mapped = LogSquaredBucket(statistics_of(column / 100), 0, 4)
    before = encoder.code(torch.tensor(column)) - encoder.first
    after = mapped.code(torch.tensor(column / 100)) - mapped.first
    assert (before != after).any()


@pytest.mark.parametrize("name", ["quantile-bucket", "log-squared-bucket"])
def test_tokens_are_finite_and_exports_with_a_free_batch_size(name: str) -> None:
    table = np.where(np.arange(5) == CONSTANT, np.nan, TABLE)
    encoder = build(name, statistics_of(table), 2, 4)
    values = torch.tensor(np.vstack([TABLE[:20], np.full((2, 5), [[1e12], [-1e12]]), np.full(5, np.nan)]))
    context = torch.zeros(23, 2, 4)
    assert encoder(values, context).isfinite().all()
    rows = torch.export.Dim("rows")
    program = torch.export.export(encoder, (values[:5], context[:5]), dynamic_shapes=({0: rows}, {0: rows})).module()
    for n in (0, 1, 23):
        assert torch.equal(program(values[:n], context[:n]), encoder(values[:n], context[:n]))


def test_edges_keep_float64() -> None:
    encoder = QuantileBucket(statistics_of(), 0, 4)
    exact = encoder.edges.clone()
    assert torch.equal(encoder.half().float().edges, exact)
    assert encoder.double()(torch.tensor(TABLE[:3])).dtype == torch.float64


def test_options_without_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1; got 0"):
        QuantileBucket(statistics_of(), 0, 4, buckets=0)
    with pytest.raises(UsageError, match="negative_cap must be 0 or more; got -1"):
        LogSquaredBucket(statistics_of(), 0, 4, negative_cap=-1)


def test_the_largest_numbers_stay_in_the_last_bucket() -> None:
    encoder = QuantileBucket(statistics_of(), 0, 4)
    largest = torch.tensor([[1e300], [float(np.finfo(np.float64).max)], [torch.inf]]).double().expand(3, TABLE.shape[1])
    buckets = encoder.bucket(largest)
    assert torch.equal(buckets[1], buckets[0])
    assert torch.equal(buckets[2], buckets[0])
