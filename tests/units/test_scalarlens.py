"""The method against an independent float64 formula written from the paper's equations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalarlens.encoders import build
from scalarlens.encoders.scalarlens import ScalarLens
from scalarlens.table.statistics import TrainingStatistics

ROWS, N, C, D = 400, 5, 3, 16
AMPLITUDE = 0.2
RANGES = {
    "wide": lambda u: u * 1.46e7,
    "negative": lambda u: -3 + u * 257678,
    "narrow": lambda u: 1.46e7 + u,
    "constant": lambda u: np.full_like(u, 42.0),
    "missing": lambda u: np.full_like(u, np.nan),
}


def training_values(seed: int = 0) -> np.ndarray:
    """One column per range, with both ends attained; heavy-tailed where the range is wide."""
    u = np.random.default_rng(seed).random((ROWS, N)) ** np.array([3, 3, 1, 1, 1])
    u[0], u[1] = 0.0, 1.0
    return np.stack([place(u[:, i]) for i, place in enumerate(RANGES.values())], axis=1)


def probe_values(seed: int = 1) -> np.ndarray:
    """Rows inside, at and beyond the ranges, with missing cells."""
    rng = np.random.default_rng(seed)
    values = training_values(seed)[:60]
    values[10:15] = [[-1e12, -1e12, -1e12, 41.0, np.nan]] * 5
    values[15:20] = [[1e12, 1e12, 1e12, 43.0, 7.0]] * 5
    values[rng.random(values.shape) < 0.05] = np.nan
    return values


def randomised(encoder: ScalarLens, seed: int = 3) -> ScalarLens:
    """An encoder whose every parameter has left its start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += AMPLITUDE * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
                parameter
            )
    return encoder


def make(dtype: torch.dtype = torch.float64, **options: object) -> ScalarLens:
    torch.manual_seed(0)
    encoder = build("scalarlens", TrainingStatistics.from_arrays(training_values()), C, D, **options)
    assert isinstance(encoder, ScalarLens)
    return randomised(encoder.to(dtype))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def unit_interval_mesh(state: dict[str, np.ndarray], values: np.ndarray, floor: float) -> np.ndarray:
    """`e^loc` by the equations for the mesh and the interpolation, on the value mapped to [0, 1]."""
    low, high = state["mesh.low"], state["mesh.high"]
    span = np.where(high > low, high - low, 1.0)
    u = np.clip((values - low) / span, 0, 1)
    return interpolate(state, values, u, np.zeros_like(low), np.ones_like(low), floor)


def raw_unit_mesh(state: dict[str, np.ndarray], values: np.ndarray, floor: float) -> np.ndarray:
    """The same equations taken literally, with boundaries in raw units."""
    low, high = state["mesh.low"], state["mesh.high"]
    high = np.where(high > low, high, low + 1)
    return interpolate(state, values, np.clip(values, low, high), low, high, floor)


