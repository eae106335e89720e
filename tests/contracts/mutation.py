"""Mutants: deliberately broken parts, each filed under the one check that must reject it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Check = Callable[[Callable[..., Any]], None]
Part = TypeVar("Part", bound=type)


class Mutants:
    """Broken subclasses, each with the check made for it.

    A mutant keeps the docstring of the part it breaks, or states one as `documentation`; its own docstring,
    which says what is broken, becomes `flaw`.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[type, Check]] = []

    @property
    def bases(self) -> list[type]:
        """The parts that were broken, by name."""
        return sorted({mutant.__base__ for mutant, _ in self.pairs}, key=lambda base: base.__name__)

    def breaks(self, check: Check) -> Callable[[Part], Part]:
        """Class decorator that files a mutant under the check which must reject it."""

        def file_mutant(mutant: Part) -> Part:
            assert mutant.__doc__, f"{mutant.__name__} must say what is broken"
            mutant.flaw = mutant.__doc__
            mutant.__doc__ = mutant.__dict__.get("documentation", mutant.__base__.__doc__)
            self.pairs.append((mutant, check))
            return mutant

        return file_mutant


def rejected_by(make: Callable[..., Any], checks: Iterable[Check]) -> list[str]:
    """Names of the checks that a part does not pass."""
    names = []
    for check in checks:
        try:
            check(make)
        except AssertionError:
            names.append(check.__name__)
    return names
