"""Paired comparisons over cells: ranks, wins, exact tests, intervals. No table of a paper is known here.

A cell is one setting in which every method has one score. Scores count as the decimal numbers that they print as,
so that .8 - .7997 and .7 - .6997 are the same difference, which binary fractions tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from scalarlens.errors import DataError, UsageError

RESAMPLES = 10_000
BOOTSTRAP_SEED = 2026


@dataclass(frozen=True)
class Ranking:
    """How methods stand over cells, one entry per method; `shared` are the cells whose best is not one method's."""

    mean_rank: tuple[float, ...]
    rank_low: tuple[float, ...]
    rank_high: tuple[float, ...]
    wins: tuple[int, ...]
    shared: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """One method against another over paired cells; positive favours the first."""

    mean_delta: float
    ci_low: float
    ci_high: float
    wins: int
    ties: int
    losses: int
    p: float


def ranking(scores: ArrayLike, *, decimals: int | None = None) -> Ranking:
    """Mean ranks with mid-ranks for ties, the highest score first; a win is a strict best.

    With `decimals`, scores were rounded or cut to so many before: scores that agree there may have stood in either
    order, and `rank_low` and `rank_high` are the mean ranks between which the unrounded one lies.

    *Shape*: scores `[cells, methods]`.

    >>> ranking([[0.9, 0.8, 0.8], [0.7, 0.7, 0.6]]).mean_rank
    (1.25, 2.0, 2.75)
    >>> ranking([[0.9, 0.8, 0.8], [0.7, 0.7, 0.6]]).wins
    (1, 0, 0)
    """
    table = np.asarray(scores, dtype=np.float64)
    if table.ndim != 2 or 0 in table.shape or not np.isfinite(table).all():
        raise DataError(f"ranks need a finite score for every method in every cell; got shape {table.shape}")
    above = (table[:, :, None] < table[:, None, :]).sum(2)
    level = (table[:, :, None] == table[:, None, :]).sum(2)
    best_alone = (above == 0) & (level == 1)
    rounded = table if decimals is None else np.rint(table * 10**decimals)
    surely_above = (rounded[:, :, None] < rounded[:, None, :]).sum(2)
    perhaps_above = (rounded[:, :, None] <= rounded[:, None, :]).sum(2) - 1
    exact = above + (level + 1) / 2
    low, high = (exact, exact) if decimals is None else (1 + surely_above, 1 + perhaps_above)
    return Ranking(
        mean_rank=_means(exact),
        rank_low=_means(low),
        rank_high=_means(high),
        wins=tuple(best_alone.sum(0).tolist()),
        shared=tuple(np.flatnonzero(~best_alone.any(1)).tolist()),
    )


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """Two methods over the same cells: mean difference, its interval, wins, ties, losses and the Wilcoxon p.

    >>> found = compare([0.75, 0.75, 0.625], [0.5, 0.5, 0.625])
    >>> found.wins, found.ties, found.losses, found.p
    (2, 1, 0, 0.5)
    """
    if len(ours) != len(theirs) or not len(ours):
        raise DataError(f"a paired comparison needs the same cells twice; got {len(ours)} and {len(theirs)}")
    deltas = [_decimal(a) - _decimal(b) for a, b in zip(ours, theirs, strict=True)]
    low, high = bootstrap_interval([float(delta) for delta in deltas])
    return Comparison(
        float(sum(deltas, Fraction()) / len(deltas)),
        low,
        high,
        wins=sum(delta > 0 for delta in deltas),
        ties=sum(delta == 0 for delta in deltas),
        losses=sum(delta < 0 for delta in deltas),
        p=wilcoxon(deltas),
    )


def sign_test(successes: int, trials: int, *, two_sided: bool) -> float:
    """The exact p of so many successes where both outcomes are as likely: `P(X >= k)`, or twice the smaller tail.

    What a tie is, the caller decides: one that counts against a method is a trial without success.

    >>> sign_test(10, 12, two_sided=False) == 79 / 4096
    True
    """
    if not 0 <= successes <= trials:
        raise UsageError(f"successes lie between 0 and the trials; got {successes} of {trials}")
    upper = sum(math.comb(trials, k) for k in range(successes, trials + 1))
    lower = sum(math.comb(trials, k) for k in range(successes + 1))
    extreme = 2 * min(upper, lower) if two_sided else upper
    return float(min(Fraction(1), Fraction(extreme, 2**trials)))


