"""What an audit is: a question, and a finding that passes, fails, or does not apply."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from scalarlens.audits.subject import Subject
from scalarlens.registry import Registry


@dataclass(frozen=True)
class Finding:
    """What an audit found. `passed` is None where nothing was judged, and then `reason` says why.

    >>> Finding(None, "the encoder promises no coordinate").passed is None
    True
    """

    passed: bool | None
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """One audit with its finding."""

    name: str
    question: str
    finding: Finding

    def to_tables(self) -> dict[str, Any]:
        """The report for JSON; a figure that is not defined is null."""
        found = self.finding
        return {
            "name": self.name,
            "question": self.question,
            "passed": found.passed,
            "reason": found.reason,
            "figures": _without_nan(found.figures),
            "warnings": list(found.warnings),
        }

    def __str__(self) -> str:
        verdict = {True: "passed", False: "FAILED", None: "not judged"}[self.finding.passed]
        lines = [f"{verdict:10}  {self.name}: {self.question}"]
        if self.finding.reason:
            lines.append(f"            {self.finding.reason}")
        plain = {key: value for key, value in self.finding.figures.items() if not isinstance(value, dict | list)}
        if plain:
            lines.append("            " + ", ".join(f"{_words(key)} {_number(value)}" for key, value in plain.items()))
        lines += [f"            warning: {warning}" for warning in self.finding.warnings]
        return "\n".join(lines)


class Audit:
    """One question; a subclass answers it for whatever artifact it is put to."""

    question: ClassVar[str]

    def examine(self, subject: Subject) -> Finding:
        """The finding on one artifact and some rows; never changes either."""
        raise NotImplementedError


audits: Registry[type[Audit]] = Registry("audit", __package__)


@torch.no_grad()
def run_audits(subject: Subject, names: Iterable[str] = ()) -> list[Report]:
    """The reports of the audits named, or of all."""
    chosen = [(name, audits.get(name)) for name in names] or list(audits)
    return [Report(name, part.question, part().examine(subject)) for name, part in chosen]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _words(key: str) -> str:
    return key.replace("_", " ")


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "not defined" if value is None else str(value)
