"""Every registered encoder meets every contract, and a contract alone rejects the mutants made for it."""

from __future__ import annotations

from functools import partial

import pytest

from scalarlens.encoders import build, encoders

from .encoder_checks import CHECKS, Make
from .encoder_mutants import MUTANTS
from .mutation import Check, rejected_by


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", encoders.names())
def test_registered_encoder(name: str, check: Check) -> None:
    make: Make = partial(build, name)
    check(make)


@pytest.mark.parametrize(("mutant", "check"), MUTANTS.pairs, ids=lambda part: part.__name__)
def test_mutant_is_rejected_by_its_check_alone(mutant: type, check: Check) -> None:
    assert rejected_by(mutant, CHECKS) == [check.__name__], mutant.flaw


@pytest.mark.parametrize("base", MUTANTS.bases, ids=lambda base: base.__name__)
def test_base_of_mutants_passes(base: type) -> None:
    assert rejected_by(base, CHECKS) == []


def test_every_check_has_a_mutant() -> None:
    assert set(CHECKS) == {check for _, check in MUTANTS.pairs}
