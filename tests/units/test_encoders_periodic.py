"""Periodic and PLR: their formula, their waves, and the phase of large values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from scalarlens.encoders import build
from scalarlens.encoders.periodic import Periodic, Plr
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics

RNG = np.random.default_rng(0)
#: as many columns as Criteo has numbers
THIRTEEN = np.random.default_rng(1).normal(size=(500, 13))
TABLE = np.stack([RNG.normal(0, 2, 300), RNG.lognormal(0, 3, 300), 1.46e7 + RNG.random(300)], axis=1)


def encoder_of(part: type[Periodic] = Periodic, table: np.ndarray = TABLE, **options: float) -> Periodic:
    torch.manual_seed(0)
    return part(TrainingStatistics.from_arrays(table), 0, 16, **options)


def formula(encoder: Periodic) -> np.ndarray:
    c, w, b = (p.detach().double().numpy() for p in (encoder.frequencies, encoder.linear.weight, encoder.linear.bias))
    phase = 2 * np.pi * np.mod(c * TABLE[:, :, None], 1.0)
    tokens = np.einsum("bnk,nkd->bnd", np.concatenate([np.cos(phase), np.sin(phase)], -1), w) + b
    return np.maximum(tokens, 0.0) if isinstance(encoder, Plr) else tokens


def check_formula(encoder: Periodic, tolerance: float) -> None:
    tokens = encoder(torch.tensor(TABLE)).detach().numpy()
    np.testing.assert_allclose(tokens, formula(encoder), rtol=0, atol=tolerance)


class SinglePrecisionPhase(Periodic):
    def waves(self, values: Tensor) -> Tensor:
        phase = 2 * math.pi * self.frequencies * values.to(self.frequencies.dtype).unsqueeze(-1)
        return torch.cat([phase.cos(), phase.sin()], dim=-1)


class SinesFirst(Periodic):
    def waves(self, values: Tensor) -> Tensor:
        return super().waves(values).roll(self.frequencies.shape[1], dims=-1)


@pytest.mark.parametrize("part", [Periodic, Plr])
def test_formula(part: type[Periodic]) -> None:
    check_formula(encoder_of(part), 1e-5)
    check_formula(encoder_of(part).double(), 1e-8)


@pytest.mark.parametrize("mutant", [SinglePrecisionPhase, SinesFirst])
def test_formula_rejects(mutant: type[Periodic]) -> None:
    with pytest.raises(AssertionError):
        check_formula(encoder_of(mutant), 1e-5)


def test_waves_have_the_period_of_their_frequencies() -> None:
    encoder = encoder_of()
    with torch.no_grad():
        encoder.frequencies.copy_(torch.arange(-24, 24).expand(3, -1) / 8)
    values = torch.tensor(np.arange(-75, 75).reshape(50, 3) * 53 / 1024)
    assert torch.equal(encoder(values + 8), encoder(values))
    assert not torch.equal(encoder(values + 7), encoder(values))


def test_waves_have_constant_energy() -> None:
    energy = encoder_of().waves(torch.tensor(TABLE)).square().sum(-1)
    torch.testing.assert_close(energy, torch.full((300, 3), 48.0), rtol=0, atol=1e-4)


def test_zero_has_all_cosines_and_no_sine() -> None:
    waves = encoder_of().waves(torch.zeros(1, 3).double())
    assert torch.equal(waves, torch.cat([torch.ones(1, 3, 48), torch.zeros(1, 3, 48)], -1))


def test_the_sign_of_a_value_shows_in_the_sines_only() -> None:
    encoder, values = encoder_of(), torch.tensor(TABLE)
    cosines, sines = encoder.waves(values).chunk(2, dim=-1)
    mirrored = encoder.waves(-values)
    torch.testing.assert_close(mirrored, torch.cat([cosines, -sines], -1), rtol=0, atol=1e-6)


def test_plr_is_the_positive_part_of_periodic() -> None:
    values = torch.tensor(TABLE)
    periodic, plr = encoder_of(Periodic)(values), encoder_of(Plr)(values)
    assert (plr >= 0).all()
    assert torch.equal(plr, periodic.clamp(min=0))
    assert (periodic < 0).any()


def test_frequencies_start_normal_and_cut_at_three_deviations() -> None:
    table = np.zeros((2, 200))
    start = encoder_of(table=table, frequencies=500, frequency_std=0.05).frequencies.detach()
    assert start.abs().max() <= 0.15
    assert start.abs().max() > 0.14
    assert abs(start.std().item() - 0.0493) < 5e-4


@pytest.mark.parametrize("name", ["periodic", "plr"])
def test_parameter_count(name: str) -> None:
    encoder = build(name, TrainingStatistics.from_arrays(THIRTEEN), 26)
    assert sum(p.numel() for n, p in encoder.named_parameters() if n != "missing") == 20_800


def test_tokens_move_with_the_units() -> None:
    moved = encoder_of()(torch.tensor(3.7 * TABLE - 12)) - encoder_of()(torch.tensor(TABLE))
    assert moved[:, 0].abs().max() > 1e-2


@pytest.mark.parametrize("part", [Periodic, Plr])
def test_tokens_are_finite_and_exports_with_a_free_batch_size(part: type[Periodic]) -> None:
    encoder = encoder_of(part)
    values = torch.tensor(np.vstack([TABLE[:20], np.full((1, 3), 1e12), np.full((1, 3), -1e12)]))
    context = torch.zeros(22, 2, 16)
    assert encoder(values, context).isfinite().all()
    rows = torch.export.Dim("rows")
    program = torch.export.export(encoder, (values[:5], context[:5]), dynamic_shapes=({0: rows}, {0: rows})).module()
    for n in (0, 1, 22):
        torch.testing.assert_close(program(values[:n], context[:n]), encoder(values[:n]), rtol=0, atol=1e-6)


def test_options_without_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="frequencies must be at least 1; got 0"):
        encoder_of(frequencies=0)
    with pytest.raises(UsageError, match="frequency_std must be positive; got 0"):
        encoder_of(frequency_std=0.0)
