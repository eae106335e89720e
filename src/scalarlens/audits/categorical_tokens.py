"""Whether the numerical encoder leaves the tokens of categories alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from scalarlens.audits.base import Audit, Finding, audits
from scalarlens.audits.subject import Subject, largest_change


@audits.register("categorical-tokens")
class CategoricalTokens(Audit):
    """The backbone gets `table[offset_j + id_j]` of each categorical field, bit for bit, whatever the numbers are."""

    question = "does the backbone get the categorical tokens as the tables hold them?"

    def examine(self, subject: Subject) -> Finding:
        values, ids = subject.inputs
        if not ids.shape[1]:
            return Finding(None, "the model has no categorical field")
        table = subject.artifact.model.categories
        wanted = table.weight[ids + table.offsets]
        others = values[subject.shuffled(0)]
        changes = {
            "change": largest_change(_received(subject, values.clone(), ids), wanted),
            "change_under_other_numbers": largest_change(_received(subject, others, ids), wanted),
        }
        touched = any(changes.values())
        return Finding(not touched, "the encoder changed them" if touched else "", changes)


def _received(subject: Subject, values: Tensor, ids: Tensor) -> Tensor:
    """What the backbone is handed as categorical tokens."""
    received: list[Tensor] = []

    def listen(_: Any, inputs: tuple[Tensor, ...]) -> None:
        received.append(inputs[1].clone())

    handle = subject.artifact.model.backbone.register_forward_pre_hook(listen)
    try:
        subject.artifact.model(values, ids)
    finally:
        handle.remove()
    return received[0]
