"""The smooth forms against float64 formulas written from their equations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scalarlens.encoders import build
from scalarlens.encoders.deer import Deer
from scalarlens.encoders.scalarlens import ScalarLens
from scalarlens.encoders.smooth import DeerSmooth, ScalarLensSmooth, smooth_curve
from scalarlens.table.statistics import TrainingStatistics

N, C, D = 3, 2, 8


def training_values(seed: int = 0) -> np.ndarray:
    """Heavy-tailed, narrow and far from zero, and with missing cells."""
    rng = np.random.default_rng(seed)
    values = np.stack([rng.lognormal(2, 2, 300), 1.46e7 + rng.random(300), rng.normal(0, 5, 300)], axis=1)
    values[rng.random(300) < 0.1, 2] = np.nan
    return values


def statistics() -> TrainingStatistics:
    return TrainingStatistics.from_arrays(training_values())


def curve_formula(draws: np.ndarray, intervals: int) -> np.ndarray:
    """`E(t) = Σ_j (a_j cos(π j t) + .3 b_j) / j` at `t = k / K`, each field over its standard deviation."""
    a, b = draws
    curve = np.zeros((a.shape[0], intervals + 1, a.shape[2]))
    for k in range(intervals + 1):
        for j in (1, 2, 3):
            curve[:, k] += (a[:, j - 1] * np.cos(np.pi * j * k / intervals) + 0.3 * b[:, j - 1]) / j
    return curve / np.array([field.std() for field in curve])[:, None, None]


def drawn(seed: int, n_fields: int, embedding_dim: int) -> np.ndarray:
    """The standard normal `a` and `b` that a curve uses at this seed."""
    torch.manual_seed(seed)
    return torch.randn(2, n_fields, 3, embedding_dim, dtype=torch.float64).numpy()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), fields=st.integers(1, 4), intervals=st.integers(1, 40), width=st.integers(2, 20))
def test_the_curve_equals_the_formula(seed: int, fields: int, intervals: int, width: int) -> None:
    wanted = curve_formula(drawn(seed, fields, width), intervals)
    torch.manual_seed(seed)
    found = smooth_curve(fields, intervals, width)
    assert found.dtype == torch.float32
    assert np.abs(found.numpy() - wanted).max() <= 1e-6
    assert np.abs(found.double().numpy().std(axis=(1, 2)) - 1).max() < 1e-6


@pytest.mark.parametrize("broken", ["sine", "no_falling_terms", "offset_of_one", "not_rescaled"])
def test_the_formula_rejects_another_curve(broken: str) -> None:
    a, b = drawn(3, 2, 8)
    torch.manual_seed(3)
    found = smooth_curve(2, 16, 8).numpy()
    t, j = np.arange(17) / 16, np.array([1, 2, 3])
    waves = np.sin(np.pi * np.outer(t, j)) if broken == "sine" else np.cos(np.pi * np.outer(t, j))
    fall = np.ones(3) if broken == "no_falling_terms" else 1 / j
    size = 1.0 if broken == "offset_of_one" else 0.3
    other = np.einsum("kj,njd,j->nkd", waves, a, fall) + size * np.einsum("njd,j->nd", b, fall)[:, None]
    if broken != "not_rescaled":
        other = other / other.std(axis=(1, 2), keepdims=True)
    assert np.abs(found - curve_formula(np.stack([a, b]), 16)).max() < 1e-6
    assert np.abs(found - other).max() > 0.05


def node_distances(nodes: np.ndarray, apart: int) -> float:
    """Mean distance of nodes that lie so many places apart, over all fields."""
    return float(np.linalg.norm(nodes[:, apart:] - nodes[:, : nodes.shape[1] - apart], axis=-1).mean())


@pytest.mark.parametrize("name", ["deer-smooth", "scalarlens-smooth"])
def test_neighbours_start_nearer_than_distant_nodes(name: str) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        nodes = build(name, statistics(), C, D).mesh.nodes.detach().numpy()
        near, farther, far = (node_distances(nodes, apart) for apart in (1, 3, 8))
        assert 2 * near < farther
        assert farther < far
    torch.manual_seed(0)
    normal = build("deer", statistics(), C, D).mesh.nodes.detach().numpy()
    assert 2 * node_distances(normal, 1) > node_distances(normal, 3)  # the test tells a curve from noise


@pytest.mark.parametrize("start", ["quantile", "uniform", "blend"])
@pytest.mark.parametrize(("name", "base"), [("deer-smooth", "deer"), ("scalarlens-smooth", "scalarlens")])
def test_only_the_start_of_the_nodes_differs_on_the_mesh(name: str, base: str, start: str) -> None:
    torch.manual_seed(4)
    smooth = build(name, statistics(), C, D, mesh_start=start)
    torch.manual_seed(4)
    plain = build(base, statistics(), C, D, mesh_start=start)
    for key, tensor in plain.mesh.state_dict().items():
        assert smooth.mesh.state_dict()[key].equal(tensor) == (key != "nodes"), key
    spread, small = (encoder.mesh.nodes.detach().numpy().std(axis=(1, 2)) for encoder in (smooth, plain))
    assert np.abs(spread - 1).max() < 1e-5
    assert small.max() < 0.02


def test_deer_smooth_computes_what_deer_computes() -> None:
    smooth, plain = DeerSmooth(statistics(), C, D), Deer(statistics(), C, D)
    plain.load_state_dict(smooth.state_dict())
    values = torch.from_numpy(training_values(1))
    assert plain(values).equal(smooth(values))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def coordinate_formula(state: dict[str, np.ndarray], values: np.ndarray, floor: float) -> np.ndarray:
    low, high, w, nodes = (state[f"mesh.{key}"] for key in ("low", "high", "width_logits", "nodes"))
    p = np.exp(w - w.max(1, keepdims=True))
    q = (p / p.sum(1, keepdims=True) + floor) / (1 + w.shape[1] * floor)
    tokens = np.empty((*values.shape, nodes.shape[2]))
    for row, i in np.ndindex(values.shape):
        if np.isnan(values[row, i]):
            tokens[row, i] = state["mesh.missing"][i]
            continue
        u = min(max((values[row, i] - low[i]) / (high[i] - low[i]), 0.0), 1.0)
        edges = np.concatenate([[0.0], np.cumsum(q[i])[:-1], [1.0]])
        k = int((u >= edges[1:-1]).sum())
        a = (u - edges[k]) / (edges[k + 1] - edges[k])
        tokens[row, i] = (1 - a) * nodes[i, k] + a * nodes[i, k + 1]
    return tokens


def affine(state: dict[str, np.ndarray], name: str, tokens: np.ndarray) -> np.ndarray:
    return np.einsum("bfa,fac->bfc", tokens, state[f"{name}.weight"]) + state[f"{name}.bias"]


def formula(encoder: ScalarLens, values: np.ndarray, categories: np.ndarray) -> np.ndarray:
    """`scalarlens-smooth` in NumPy, equation by equation."""
    state = {name: tensor.double().numpy() for name, tensor in encoder.state_dict().items()}
    e = np.concatenate([coordinate_formula(state, values, encoder.mesh.width_floor), categories], axis=1)
    e_bar = e / np.sqrt((e**2).mean(-1, keepdims=True) + 1e-6)
    hidden = affine(state, "hidden", e_bar)
    hidden = hidden * sigmoid(hidden)
    drive, gate = affine(state, "drive", hidden), affine(state, "gate", hidden)
    s, states = np.tanh(drive), []
    for logit in state["step_logits"]:
        u = (s.reshape(len(e), -1) @ state["messages.compress"]) @ state["messages.expand"]
        s = s + sigmoid(logit) * (np.tanh(drive + gate * u.reshape(s.shape)) - s)
        states.append(s)
    n = values.shape[1]
    z = affine(state, "readout.hidden", np.concatenate([t[:, :n] for t in (e_bar, gate, *states)], axis=-1))
    return affine(state, "readout.output", z * sigmoid(z)) * np.exp(state["readout.gain_logits"])[:, None]


def scrambled(encoder: ScalarLens) -> ScalarLens:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
    return encoder


def make(part: type[ScalarLens] = ScalarLensSmooth, dtype: torch.dtype = torch.float64) -> ScalarLens:
    torch.manual_seed(0)
    return scrambled(part(statistics(), C, D).to(dtype))


def rows(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    values = training_values(1)[:40]
    values[:2] = [[1e12, -1e12, np.nan], [-1e12, 1e12, 0.0]]
    categories = torch.from_numpy(np.random.default_rng(5).normal(size=(40, C, D)).astype(np.float32))
    return torch.from_numpy(values), categories.to(dtype)


def worst(found: Tensor, wanted: np.ndarray) -> float:
    return float(np.max(np.abs(found.detach().double().numpy() - wanted) / np.maximum(1, np.abs(wanted))))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_scalarlens_smooth_equals_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    encoder, (values, categories) = make(dtype=dtype), rows(dtype)
    wanted = formula(encoder, values.numpy(), categories.double().numpy())
    assert worst(encoder(values, categories), wanted) < tolerance


class ForgetsTheActivation(ScalarLensSmooth):
    def force(self, normalized: Tensor) -> tuple[Tensor, Tensor]:
        return ScalarLens.force(self, self.hidden(normalized))


class TakesAnotherActivation(ScalarLensSmooth):
    def force(self, normalized: Tensor) -> tuple[Tensor, Tensor]:
        return ScalarLens.force(self, torch.relu(self.hidden(normalized)))


class SwapsDriveAndGate(ScalarLensSmooth):
    def force(self, normalized: Tensor) -> tuple[Tensor, Tensor]:
        return super().force(normalized)[::-1]


class SharesTheFirstHead(ScalarLensSmooth):
    def force(self, normalized: Tensor) -> tuple[Tensor, Tensor]:
        return super().force(normalized[:, :1].expand_as(normalized))


@pytest.mark.parametrize(
    "mutant", [ForgetsTheActivation, TakesAnotherActivation, SwapsDriveAndGate, SharesTheFirstHead]
)
def test_the_formula_rejects_a_broken_encoder(mutant: type[ScalarLens]) -> None:
    values, categories = rows()
    wanted = formula(make(), values.numpy(), categories.numpy())
    assert worst(make(mutant)(values, categories), wanted) > 1e-3


def test_parameters_are_those_of_the_heads_more() -> None:
    made = TrainingStatistics.from_arrays(np.random.default_rng(0).random((50, 13)))
    counts = {
        name: sum(p.numel() for p in build(name, made, 26, 16).parameters())
        for name in ("deer", "deer-smooth", "scalarlens", "scalarlens-smooth")
    }
    assert counts["deer-smooth"] == counts["deer"]
    one_layer, two_layers = 2 * 8 * (16 + 1), 32 * (16 + 1) + 2 * 8 * (32 + 1)
    assert counts["scalarlens-smooth"] - counts["scalarlens"] == 39 * (two_layers - one_layer)
    assert counts["scalarlens-smooth"] == 82_800 + 13 * 16  # and one missing token per number


def test_the_paper_form_keeps_its_start() -> None:
    """What draws a curve leaves the method itself alone."""
    torch.manual_seed(0)
    encoder = ScalarLens(statistics(), C, D)
    assert not hasattr(encoder, "hidden")
    assert encoder.drive.weight.shape == (N + C, D, 8)
    assert encoder.mesh.nodes.abs().max() < 0.06
