"""How good predictions are: ranking, likelihood and calibration, in float64.

A figure that is undefined is NaN, without a warning: no rows, one class only where two are needed, or a
prediction that is itself NaN, as a diverged model gives. Labels other than 0 and 1 are an error.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from scalarlens.errors import DataError, UsageError

#: Probabilities are kept this far from 0 and 1 before a logarithm: the spacing of float64 above 1.
#: NOTE[DIFF] The paper does not state its clipping. The two log losses that it prints for saturated models,
#: 2.0033 and 34.0402 on one set of labels, add up to the negative logarithm of this number.
PROBABILITY_FLOOR = 2.220446049250313e-16
#: the logit of the largest probability that clipping leaves
LOGIT_LIMIT = math.log1p(-PROBABILITY_FLOOR) - math.log(PROBABILITY_FLOOR)


def evaluate(labels: ArrayLike, logits: ArrayLike, groups: ArrayLike | None = None) -> dict[str, float | int]:
    """Every figure of this module for one set of predictions; `gauc` is NaN without groups.

    NOTE[DIFF] The paper does not say whether its AUC ranks logits or probabilities. Logits are ranked here:
    the probabilities of a saturated model round to 0 and 1, which ties rows that the model keeps apart.

    *Shape*: labels, logits and groups `[rows]`.

    >>> figures = evaluate([0, 1, 0, 1], [-2.0, -1.0, 0.0, 2.0], groups=[7, 7, 8, 8])
    >>> figures["auc"], figures["gauc"], figures["rows"]
    (0.75, 1.0, 4)
    >>> evaluate([], [])["auc"]
    nan
    """
    positive, logits = _checked(labels, logits, "logits")
    probabilities = sigmoid(logits)
    return {
        "auc": auc(positive, logits),
        "log_loss": log_loss(positive, probabilities),
        "gauc": math.nan if groups is None else grouped_auc(positive, logits, groups),
        "ece": expected_calibration_error(positive, probabilities),
        "calibration_slope": calibration_slope(positive, logits),
        "rows": len(positive),
    }


def sigmoid(logits: ArrayLike) -> np.ndarray:
    """`1 / (1 + exp(-z))` in float64; no logit overflows, and small probabilities keep their precision.

    *Shape*: any; the result has the same.

    >>> sigmoid([-1000.0, 0.0, 1000.0]).tolist()
    [0.0, 0.5, 1.0]
    """
    logits = np.asarray(logits, dtype=np.float64)
    decay = np.exp(-np.abs(logits))
    return np.where(logits < 0, decay, 1.0) / (1.0 + decay)


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """The share of (positive, negative) pairs that the scores put in order, a tie counting one half.

    `AUC = (#{s+ > s-} + #{s+ = s-} / 2) / (P N)`, which is AUC with mid-ranks. The pairs are counted in
    integers, so the result is the exact fraction, rounded once.

    *Shape*: labels and scores `[rows]`.

    >>> auc([0, 1, 0, 1], [0.1, 0.4, 0.4, 0.8])
    0.875
    """
    positive, scores = _checked(labels, scores, "scores")
    above, below = np.sort(scores[positive]), np.sort(scores[~positive])
    # A NaN sorts last.
    if not len(above) or not len(below) or np.isnan(above[-1]) or np.isnan(below[-1]):
        return math.nan
    won = int(np.searchsorted(below, above, side="left").sum(dtype=np.int64))
    won_or_tied = int(np.searchsorted(below, above, side="right").sum(dtype=np.int64))
    return (won + won_or_tied) / (2 * len(above) * len(below))


def log_loss(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """The mean of `-log p` over positives and `-log(1 - p)` over negatives, with clipped probabilities.

    *Shape*: labels and probabilities `[rows]`.

    >>> round(log_loss([0, 1], [0.5, 0.25]), 4)
    1.0397
    >>> round(log_loss([1], [0.0]), 4)
    36.0437
    """
    positive, probabilities = _checked_probabilities(labels, probabilities)
    if not len(positive):
        return math.nan
    clipped = np.clip(probabilities, PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
    return -float(np.log(np.where(positive, clipped, 1.0 - clipped)).mean())


def grouped_auc(labels: ArrayLike, scores: ArrayLike, groups: ArrayLike) -> float:
    """gAUC: the mean AUC of the groups, weighted by their rows, over the groups that hold both classes.

    Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018. A row whose group is NaN
    belongs to no group.

    *Shape*: labels, scores and groups `[rows]`.

    >>> grouped_auc([0, 1, 0, 1, 1], [0.1, 0.2, 0.9, 0.8, 0.5], ["ann", "ann", "bob", "bob", "cy"])
    0.5
    """
    positive, scores = _checked(labels, scores, "scores")
    groups = np.asarray(groups)
    if groups.shape != positive.shape:
        raise DataError(f"groups must hold one entry per label; got {groups.shape} for {len(positive)} labels")
    if not len(positive) or np.isnan(scores).any():
        return math.nan
    try:
        order = np.lexsort((scores, groups))
    except TypeError as error:
        raise DataError(f"groups must be all numbers or all text; {error}; number them first") from error
    won_twice, ups, downs = _pairs_by_group(positive[order], scores[order], groups[order])
    both = (ups > 0) & (downs > 0)
    if not both.any():
        return math.nan
    rows = (ups + downs)[both]
    per_group = won_twice[both] / (2 * ups[both] * downs[both])
    return float((per_group * rows).sum() / rows.sum())


def _pairs_by_group(
    positive: np.ndarray, scores: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Twice the pairs won (ties half), positives, negatives: per group, of rows sorted by (group, score)."""
    ties = _run_starts(groups, scores)
    first_tie = np.searchsorted(ties, _run_starts(groups))
    ups = np.add.reduceat(positive, ties, dtype=np.int64)
    downs = np.diff(np.append(ties, len(positive))) - ups
    # The negatives passed are counted through all groups; those from before a group are taken off its total.
    passed = np.cumsum(downs) - downs
    won_twice, group_ups, group_downs = (
        np.add.reduceat(count, first_tie) for count in (ups * (2 * passed + downs), ups, downs)
    )
    return won_twice - 2 * group_ups * passed[first_tie], group_ups, group_downs


