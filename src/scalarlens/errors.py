"""What can go wrong, as types: each says what was wanted, what came, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ScalarLensError(Exception):
    """Base of every error a user can cause; `exit_code` is what the command line returns for it."""

    exit_code = 1


class CheckFailed(ScalarLensError):
    """A check, an audit or a training run ended with a negative result."""


class UsageError(ScalarLensError):
    """An unknown name, a wrong option or a configuration that cannot be run."""

    exit_code = 2


class DataError(ScalarLensError):
    """A table that breaks its schema or its contract."""

    exit_code = 3


class ArtifactError(ScalarLensError):
    """An artifact or checkpoint that is not intact, not complete or not ours."""

    exit_code = 4


class MissingExtra(UsageError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package!r}, which is not installed; pip install 'scalarlens[{extra}]'")


def unknown_name(kind: str, name: str, known: Iterable[str], listing: str = "") -> UsageError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}."
    return UsageError(f"unknown {kind} {name!r}; {hint}{' `' + listing + '`' if listing else ''}")
