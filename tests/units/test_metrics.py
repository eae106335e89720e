"""The figures against formulas written from their definitions; every check rejects wrong versions."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from scalarlens.errors import DataError, UsageError
from scalarlens.metrics import (
    auc,
    calibration_slope,
    evaluate,
    expected_calibration_error,
    grouped_auc,
    log_loss,
    sigmoid,
)

Metric = Callable[..., float]
few_examples = settings(max_examples=60, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)


def clicks(seed: int, rows: int = 400, slope: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Labels drawn from `sigmoid(0.3 + slope * logit)`; the logits are on a grid of quarters, so many tie."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(-1.0, 1.5, rows) * 4) / 4
    return (rng.random(rows) < expit(0.3 + slope * logits)).astype(np.int64), logits


@st.composite
def scored_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, few distinct scores and few distinct groups, of up to 30 rows."""
    row = st.tuples(st.integers(0, 1), st.integers(-3, 3), st.integers(0, 3))
    columns = np.array(draw(st.lists(row, min_size=1, max_size=30))).T
    return columns[0], columns[1].astype(np.float64), columns[2]


# AUC


def auc_by_pairs(labels: np.ndarray, scores: np.ndarray) -> float:
    """Every pair compared, as an exact fraction; NaN without a pair."""
    above, below = scores[labels == 1], scores[labels == 0]
    if not len(above) or not len(below):
        return math.nan
    won = sum(Fraction(int(a > b)) + Fraction(int(a == b), 2) for a in above for b in below)
    return float(won / (len(above) * len(below)))


