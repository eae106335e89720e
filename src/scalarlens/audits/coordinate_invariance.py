"""Whether the coordinate of a value stays where it is in any context."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scalarlens.audits.base import Audit, Finding, audits
from scalarlens.audits.subject import Subject, largest_change

SWAP_SEED = 0


@audits.register("coordinate-invariance")
class CoordinateInvariance(Audit):
    """Each row gets the categories, the other numbers, or both, of another row: `c_i(x_i; x_-i, z) = c_i(x_i)`.

    Passes if no bit of any coordinate changes. The change of the tokens is reported beside it: it is the response.
    """

    question = "does a value keep its coordinate when the row around it changes?"

    def examine(self, subject: Subject) -> Finding:
        if not subject.encoder.promises_coordinate:
            return Finding(None, f"encoder {subject.encoder_name!r} promises no coordinate")
        values, ids = subject.inputs
        order = subject.shuffled(SWAP_SEED)
        other_values, other_ids = values[order], ids[order]
        numbers_differ = values.shape[1] > 1 and not _same(values, other_values)
        categories_differ = not torch.equal(ids, other_ids)
        if not values.shape[1] or not (numbers_differ or categories_differ):
            return Finding(None, "nothing around a value differs between these rows")
        before = meet(subject, values, ids)
        numerical = _around_each(subject, other_values, ids)
        joint = _around_each(subject, other_values, other_ids)
        swapped = {
            "categorical_swap": meet(subject, values, other_ids) if categories_differ else None,
            "numerical_swap": numerical if numbers_differ else None,
            "joint_swap": joint,
        }
        changes = {name: met and largest_change(met.coordinates, before.coordinates) for name, met in swapped.items()}
        response = (joint.tokens - before.tokens).norm() / before.tokens.norm().clamp(min=1e-30)
        moved = [name.replace("_", " ") for name, change in changes.items() if change]
        reason = f"the coordinate moved under the {' and the '.join(moved)}" if moved else ""
        return Finding(not moved, reason, {**changes, "token_change": float(response)})


class Met(NamedTuple):
    """What an encoder makes of rows: tokens `[B, N, d]`, and everything it calls coordinate, `[P, B, N, d]`."""

    tokens: Tensor
    coordinates: Tensor


def meet(subject: Subject, values: Tensor, ids: Tensor) -> Met:
    """Tokens, and coordinates right after the encoder has met this context: it may remember it."""
    encoder: Any = subject.encoder
    category_tokens = subject.category_tokens(ids)
    if not hasattr(encoder, "trace"):
        tokens = encoder(values, category_tokens)
        return Met(tokens, torch.stack([encoder.coordinate(values)]))
    trace = encoder.trace(values, category_tokens)
    return Met(trace.tokens, torch.stack([trace.coordinate, encoder.coordinate(values)]))


def _around_each(subject: Subject, other_values: Tensor, other_ids: Tensor) -> Met:
    """Each field with the other columns, and the categories, of another row around it."""
    values, _ = subject.inputs
    tokens, coordinates = [], []
    for field in range(values.shape[1]):
        focal = torch.arange(values.shape[1], device=values.device) == field
        met = meet(subject, torch.where(focal, values, other_values), other_ids)
        tokens.append(met.tokens[:, field])
        coordinates.append(met.coordinates[:, :, field])
    return Met(torch.stack(tokens, 1), torch.stack(coordinates, 2))


def _same(values: Tensor, others: Tensor) -> bool:
    return bool(((values == others) | (values.isnan() & others.isnan())).all())