def bootstrap_interval(
    deltas: ArrayLike, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = BOOTSTRAP_SEED
) -> tuple[float, float]:
    """The percentile interval of the mean of paired differences over resampled cells.

    Efron and Tibshirani, An Introduction to the Bootstrap, 1993.

    NOTE[DIFF] The paper gives neither the number of resamples nor the seed of its intervals.

    *Shape*: deltas `[cells]`.

    >>> bootstrap_interval([0.5, 0.5, 0.5])
    (0.5, 0.5)
    """
    found = np.asarray(deltas, dtype=np.float64)
    if found.ndim != 1 or not len(found) or not np.isfinite(found).all():
        raise DataError(f"an interval needs finite differences, one per cell; got shape {found.shape}")
    drawn = np.random.default_rng(seed).integers(len(found), size=(resamples, len(found)))
    low, high = np.quantile(found[drawn].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def wilcoxon(deltas: Sequence[float | Fraction]) -> float:
    """The two-sided p of Wilcoxon's signed-rank test, by the exact distribution over all `2^n` signs.

    `W` sums the ranks of the positive differences; `p = P(|W - E W| >= |w - E W|)`. Equal sizes share their
    mid-rank, and the distribution is that of the mid-ranks. Where all differences are zero, p is 1.

    NOTE[DIFF] The paper does not say what becomes of differences of zero: they are left out before ranking, as
    Wilcoxon did.

    >>> wilcoxon([1.0, 2.0, 3.0]) == 2 / 2**3
    True
    """
    exact = [_decimal(delta) for delta in deltas]
    signed = [delta for delta in exact if delta]
    doubled = _doubled_ranks([abs(delta) for delta in signed])
    positive = sum(rank for rank, delta in zip(doubled, signed, strict=True) if delta > 0)
    total = sum(doubled)
    counts = _subset_sums(doubled)
    beyond = sum(counts[max(positive, total - positive) :])
    return float(min(Fraction(1), Fraction(2 * beyond, 2 ** len(signed))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: `p~_(i) = max_{j <= i} min(1, (m - j + 1) p_(j))`.

    Holm, A Simple Sequentially Rejective Multiple Test Procedure, Scandinavian Journal of Statistics 1979.

    >>> holm([0.25, 0.0625, 0.5])
    [0.5, 0.1875, 0.5]
    """
    if not all(0 <= p <= 1 for p in p_values):
        raise DataError(f"p values lie in [0, 1]; got {list(p_values)}")
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for step, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - step) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _decimal(number: float | Fraction) -> Fraction:
    """The number that a score prints as."""
    if isinstance(number, Fraction):
        return number
    if not math.isfinite(number):
        raise DataError(f"scores and differences must be finite; got {number!r}")
    return Fraction(repr(float(number)))


def _doubled_ranks(sizes: Sequence[Fraction]) -> list[int]:
    """Twice the mid-rank of each size, the smallest first: `2 #{smaller} + #{equal} + 1`."""
    return [2 * sum(other < size for other in sizes) + sum(other == size for other in sizes) + 1 for size in sizes]


def _subset_sums(ranks: Sequence[int]) -> list[int]:
    """How many subsets have each sum, from 0 to that of all: the coefficients of `prod (1 + x^r)`."""
    counts = np.zeros(sum(ranks) + 1, dtype=object)
    counts[0] = 1
    for rank in ranks:
        shifted = np.zeros_like(counts)
        shifted[rank:] = counts[:-rank]
        counts = counts + shifted
    found: list[int] = counts.tolist()
    return found


def _means(ranks: np.ndarray) -> tuple[float, ...]:
    return tuple(math.fsum(column) / len(ranks) for column in ranks.T.tolist())
