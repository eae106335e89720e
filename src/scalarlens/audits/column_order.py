"""Whether the order of columns matters to whoever hands in rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from scalarlens.audits.base import Audit, Finding, audits
from scalarlens.audits.subject import Subject, largest_gap
from scalarlens.errors import ScalarLensError

ORDERS = 3
#: rows that are handed in as a table, and as dicts
ROWS, DICTS = 2048, 256


@audits.register("column-order")
class ColumnOrder(Audit):
    """Rows with their columns permuted, and with a column that the model does not know, score the same bits."""

    question = "do rows score the same with their columns in another order?"

    def examine(self, subject: Subject) -> Finding:
        try:
            worst = _largest_change(subject)
        except ScalarLensError as error:
            return Finding(False, f"rows are refused with their columns in another order: {error}")
        reason = "scores follow the order of columns" if worst else ""
        return Finding(not worst, reason, {"largest_change": worst})


def _largest_change(subject: Subject) -> float:
    rows, artifact = subject.rows.slice(0, ROWS), subject.artifact
    names, few = rows.column_names, rows.slice(0, DICTS)
    expected, expected_few = artifact.logits(rows), artifact.logits(few)
    worst = 0.0
    for order in _orders(len(names)):
        permuted = rows.select([names[place] for place in order])
        foreign = permuted.add_column(0, _unused(names), pa.array(np.arange(rows.num_rows)))
        dicts = permuted.slice(0, DICTS).to_pylist()
        scored = [(permuted, expected), (foreign, expected), (dicts, expected_few)]
        worst = max(worst, *(largest_gap(artifact.logits(given), wanted) for given, wanted in scored))
    return worst


def _orders(columns: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.arange(columns)[::-1], *(rng.permutation(columns) for _ in range(ORDERS - 1))]


def _unused(names: list[str]) -> str:
    name = "not a feature"
    while name in names:
        name += "_"
    return name