def expected_calibration_error(labels: ArrayLike, probabilities: ArrayLike, *, bins: int = 15) -> float:
    """The mean of `|mean p - mean y|` over bins of equal shares of the rows, weighted by their rows.

    Naeini et al., Obtaining Well Calibrated Probabilities Using Bayesian Binning, AAAI 2015, with bins by
    rank: the probabilities of a click model crowd near 0, where bins of equal width would put nearly all rows
    in one. Rows of equal probability share the bin that their mid-rank falls in, so a constant prediction is
    one bin.

    *Shape*: labels and probabilities `[rows]`.

    >>> expected_calibration_error([0, 1, 1, 1], [0.25, 0.25, 0.75, 0.75], bins=2)
    0.25
    """
    if bins < 1:
        raise UsageError(f"bins must be at least 1; got {bins}")
    positive, probabilities = _checked_probabilities(labels, probabilities)
    n = len(positive)
    if not n:
        return math.nan
    order = np.argsort(probabilities)
    positive, probabilities = positive[order], probabilities[order]
    ties = _run_starts(probabilities)
    mid_rank_twice = ties + np.append(ties[1:], n)
    first = ties[_run_starts(mid_rank_twice * bins // (2 * n))]
    return float(np.abs(np.add.reduceat(probabilities - positive, first)).sum() / n)


def calibration_slope(labels: ArrayLike, logits: ArrayLike) -> float:
    """The slope `b` of the logistic regression `P(y = 1) = sigmoid(a + b z)` of the labels on the logits `z`.

    Cox, Two Further Applications of a Model for Binary Regression, Biometrika 1958. Below 1 the model is
    overconfident, above 1 underconfident. Logits are clipped where `log_loss` clips probabilities. The slope
    is NaN where the likelihood has no maximum: a threshold separates the classes, or all logits are the same.

    *Shape*: labels and logits `[rows]`.

    >>> round(calibration_slope([0, 0, 0, 1, 0, 1, 1, 1], [-2, -2, -2, -2, 2, 2, 2, 2]), 4)  # log(3) / 2
    0.5493
    """
    positive, logits = _checked(labels, logits, "logits")
    logits = np.clip(logits.astype(np.float64), -LOGIT_LIMIT, LOGIT_LIMIT)
    if not _overlap(logits[positive], logits[~positive]):
        return math.nan
    return _logistic_slope(logits, positive)


def _overlap(above: np.ndarray, below: np.ndarray) -> bool:
    """Whether no threshold separates the classes, even with ties on it; False where there is a NaN."""
    if not len(above) or not len(below):
        return False
    return bool(above.min() < below.max() and below.min() < above.max())


#: Newton's method stops when its next step is this small: squared, in standard errors.
DECREMENT_TOLERANCE = 1e-16
#: Far more evaluations than a fit takes; a fit that needs more has no slope.
MAX_EVALUATIONS = 500


def _logistic_slope(z: np.ndarray, positive: np.ndarray) -> float:
    """The slope of a logistic regression on `z`, by Newton's method; a step is halved until it helps."""
    side = np.where(positive, -1.0, 1.0)
    rate = float(positive.mean())
    here = _newton_step(z, side, centre=0.0, height=math.log(rate) - math.log1p(-rate), slope=0.0)
    size = 1.0
    for _ in range(MAX_EVALUATIONS):
        if here.decrement <= DECREMENT_TOLERANCE:
            return here.slope + here.slope_step
        centre = here.centre + here.shift
        height = here.height + here.slope * (centre - here.centre) + size * here.height_step
        there = _newton_step(z, side, centre, height, here.slope + size * here.slope_step)
        # The last term is the rounding of the loss.
        if there.loss <= here.loss - size * here.decrement / 4 + 1e-13 * here.loss:
            here, size = there, 1.0
        else:
            size /= 2
    return math.nan


class _NewtonStep(NamedTuple):
    """A line `height + slope (z - centre)`, its loss, and the step that Newton's method takes from it."""

    centre: float
    height: float
    slope: float
    loss: float
    shift: float
    height_step: float
    slope_step: float
    decrement: float


def _newton_step(z: np.ndarray, side: np.ndarray, centre: float, height: float, slope: float) -> _NewtonStep:
    """The step is taken about the weighted mean of `z`, where height and slope do not interact.

    That keeps its precision where nearly all of `z` lies close together, beside a few saturated rows.
    """
    # A step can be absurdly long before it is halved; its loss is then infinite or NaN, and it is refused.
    with np.errstate(all="ignore"):
        offset = z - centre
        margin = side * (height + slope * offset)
        decay = np.exp(-np.abs(margin))
        loss = (np.maximum(margin, 0.0) + np.log1p(decay)).sum()
        weight = decay / np.square(1.0 + decay)
        total = weight.sum()
        shift = (weight * offset).sum() / total
        offset -= shift
        spread = (weight * offset * offset).sum()
        residual = side * np.where(margin < 0, decay, 1.0) / (1.0 + decay)
        height_step, slope_step = -residual.sum() / total, -(residual * offset).sum() / spread
        decrement = height_step * height_step * total + slope_step * slope_step * spread
    figures = (loss, shift, height_step, slope_step, decrement)
    return _NewtonStep(centre, height, slope, *map(float, figures))


def _run_starts(*sorted_keys: np.ndarray) -> np.ndarray:
    """Where a run of equal keys begins, in arrays that are sorted together."""
    starts = np.ones(len(sorted_keys[0]), dtype=bool)
    starts[1:] = False
    for key in sorted_keys:
        starts[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(starts)


def _checked(labels: ArrayLike, values: ArrayLike, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Labels as booleans, and the values beside them."""
    labels, values = np.asarray(labels), np.asarray(values)
    for array, called in ((labels, "labels"), (values, name)):
        if array.dtype.kind not in "biuf":
            raise DataError(f"{called} must be numbers; got an array of {array.dtype}")
    if labels.ndim != 1 or values.shape != labels.shape:
        raise DataError(f"labels and {name} must both be [rows]; got {labels.shape} and {values.shape}")
    positive = labels == 1
    wrong = ~positive & (labels != 0)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(f"labels must be 0 or 1; got {labels[row]} in row {row}; map the column to 0 and 1")
    return positive, values


def _checked_probabilities(labels: ArrayLike, probabilities: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Labels as booleans, probabilities as float64."""
    positive, probabilities = _checked(labels, probabilities, "probabilities")
    outside = (probabilities < 0) | (probabilities > 1)
    if outside.any():
        row = int(outside.argmax())
        got = f"{probabilities[row]} in row {row}"
        raise DataError(f"probabilities must lie in [0, 1]; got {got}; put logits through `sigmoid` first")
    return positive, probabilities.astype(np.float64)