def interpolate(
    state: dict[str, np.ndarray], values: np.ndarray, x: np.ndarray, low: np.ndarray, high: np.ndarray, floor: float
) -> np.ndarray:
    w, nodes = state["mesh.width_logits"], state["mesh.nodes"]
    k_intervals = w.shape[1]
    p = np.exp(w - w.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    q = (p + floor) / (1 + k_intervals * floor)
    tokens = np.empty((*x.shape, nodes.shape[2]))
    for i in range(x.shape[1]):
        b = low[i] + (high[i] - low[i]) * np.concatenate([[0.0], np.cumsum(q[i])])
        b[-1] = high[i]
        for row in range(x.shape[0]):
            if np.isnan(values[row, i]):
                tokens[row, i] = state["mesh.missing"][i]
                continue
            k = min(int(np.sum(x[row, i] >= b[1:-1])), k_intervals - 1)
            a = (x[row, i] - b[k]) / (b[k + 1] - b[k])
            tokens[row, i] = (1 - a) * nodes[i, k] + a * nodes[i, k + 1]
    return tokens


def formula(
    encoder: ScalarLens, values: np.ndarray, categories: np.ndarray, mesh: Callable = unit_interval_mesh
) -> np.ndarray:
    """The whole encoder in NumPy, equation by equation."""
    state = {name: tensor.double().numpy() for name, tensor in encoder.state_dict().items()}
    e = np.concatenate([mesh(state, values, encoder.mesh.width_floor), categories], axis=1)
    e_bar = e / np.sqrt((e**2).sum(-1, keepdims=True) / e.shape[-1] + 1e-6)
    drive = np.einsum("bfd,fdm->bfm", e_bar, state["drive.weight"]) + state["drive.bias"]
    gate = np.einsum("bfd,fdm->bfm", e_bar, state["gate.weight"]) + state["gate.bias"]
    delta, g = drive.reshape(len(e), -1), gate.reshape(len(e), -1)
    s = np.tanh(delta)
    states = []
    for a_t in state["step_logits"]:
        u = (s @ state["messages.compress"]) @ state["messages.expand"]
        proposal = np.tanh(delta + g * u)
        alpha = sigmoid(a_t)
        s = (1 - alpha) * s + alpha * proposal
        states.append(s.reshape(drive.shape))
    n = values.shape[1]
    z = np.concatenate([e_bar[:, :n], gate[:, :n], *(s[:, :n] for s in states)], axis=-1)
    hidden = np.einsum("bnz,nzh->bnh", z, state["readout.hidden.weight"]) + state["readout.hidden.bias"]
    hidden = hidden * sigmoid(hidden)
    out = np.einsum("bnh,nhd->bnd", hidden, state["readout.output.weight"]) + state["readout.output.bias"]
    return out * np.exp(state["readout.gain_logits"])[:, None]


def worst(found: torch.Tensor, wanted: np.ndarray) -> float:
    """The largest difference relative to max(1, |token|)."""
    return float(np.max(np.abs(found.double().detach().numpy() - wanted) / np.maximum(1, np.abs(wanted))))


def batch(dtype: torch.dtype = torch.float64, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    categories = np.random.default_rng(seed).normal(size=(60, C, D)).astype(np.float32)
    return torch.from_numpy(probe_values()), torch.from_numpy(categories).to(dtype)


@pytest.mark.parametrize("start", ["quantile", "uniform", "blend"])
def test_float64_equals_the_formula(start: str) -> None:
    encoder, (values, categories) = make(mesh_start=start), batch()
    assert worst(encoder(values, categories), formula(encoder, values.numpy(), categories.numpy())) < 1e-12


def test_float32_equals_the_formula() -> None:
    encoder, (values, categories) = make(torch.float32), batch(torch.float32)
    wanted = formula(encoder, values.numpy(), categories.double().numpy())
    assert worst(encoder(values, categories), wanted) < 1e-5


def test_literal_raw_units_agree() -> None:
    encoder, (values, categories) = make(), batch()
    wanted = formula(encoder, values.numpy(), categories.numpy(), mesh=raw_unit_mesh)
    assert worst(encoder(values, categories), wanted) < 1e-6


class ForgetsTheFloor(ScalarLens):
    def coordinate(self, values: torch.Tensor) -> torch.Tensor:
        self.mesh.width_floor = 0.01
        return super().coordinate(values)


class SkipsTheDrive(ScalarLens):
    def respond(self, drive: torch.Tensor, gate: torch.Tensor) -> list[torch.Tensor]:
        states = [torch.tanh(drive)]
        for step in torch.sigmoid(self.step_logits):
            states.append(torch.lerp(states[-1], torch.tanh(gate * self.message(states[-1])), step))
        return states


class SwapsGateAndDrive(ScalarLens):
    def force(self, normalized: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        drive, gate = super().force(normalized)
        return gate, drive


class CentresTheNorm(ScalarLens):
    def normalize(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().normalize(tokens - tokens.mean(-1, keepdim=True))


class ReadsTheFirstState(ScalarLens):
    def read(self, normalized: torch.Tensor, gate: torch.Tensor, states: list[torch.Tensor]) -> torch.Tensor:
        return super().read(normalized, gate, [states[1], *states[:-1]])


@pytest.mark.parametrize(
    "mutant", [ForgetsTheFloor, SkipsTheDrive, SwapsGateAndDrive, CentresTheNorm, ReadsTheFirstState]
)
def test_the_formula_rejects_a_broken_encoder(mutant: type[ScalarLens]) -> None:
    torch.manual_seed(0)
    broken = randomised(mutant(TrainingStatistics.from_arrays(training_values()), C, D).double())
    sound = make()
    broken.load_state_dict(sound.state_dict())
    values, categories = batch()
    wanted = formula(sound, values.numpy(), categories.numpy())
    assert worst(sound(values, categories), wanted) < 1e-12
    assert worst(broken(values, categories), wanted) > 1e-4


def test_the_coordinate_is_bit_identical_in_any_context() -> None:
    encoder, (values, categories) = make(torch.float32), batch(torch.float32)
    alone = encoder.coordinate(values)
    for other in (categories * 100, categories.flip(0), torch.zeros_like(categories)):
        assert encoder.trace(values, other).coordinate.equal(alone)
    for i in range(N):
        swapped = values.flip(0).clone()
        swapped[:, i] = values[:, i]
        assert encoder.trace(swapped, categories).coordinate[:, i].equal(alone[:, i])
    assert not encoder(values, categories * 100).equal(encoder(values, categories))


@settings(max_examples=25, deadline=None)
@given(scale=st.floats(1e-3, 1e6), seed=st.integers(0, 1000))
def test_states_stay_in_the_unit_cube_for_any_parameters(scale: float, seed: int) -> None:
    encoder = make(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    values, categories = batch(torch.float32, seed)
    states = encoder.trace(values, categories).states
    assert states.abs().max() <= 1.0


def test_an_unbounded_step_leaves_the_unit_cube() -> None:
    class Unbounded(ScalarLens):
        def respond(self, drive: torch.Tensor, gate: torch.Tensor) -> list[torch.Tensor]:
            states = super().respond(drive, gate)
            return [*states[:-1], drive + gate * self.message(states[-1])]

    encoder = randomised(Unbounded(TrainingStatistics.from_arrays(training_values()), C, D))
    values, categories = batch(torch.float32)
    assert encoder.trace(values, categories).states.abs().max() > 1.0


@settings(max_examples=20, deadline=None)
@given(a=st.floats(1e-3, 1e3), b=st.floats(-1e4, 1e4))
def test_a_change_of_unit_changes_nothing(a: float, b: float) -> None:
    """x -> a x + b with the range refitted: the same tokens, where the new unit still resolves the values."""
    values = np.random.default_rng(2).lognormal(2, 2, size=(300, 3))
    categories = torch.randn(50, C, D, generator=torch.Generator().manual_seed(1))
    tokens = []
    for column in (values, a * values + b):
        torch.manual_seed(0)
        encoder = build("scalarlens", TrainingStatistics.from_arrays(column), C, D)
        tokens.append(encoder(torch.from_numpy(column[:50]), categories).detach())
    assert (tokens[0] - tokens[1]).abs().max() < 1e-5


def test_the_state_dict_is_as_documented() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}
    fields, width = N + C, (N + C) * 8
    assert shapes == {
        "mesh.low": (N,),
        "mesh.high": (N,),
        "mesh.width_logits": (N, 16),
        "mesh.nodes": (N, 17, D),
        "mesh.missing": (N, D),
        "drive.weight": (fields, D, 8),
        "drive.bias": (fields, 8),
        "gate.weight": (fields, D, 8),
        "gate.bias": (fields, 8),
        "messages.compress": (width, 16),
        "messages.expand": (16, width),
        "step_logits": (3,),
        "readout.hidden.weight": (N, D + 8 + 24, 32),
        "readout.hidden.bias": (N, 32),
        "readout.output.weight": (N, 32, D),
        "readout.output.bias": (N, D),
        "readout.gain_logits": (N,),
    }


@pytest.mark.parametrize(("n", "c", "count"), [(23, 51, 93_930), (6, 25, 30_681), (13, 26, 51_600)])
def test_parameters_are_counted_as_published(n: int, c: int, count: int) -> None:
    statistics = TrainingStatistics.from_arrays(np.random.default_rng(0).random((50, n)))
    encoder = build("scalarlens", statistics, c, D)
    assert sum(p.numel() for p in encoder.parameters()) - n * D == count
