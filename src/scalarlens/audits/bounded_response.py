"""Whether the states of the response stay within one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scalarlens.audits.base import Audit, Finding, audits
from scalarlens.audits.subject import Subject, largest_change

#: a state this near to its bound hardly learns any more
SATURATED = 0.999
#: the share of such states from which on a warning is due
MANY_SATURATED = 0.5
FAR = 1e12


@audits.register("bounded-response")
class BoundedResponse(Audit):
    """Every state of every step obeys `|s| <= 1`, on the rows, at the ends of the ranges and far beyond them.

    The states are those of `trace`; its tokens have to be the ones that the model uses, bit for bit.
    """

    question = "do the states of the response stay within one?"

    def examine(self, subject: Subject) -> Finding:
        encoder: Any = subject.encoder
        if not hasattr(encoder, "trace"):
            return Finding(None, f"encoder {subject.encoder_name!r} has no states")
        values, ids = subject.inputs
        on_rows = encoder.trace(values, subject.category_tokens(ids))
        beyond = _extreme_rows(subject)
        on_extremes = encoder.trace(beyond, subject.category_tokens(ids[:1].expand(len(beyond), -1)))
        sizes = {"largest_state": _largest(on_rows.states), "largest_state_beyond": _largest(on_extremes.states)}
        saturated = float((on_rows.states.abs() > SATURATED).double().mean())
        gap = largest_change(encoder(values, subject.category_tokens(ids)), on_rows.tokens)
        figures = {**sizes, "saturated_share": saturated, "trace_gap": gap}
        warnings = (f"{saturated:.0%} of the states are saturated",) if saturated > MANY_SATURATED else ()
        if gap:
            return Finding(False, "`trace` does not show what the model computes", figures, warnings)
        bounded = all(size <= 1.0 for size in sizes.values())
        return Finding(bounded, "" if bounded else "a state left [-1, 1] or is not a number", figures, warnings)


def _extreme_rows(subject: Subject) -> Tensor:
    """All columns at the ends of their ranges, far beyond them, and missing."""
    statistics = subject.artifact.tensorizer.encoder_statistics
    low, high = (torch.from_numpy(end) for end in (statistics.low, statistics.high))
    rows = [low, high, low - FAR, high + FAR, torch.full_like(low, torch.nan)]
    return torch.stack(rows).to(subject.device)


def _largest(states: Tensor) -> float:
    return float(states.abs().max())
