"""Whether a score depends on the rows that are scored beside it."""

from __future__ import annotations

import numpy as np

from scalarlens import metrics
from scalarlens.artifact import SCORING_BATCH
from scalarlens.audits.base import Audit, Finding, audits
from scalarlens.audits.subject import Subject, largest_gap, scored_in

BATCH_SIZES = (1, 7, 256, 1000)
#: rows that are scored in each of those sizes
ROWS = 512
#: of a probability
TOLERANCE = 1e-6


@audits.register("batch-invariance")
class BatchInvariance(Audit):
    """`p(row | batch)` is the same within 1e-6 in other sizes and other company, and the same bits when repeated.

    A sum over a row is taken in another order where a batch has another shape, so other sizes may round differently.
    """

    question = "does a row score the same in batches of other sizes?"

    def examine(self, subject: Subject) -> Finding:
        logits = scored_in(subject)
        expected = metrics.sigmoid(logits)
        repeats = np.array_equal(scored_in(subject), logits, equal_nan=True)
        few = np.arange(min(ROWS, len(expected)))
        changes = {f"batches_of_{size}": _change(scored_in(subject, size, few), expected[few]) for size in BATCH_SIZES}
        order = subject.shuffled(1).cpu().numpy()
        changes["other_company"] = _change(scored_in(subject, SCORING_BATCH, order), expected[order])
        off = [name for name, change in changes.items() if change > TOLERANCE]
        failures = [f"scores moved in {', '.join(off).replace('_', ' ')}"] * bool(off)
        failures += ["the same batch scored twice gives other bits"] * (not repeats)
        return Finding(not failures, " and ".join(failures), {**changes, "repeats_exactly": repeats})


def _change(logits: np.ndarray, expected: np.ndarray) -> float:
    return largest_gap(metrics.sigmoid(logits), expected)