def check_auc_equals_pair_counting(metric: Metric) -> None:
    @few_examples
    @given(scored_rows())
    def equals(rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        labels, scores, _ = rows
        np.testing.assert_equal(metric(labels, scores), auc_by_pairs(labels, scores))

    equals()


def check_auc_equals_sklearn(metric: Metric) -> None:
    for seed in range(5):
        labels, logits = clicks(seed, rows=3000)
        assert metric(labels, logits) == pytest.approx(roc_auc_score(labels, logits), abs=1e-13)


def check_auc_is_exact_on_many_rows(metric: Metric) -> None:
    """Positives and negatives alternate, so positive number k wins k pairs: (P - 1) / (2 P) in all."""
    pairs = 150_000
    labels = np.tile([1, 0], pairs)
    assert metric(labels, np.arange(2 * pairs, dtype=np.float64)) == (pairs - 1) / (2 * pairs)


def check_auc_reverses_with_the_labels(metric: Metric) -> None:
    @few_examples
    @given(scored_rows())
    def reverses(rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        labels, scores, _ = rows
        np.testing.assert_allclose(metric(1 - labels, scores), 1 - metric(labels, scores), atol=1e-15)

    reverses()


def check_auc_knows_only_the_order(metric: Metric) -> None:
    increasing = [np.exp, np.cbrt, np.arctan, lambda s: 1e6 * s - 5.0, lambda s: s**3 + 1e-3 * s]

    @few_examples
    @given(scored_rows(), st.sampled_from(increasing))
    def same(rows: tuple[np.ndarray, np.ndarray, np.ndarray], mapped: Callable[[Any], Any]) -> None:
        labels, scores, _ = rows
        np.testing.assert_equal(metric(labels, mapped(scores)), metric(labels, scores))

    same()


def auc_without_ties(labels: np.ndarray, scores: np.ndarray) -> float:
    ranks = np.argsort(np.argsort(scores, kind="stable"), kind="stable") + 1
    ups, downs = (labels == 1).sum(), (labels == 0).sum()
    return (ranks[labels == 1].sum() - ups * (ups + 1) / 2) / (ups * downs) if ups * downs else math.nan


def auc_with_ties_won(labels: np.ndarray, scores: np.ndarray) -> float:
    above, below = scores[labels == 1], np.sort(scores[labels == 0])
    pairs = len(above) * len(below)
    return np.searchsorted(below, above, side="right").sum() / pairs if pairs else math.nan


def auc_in_float32(labels: np.ndarray, scores: np.ndarray) -> float:
    above, below = scores[labels == 1], np.sort(scores[labels == 0])
    won = np.cumsum(np.searchsorted(below, above), dtype=np.float32)[-1]
    return float(won) / (len(above) * len(below))


def auc_in_int32(labels: np.ndarray, scores: np.ndarray) -> float:
    above, below = scores[labels == 1], np.sort(scores[labels == 0])
    return np.searchsorted(below, above).sum(dtype=np.int32) / (len(above) * len(below))


def auc_of_sizes(labels: np.ndarray, scores: np.ndarray) -> float:
    """Compares rounded scores: it depends on more than their order."""
    return auc(labels, np.round(scores))


# Log loss


def check_log_loss_equals_sklearn(metric: Metric) -> None:
    for seed in range(5):
        labels, logits = clicks(seed)
        probabilities = expit(logits * 8)
        expected = sklearn_log_loss(labels, probabilities, labels=[0, 1])
        assert metric(labels, probabilities) == pytest.approx(expected, rel=1e-13)


def check_log_loss_of_saturated_models(metric: Metric) -> None:
    """The log losses that the paper prints for constant predictions; its positive rates follow from them."""
    for rate, printed_for_0, printed_for_1 in ((0.05558, 2.0033, 34.0402), (0.01582, 0.5703, 35.4732)):
        labels = np.zeros(100_000)
        labels[: round(rate * len(labels))] = 1
        assert metric(labels, np.zeros(len(labels))) == pytest.approx(printed_for_0, abs=5e-4)
        assert metric(labels, np.ones(len(labels))) == pytest.approx(printed_for_1, abs=5e-4)


def log_loss_clipped_at(floor: float) -> Metric:
    def wrong(labels: np.ndarray, probabilities: np.ndarray) -> float:
        p = np.clip(probabilities, floor, 1 - floor)
        return float(-np.where(labels == 1, np.log(p), np.log(1 - p)).mean())

    return wrong


def log_loss_in_float32(labels: np.ndarray, probabilities: np.ndarray) -> float:
    return log_loss(labels, probabilities.astype(np.float32))


def log_loss_of_positives(labels: np.ndarray, probabilities: np.ndarray) -> float:
    return log_loss(labels[labels == 1], probabilities[labels == 1])


# gAUC


def grouped_auc_by_loop(labels: np.ndarray, scores: np.ndarray, groups: np.ndarray) -> float:
    total, rows = Fraction(0), 0
    for group in set(groups.tolist()):
        inside = groups == group
        if len(set(labels[inside].tolist())) == 2:
            total += Fraction(auc_by_pairs(labels[inside], scores[inside])) * int(inside.sum())
            rows += int(inside.sum())
    return float(total / rows) if rows else math.nan


def check_grouped_auc_equals_loop(metric: Metric) -> None:
    @few_examples
    @given(scored_rows())
    def equals(rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
        np.testing.assert_allclose(metric(*rows), grouped_auc_by_loop(*rows), rtol=1e-14)

    equals()


def check_grouped_auc_equals_sklearn(metric: Metric) -> None:
    for seed in range(3):
        labels, logits = clicks(seed, rows=2000)
        groups = np.random.default_rng(seed).geometric(0.05, len(labels)) * 1000 - 7
        total = weight = 0.0
        for group in np.unique(groups):
            inside = groups == group
            if 0 < labels[inside].sum() < inside.sum():
                total += roc_auc_score(labels[inside], logits[inside]) * inside.sum()
                weight += inside.sum()
        assert metric(labels, logits, groups) == pytest.approx(total / weight, abs=1e-13)


def grouped_auc_with(weight: Callable[[np.ndarray], float], single_class: float | None = None) -> Metric:
    """A gAUC with another weight for the labels of a group, and perhaps a value for groups of one class."""

    def wrong(labels: np.ndarray, scores: np.ndarray, groups: np.ndarray) -> float:
        figures, weights = [], []
        for group in np.unique(groups):
            figure = auc(labels[groups == group], scores[groups == group])
            figure = single_class if math.isnan(figure) and single_class is not None else figure
            if not math.isnan(figure):
                figures.append(figure)
                weights.append(weight(labels[groups == group]))
        return float(np.average(figures, weights=weights)) if figures else math.nan

    return wrong


def grouped_auc_without_groups(labels: np.ndarray, scores: np.ndarray, groups: np.ndarray) -> float:
    return auc(labels, scores)


def grouped_auc_without_ties(labels: np.ndarray, scores: np.ndarray, groups: np.ndarray) -> float:
    return grouped_auc(labels, scores + 1e-9 * np.arange(len(scores)), groups)


def test_grouped_auc_takes_text_and_skips_rows_without_a_group() -> None:
    labels, scores = [0, 1, 1, 0, 1, 0], [0.1, 0.9, 0.2, 0.8, 0.3, 0.7]
    assert grouped_auc(labels, scores, ["u1", "u1", "u2", "u2", "u2", "u2"]) == pytest.approx((2 + 0 * 4) / 6)
    assert grouped_auc(labels, scores, np.array(["a", "a", "b", "b", "b", "b"], dtype=object)) == 1 / 3
    assert grouped_auc(labels, scores, [5.0, 5.0, np.nan, np.nan, np.nan, np.nan]) == 1.0
    assert math.isnan(grouped_auc(labels, scores, [np.nan] * 6))


# Calibration error


def calibration_error_by_loop(labels: np.ndarray, probabilities: np.ndarray, bins: int) -> float:
    """Each distinct probability goes to the bin of its mid-rank, one by one."""
    n = len(labels)
    members: dict[int, list[int]] = {}
    for value in np.unique(probabilities):
        middle = Fraction(2 * int((probabilities < value).sum()) + int((probabilities == value).sum()), 2)
        members.setdefault(math.floor(middle * bins / n), []).extend(np.flatnonzero(probabilities == value))
    assert all(0 <= index < bins for index in members)
    return sum(
        len(rows) / n * abs(float(probabilities[rows].mean()) - float(labels[rows].mean())) for rows in members.values()
    )


def check_calibration_error_equals_loop(metric: Metric) -> None:
    for seed, bins in ((0, 1), (1, 2), (2, 5), (3, 15), (4, 40), (5, 1000)):
        labels, logits = clicks(seed, slope=0.5)
        probabilities = expit(logits)
        expected = calibration_error_by_loop(labels, probabilities, bins)
        assert metric(labels, probabilities, bins=bins) == pytest.approx(expected, abs=1e-14)


def check_calibration_error_ignores_row_order(metric: Metric) -> None:
    """Ties are where row order could leak in: half of the rows share one probability."""
    labels = np.tile([1, 0, 0, 0], 50)
    probabilities = np.where(np.arange(200) < 100, 0.25, np.linspace(0.3, 0.9, 200))
    expected = metric(labels, probabilities, bins=10)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(200)
        assert metric(labels[order], probabilities[order], bins=10) == pytest.approx(expected, abs=1e-14)


def check_calibration_error_of_a_constant(metric: Metric) -> None:
    labels = np.tile([1, 0, 0, 0, 0], 40)
    labels[:30] = 1
    assert metric(labels, np.full(200, 0.4), bins=10) == pytest.approx(abs(0.4 - labels.mean()), abs=1e-14)


def check_calibration_error_sees_crowded_small_probabilities(metric: Metric) -> None:
    """Rates of 1 % and 3 %, each predicted as the other: off by 2 % everywhere, and right on average."""
    labels = np.zeros(2000)
    labels[:10] = labels[1000:1030] = 1
    probabilities = np.repeat([0.03, 0.01], 1000)
    assert metric(labels, probabilities, bins=10) == pytest.approx(0.02, abs=1e-14)


def calibration_error_of_bins(assign: Callable[[np.ndarray, int], np.ndarray], combine: str = "rows") -> Metric:
    """A calibration error with another rule for the bin of each row, or another way to combine the bins."""

    def wrong(labels: np.ndarray, probabilities: np.ndarray, *, bins: int) -> float:
        which = assign(probabilities, bins)
        rows = np.bincount(which)
        gaps = np.bincount(which, probabilities - labels)[rows > 0] / rows[rows > 0]
        weights = {"rows": rows[rows > 0], "bins": np.ones(len(gaps)), "signed": rows[rows > 0]}[combine]
        if combine == "signed":
            return abs(float(np.average(gaps, weights=weights)))
        return float(np.average(np.abs(gaps), weights=weights))

    return wrong


def equal_width(probabilities: np.ndarray, bins: int) -> np.ndarray:
    return np.minimum((probabilities * bins).astype(int), bins - 1)


def ranks_that_split_ties(probabilities: np.ndarray, bins: int) -> np.ndarray:
    ranks = np.argsort(np.argsort(probabilities, kind="stable"), kind="stable")
    return ranks * bins // len(probabilities)


def mid_ranks(probabilities: np.ndarray, bins: int) -> np.ndarray:
    ordered = np.sort(probabilities)
    twice = np.searchsorted(ordered, probabilities, "left") + np.searchsorted(ordered, probabilities, "right")
    return twice * bins // (2 * len(probabilities))


def lowest_ranks(probabilities: np.ndarray, bins: int) -> np.ndarray:
    return np.searchsorted(np.sort(probabilities), probabilities) * bins // len(probabilities)


# Calibration slope


def slope_by_root_finding(labels: np.ndarray, logits: np.ndarray) -> float:
    """`sum(p - y) = 0` solved for the intercept, inside `sum(z (p - y)) = 0` solved for the slope."""
    centred = logits - logits.mean()

    def intercept(slope: float) -> float:
        reach = 50 + abs(slope) * np.abs(centred).max()
        return brentq(
            lambda a: float((expit(a + slope * centred) - labels).sum()),
            -reach,
            reach,
            xtol=1e-14,
            rtol=1e-15,
        )

    def score(slope: float) -> float:
        return float((centred * (expit(intercept(slope) + slope * centred) - labels)).sum())

    return brentq(score, -20, 20, xtol=1e-14, rtol=1e-14)


def check_slope_equals_root_finding(metric: Metric) -> None:
    for seed, true_slope in ((0, 1.0), (1, 0.4), (2, 2.0), (3, 0.0), (4, -0.7)):
        labels, logits = clicks(seed, slope=true_slope)
        assert metric(labels, logits) == pytest.approx(slope_by_root_finding(labels, logits), abs=1e-11)


def check_slope_of_four_cells(metric: Metric) -> None:
    """Two logits, 2 apart, with odds 1:3 and 3:1: the slope is the difference in log odds over 2."""
    for shift in (0.0, 5.0, -30.0):
        logits = np.repeat([-1.0, 1.0], 4) + shift
        assert metric([0, 0, 0, 1, 0, 1, 1, 1], logits) == pytest.approx(math.log(3), abs=1e-12)


def check_slope_scales_inversely(metric: Metric) -> None:
    labels, logits = clicks(7)
    for factor in (0.01, 0.5, 2.0, 4.0):
        assert metric(labels, logits * factor) == pytest.approx(metric(labels, logits) / factor, rel=1e-9)


def check_slope_where_plain_newton_diverges(metric: Metric) -> None:
    labels = np.array([1, 0] + 10 * [1])
    logits = np.array([0.0, 1.0] + 10 * [30.0])
    assert metric(labels, logits) == pytest.approx(slope_by_root_finding(labels, logits), abs=1e-9)


def check_slope_is_the_same_for_copied_rows(metric: Metric) -> None:
    for seed in range(12):
        labels, logits = clicks(seed, rows=300)
        once = metric(labels, logits)
        assert metric(np.tile(labels, 40), np.tile(logits, 40)) == pytest.approx(once, rel=1e-11)


def check_slope_where_the_loss_stalls_in_rounding(metric: Metric) -> None:
    """Here the last steps change the loss by less than its last digit: it need not fall to be at its minimum."""
    for cells, negatives, positives in (
        ([-36.0, 0.0, 36.0], [3, 1, 10], [1, 2, 0]),
        ([-2.0, 0.0, 1.0], [3, 10, 3], [1, 2, 2]),
        ([-30.0, 1.0, 30.0], [10, 10, 10], [2, 2, 0]),
    ):
        logits = np.repeat(cells * 2, negatives + positives)
        labels = np.repeat([0, 1], [sum(negatives), sum(positives)])
        assert metric(labels, logits) == pytest.approx(slope_by_root_finding(labels, logits), abs=1e-11)


def check_slope_beside_a_saturated_row(metric: Metric) -> None:
    """A row at -36 leaves the slope to four cells that lie 7e-9 apart, where raw sums of squares cancel."""
    logits = np.append(np.repeat([3.0, 3.0 + 2.0**-27], 4), -36.0)
    slope = metric(np.array([0, 0, 0, 1, 0, 1, 1, 1, 0]), logits)
    assert slope == pytest.approx(2 * math.log(3) / 2.0**-27, rel=1e-7)


def check_slope_clips_saturated_logits(metric: Metric) -> None:
    labels, logits = clicks(8)
    logits[np.flatnonzero(labels == 0)[:2]] = 1e5
    clipped = np.minimum(logits, math.log(2.0**52 - 1))
    assert metric(labels, logits) == pytest.approx(slope_by_root_finding(labels, clipped), abs=1e-9)


def plain_newton(labels: Any, logits: Any, *, steps: int = 60, intercept: bool = True) -> float:
    """Newton from the same start, but without centring and without halving."""
    labels, logits = np.asarray(labels, dtype=np.float64), np.asarray(logits, dtype=np.float64)
    design = np.stack([np.full_like(logits, float(intercept)), logits])
    beta = np.array([math.log(labels.mean() / (1 - labels.mean())), 0.0])
    with np.errstate(all="ignore"):
        for _ in range(steps):
            p = expit(beta @ design)
            hessian = (design * (p * (1 - p))) @ design.T
            beta = beta - np.linalg.pinv(np.nan_to_num(hessian)) @ np.nan_to_num(design @ (p - labels))
    return float(beta[1])


def slope_without_intercept(labels: Any, logits: Any) -> float:
    return plain_newton(labels, logits, intercept=False)


def slope_after_one_step(labels: Any, logits: Any) -> float:
    return plain_newton(labels, logits, steps=1)


def slope_with_a_penalty(labels: Any, logits: Any) -> float:
    return float(LogisticRegression(C=1.0).fit(logits[:, None], labels).coef_[0, 0])


def slope_of_least_squares(labels: Any, logits: Any) -> float:
    return float(np.polyfit(logits, labels, 1)[0])


# Every check accepts the metric and rejects each wrong version of it.

CHECKS: list[tuple[Callable[[Metric], None], Metric, list[Metric]]] = [
    (check_auc_equals_pair_counting, auc, [auc_without_ties, auc_with_ties_won]),
    (check_auc_equals_sklearn, auc, [auc_without_ties, auc_with_ties_won]),
    (check_auc_is_exact_on_many_rows, auc, [auc_in_float32, auc_in_int32]),
    (check_auc_reverses_with_the_labels, auc, [auc_with_ties_won]),
    (check_auc_knows_only_the_order, auc, [auc_of_sizes]),
    (check_log_loss_equals_sklearn, log_loss, [log_loss_in_float32, log_loss_of_positives]),
    (
        check_log_loss_of_saturated_models,
        log_loss,
        [log_loss_clipped_at(1e-7), log_loss_clipped_at(1e-15), log_loss_of_positives],
    ),
    (
        check_grouped_auc_equals_loop,
        grouped_auc,
        [
            grouped_auc_with(lambda labels: 1.0),
            grouped_auc_with(np.sum),
            grouped_auc_with(len, single_class=0.5),
            grouped_auc_without_groups,
            grouped_auc_without_ties,
        ],
    ),
    (
        check_grouped_auc_equals_sklearn,
        grouped_auc,
        [grouped_auc_with(lambda labels: 1.0), grouped_auc_with(len, single_class=0.5)],
    ),
    (
        check_calibration_error_equals_loop,
        expected_calibration_error,
        [
            calibration_error_of_bins(equal_width),
            calibration_error_of_bins(ranks_that_split_ties),
            calibration_error_of_bins(lowest_ranks),
            calibration_error_of_bins(mid_ranks, combine="bins"),
            calibration_error_of_bins(mid_ranks, combine="signed"),
        ],
    ),
    (
        check_calibration_error_ignores_row_order,
        expected_calibration_error,
        [calibration_error_of_bins(ranks_that_split_ties)],
    ),
    (
        check_calibration_error_of_a_constant,
        expected_calibration_error,
        [calibration_error_of_bins(ranks_that_split_ties)],
    ),
    (
        check_calibration_error_sees_crowded_small_probabilities,
        expected_calibration_error,
        [calibration_error_of_bins(equal_width), calibration_error_of_bins(mid_ranks, combine="signed")],
    ),
    (
        check_slope_equals_root_finding,
        calibration_slope,
        [slope_without_intercept, slope_after_one_step, slope_of_least_squares],
    ),
    (
        check_slope_of_four_cells,
        calibration_slope,
        [slope_without_intercept, slope_after_one_step, slope_of_least_squares],
    ),
    (check_slope_scales_inversely, calibration_slope, [lambda y, z: calibration_slope(y, np.sign(z))]),
    (check_slope_where_plain_newton_diverges, calibration_slope, [plain_newton]),
    (check_slope_is_the_same_for_copied_rows, calibration_slope, [slope_with_a_penalty]),
    (check_slope_where_the_loss_stalls_in_rounding, calibration_slope, [slope_after_one_step]),
    (check_slope_beside_a_saturated_row, calibration_slope, [plain_newton]),
    (check_slope_clips_saturated_logits, calibration_slope, [plain_newton]),
]
MUTANTS = [
    pytest.param(check, mutant, id=f"{check.__name__}-{getattr(mutant, '__name__', '')}-{number}")
    for check, _, mutants in CHECKS
    for number, mutant in enumerate(mutants)
]


@pytest.mark.parametrize(("check", "metric"), [pytest.param(c, m, id=c.__name__) for c, m, _ in CHECKS])
def test_metric_passes(check: Callable[[Metric], None], metric: Metric) -> None:
    check(metric)


@pytest.mark.parametrize(("check", "mutant"), MUTANTS)
def test_check_rejects_mutant(check: Callable[[Metric], None], mutant: Metric) -> None:
    with pytest.raises(AssertionError):
        check(mutant)


# Undefined figures, wrong input, and all figures together


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_leaves_only_loss_and_calibration_error(label: int) -> None:
    figures = evaluate(np.full(3, label), np.zeros(3), groups=np.arange(3))
    assert figures["log_loss"] == pytest.approx(math.log(2))
    assert figures["ece"] == 0.5
    assert all(math.isnan(figures[key]) for key in ("auc", "gauc", "calibration_slope"))


@pytest.mark.parametrize("groups", [None, np.array([])])
def test_no_rows_leave_every_figure_undefined(groups: np.ndarray | None) -> None:
    figures = evaluate(np.array([]), np.array([], dtype=np.float32), groups)
    assert figures.pop("rows") == 0
    assert all(math.isnan(figure) for figure in figures.values())


@pytest.mark.parametrize("logits", [[np.nan] * 4, [0.0, 1.0, np.nan, 2.0], [np.nan, 1.0, 0.0, 2.0]])
def test_nan_predictions_never_get_a_figure(logits: list[float]) -> None:
    figures = evaluate([0, 1, 1, 0], logits, groups=[1, 1, 1, 1])
    assert figures.pop("rows") == 4
    assert all(math.isnan(figure) for figure in figures.values())


@pytest.mark.parametrize(
    ("labels", "logits"),
    [
        ([0, 1, 0, 1], [2.0, 2.0, 2.0, 2.0]),
        ([0, 0, 1, 1], [1.0, 2.0, 3.0, 4.0]),
        ([0, 0, 1, 1], [4.0, 3.0, 2.0, 1.0]),
        ([0, 1, 0, 1], [1.0, 2.0, 2.0, 3.0]),
        ([0, 1, 1, 0], [40.0, 50.0, 60.0, 70.0]),
        ([0, 1, 0, 1], [0.0, 1e-200, 2e-200, 3e-200]),
    ],
    ids=["constant", "separated", "wrongly separated", "separated but for a tie", "saturated", "one point"],
)
def test_slope_without_a_maximum_is_undefined(labels: list[int], logits: list[float]) -> None:
    assert math.isnan(calibration_slope(labels, logits))


def test_evaluate_gathers_the_single_figures() -> None:
    labels, logits = clicks(9)
    groups = np.arange(len(labels)) % 17
    figures = evaluate(labels.astype(np.float32), logits.astype(np.float32), groups)
    probabilities = expit(logits)
    assert list(figures) == ["auc", "log_loss", "gauc", "ece", "calibration_slope", "rows"]
    assert figures == {
        "auc": auc(labels, logits),
        "log_loss": pytest.approx(log_loss(labels, probabilities), rel=1e-14),
        "gauc": grouped_auc(labels, logits, groups),
        "ece": pytest.approx(expected_calibration_error(labels, probabilities), abs=1e-14),
        "calibration_slope": calibration_slope(labels, logits),
        "rows": 400,
    }
    assert [type(figure) for figure in figures.values()] == [float] * 5 + [int]
    assert math.isnan(evaluate(labels, logits)["gauc"])


def test_infinite_logits_are_saturated_predictions() -> None:
    figures = evaluate([0, 1, 1, 0], [-np.inf, np.inf, -1e30, 1e30])
    assert figures["auc"] == 0.75
    assert figures["log_loss"] == pytest.approx(-math.log(2.0**-52) / 2)
    assert figures["calibration_slope"] == pytest.approx(0.0, abs=1e-12)


def test_evaluate_ranks_logits_that_saturate_as_probabilities() -> None:
    assert evaluate([0, 1], [50.0, 60.0])["auc"] == 1.0
    assert auc([0, 1], sigmoid([50.0, 60.0])) == 0.5


def test_sigmoid_equals_scipy_and_keeps_small_probabilities() -> None:
    logits = np.array([-745.0, -700.0, -40.0, -1.0, -0.0, 0.0, 1e-9, 3.0, 36.0, 800.0], dtype=np.float32)
    np.testing.assert_allclose(sigmoid(logits), expit(logits.astype(np.float64)), rtol=4e-16, atol=5e-324)
    assert sigmoid(logits).dtype == np.float64


@pytest.mark.parametrize("labels", [[0, 2], [0, -1], [0, 0.5], [0, np.nan], ["0", "1"], [None, 1]])
@pytest.mark.parametrize(
    "metric", [auc, log_loss, expected_calibration_error, calibration_slope, evaluate, grouped_auc]
)
def test_labels_other_than_0_and_1_are_refused(metric: Metric, labels: list[Any]) -> None:
    with pytest.raises(DataError, match="labels must be"):
        metric(labels, [0.1, 0.2], *([[1, 1]] if metric is grouped_auc else []))


def test_the_error_names_the_first_wrong_row() -> None:
    with pytest.raises(DataError, match="got 3 in row 2"):
        auc([0, 1, 3, 4], [0.0, 0.0, 0.0, 0.0])
    with pytest.raises(DataError, match=r"got -2\.5 in row 1"):
        log_loss([0, 1], [0.5, -2.5])


@pytest.mark.parametrize("metric", [log_loss, expected_calibration_error])
def test_logits_are_not_taken_for_probabilities(metric: Metric) -> None:
    with pytest.raises(DataError, match="sigmoid"):
        metric([0, 1], [0.5, 1.5])


@pytest.mark.parametrize("scores", [[0.1], [[0.1], [0.2]], 0.1])
def test_scores_must_match_the_labels(scores: Any) -> None:
    with pytest.raises(DataError, match="scores must both be"):
        auc([0, 1], scores)


@pytest.mark.parametrize("groups", [[1], [[1], [2]], ["ann", None], [None, None]])
def test_groups_must_match_and_sort(groups: Any) -> None:
    with pytest.raises(DataError, match="groups must"):
        grouped_auc([0, 1], [0.1, 0.2], groups)


def test_calibration_error_needs_a_bin() -> None:
    with pytest.raises(UsageError, match="at least 1; got 0"):
        expected_calibration_error([0, 1], [0.1, 0.2], bins=0)
