"""Every ablation against a formula of its own and what it shares with ScalarLens; each check has mutants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from scalarlens.encoders import NumericalEncoder, build, encoders
from scalarlens.encoders.ablations import (
    CategoricalContextOnly,
    FrozenMessage,
    LocalOnly,
    NoNorm,
    NumericalContextOnly,
    OneStep,
    StopGrad,
)
from scalarlens.encoders.blocks import MeshStart
from scalarlens.encoders.deer import Deer
from scalarlens.encoders.matched import (
    ContextFilm,
    ContextModulation,
    DeerNorm,
    LocalMlp,
    MatchedAlternative,
    scalarlens_budget,
)
from scalarlens.encoders.scalarlens import Readout, ScalarLens
from scalarlens.errors import UsageError
from scalarlens.registry import options_of
from scalarlens.table.statistics import TrainingStatistics

Arrays = dict[str, np.ndarray]
Formula = Callable[[Arrays, np.ndarray, np.ndarray], np.ndarray]
Part = type[NumericalEncoder]

N_VALUES, N_CATEGORIES, DIM = 4, 3, 6
COMPONENT: dict[str, type[ScalarLens]] = {
    "numerical-context-only": NumericalContextOnly,
    "categorical-context-only": CategoricalContextOnly,
    "local-only": LocalOnly,
    "no-norm": NoNorm,
    "frozen-message": FrozenMessage,
    "stop-grad": StopGrad,
    "one-step": OneStep,
}
MATCHED: dict[str, type[MatchedAlternative]] = {
    "deer-norm": DeerNorm,
    "local-mlp": LocalMlp,
    "context-film": ContextFilm,
}
ABLATIONS: dict[str, Part] = {**COMPONENT, **MATCHED}
#: numerical and categorical fields of the paper's tables, and what its default ScalarLens has there
PAPER = {"AutoML-A": (23, 51, 93_930), "AutoML-E": (6, 25, 30_681), "Criteo": (13, 26, 51_600)}

every_ablation = pytest.mark.parametrize("name", ABLATIONS)
every_component = pytest.mark.parametrize("name", COMPONENT)
every_match = pytest.mark.parametrize("name", MATCHED)
quick = hypothesis.settings(max_examples=20, deadline=None)
shapes = st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 20))


def training_rows() -> np.ndarray:
    rng = np.random.default_rng(3)
    heavy, normal = rng.lognormal(0, 1, 300), rng.normal(5, 2, 300)
    table = np.stack([heavy, normal, rng.uniform(-1, 1, 300), rng.integers(0, 40, 300)], axis=1)
    table[rng.random(table.shape) < 0.1] = np.nan
    return table


TABLE = training_rows()
STATISTICS = TrainingStatistics.from_arrays(TABLE)


def inputs_of(rows: int = 12) -> tuple[Tensor, Tensor]:
    """Training rows with missing cells, the last two beyond every range; category tokens."""
    values = TABLE[:rows].copy()
    values[-2:] = [[-1e6], [1e6]]
    generator = torch.Generator().manual_seed(1)
    return torch.tensor(values), torch.randn(rows, N_CATEGORIES, DIM, generator=generator)


def seeded(part: Part, seed: int = 0, **options: Any) -> NumericalEncoder:
    torch.manual_seed(seed)
    return part(STATISTICS, N_CATEGORIES, DIM, **options)


def scrambled(module: nn.Module, seed: int = 5) -> nn.Module:
    """The module with noise on every parameter: nothing hides at the zero that it starts from."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return module


def copy_of(encoder: nn.Module, part: Part, **options: Any) -> NumericalEncoder:
    """Another kind of encoder with the same parameters."""
    other = seeded(part, seed=1, **options)
    other.load_state_dict(encoder.state_dict())
    return other


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.detach().numpy().tobytes() == other.detach().numpy().tobytes()


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# --- an independent formula for every ablation, in float64 ---


def np_silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def np_norm(tokens: np.ndarray) -> np.ndarray:
    return tokens / np.sqrt((tokens**2).mean(-1, keepdims=True) + 1e-6)


def np_coordinate(p: Arrays, values: np.ndarray) -> np.ndarray:
    nodes = p["mesh.nodes"]
    tokens = np.empty((len(values), len(nodes), nodes.shape[-1]))
    for i, logits in enumerate(p["mesh.width_logits"]):
        shares = np.exp(logits - logits.max())
        floored = (shares / shares.sum() + 1e-7) / (1 + len(logits) * 1e-7)
        edges = np.concatenate([[0.0], np.cumsum(floored)[:-1], [1.0]])
        place = (values[:, i] - p["mesh.low"][i]) / (p["mesh.high"][i] - p["mesh.low"][i])
        for component in range(nodes.shape[-1]):
            tokens[:, i, component] = np.interp(place, edges, nodes[i, :, component])
        tokens[np.isnan(values[:, i]), i] = p["mesh.missing"][i]
    return tokens


def np_maps(p: Arrays, prefix: str, tokens: np.ndarray) -> np.ndarray:
    weight, bias = p[f"{prefix}.weight"], p[f"{prefix}.bias"]
    return np.stack([tokens[:, f] @ weight[f] + bias[f] for f in range(tokens.shape[1])], axis=1)


def np_message(p: Arrays, state: np.ndarray, senders: range) -> np.ndarray:
    n_fields, m = state.shape[1:]
    compress = p["messages.compress"].reshape(n_fields, m, -1)
    expand = p["messages.expand"].reshape(-1, n_fields, m)
    summary = sum(state[:, f] @ compress[f] for f in senders)
    return np.stack([summary @ expand[:, f] for f in range(n_fields)], axis=1)


def np_read(p: Arrays, *features: np.ndarray) -> np.ndarray:
    n = len(p["mesh.nodes"])
    hidden = np_silu(np_maps(p, "readout.hidden", np.concatenate([f[:, :n] for f in features], axis=-1)))
    return np_maps(p, "readout.output", hidden) * np.exp(p["readout.gain_logits"])[:, None]


def np_forces(p: Arrays, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drive, gate and step sizes."""
    return np_maps(p, "drive", tokens), np_maps(p, "gate", tokens), 1 / (1 + np.exp(-p["step_logits"]))


def np_scalarlens(p: Arrays, tokens: np.ndarray, senders: range) -> np.ndarray:
    """The response to tokens that are ready for the heads, with messages from some fields only."""
    drive, gate, sizes = np_forces(p, tokens)
    state, states = np.tanh(drive), []
    for size in sizes:
        proposal = np.tanh(drive + gate * np_message(p, state, senders))
        state = (1 - size) * state + size * proposal
        states.append(state)
    return np_read(p, tokens, gate, *states)


def np_fields(p: Arrays, values: np.ndarray, categories: np.ndarray) -> np.ndarray:
    return np.concatenate([np_coordinate(p, values), categories], axis=1)


def np_numerical(p: Arrays, values: np.ndarray, categories: np.ndarray) -> np.ndarray:
    return np_scalarlens(p, np_norm(np_fields(p, values, categories)), range(N_VALUES))


def np_categorical(p: Arrays, values: np.ndarray, categories: np.ndarray) -> np.ndarray:
    tokens = np_norm(np_fields(p, values, categories))
    return np_scalarlens(p, tokens, range(N_VALUES, N_VALUES + N_CATEGORIES))


def np_local(p: Arrays, values: np.ndarray, categories: np.ndarray) -> np.ndarray:
    tokens = np_norm(np_coordinate(p, values))
    drive, gate, sizes = np_forces(p, tokens)
    return np_read(p, tokens, gate, *(np.tanh(drive) for _ in sizes))


def np_no_norm(p: Arrays, values: np.ndarray, categories: np.ndarray) -> np.ndarray:
    return np_scalarlens(p, np_fields(p, values, categories), range(N_VALUES + N_CATEGORIES))


def np_frozen(p: Arrays, values: np.ndarray, categories: np.ndarray) -> np.ndarray:
    """In closed form: what is left of the way to the one proposal shrinks by `1 - α` at every step."""
    tokens = np_norm(np_fields(p, values, categories))
    drive, gate, sizes = np_forces(p, tokens)
    start = np.tanh(drive)
    proposal = np.tanh(drive + gate * np_message(p, start, range(tokens.shape[1])))
    left = np.cumprod(1 - sizes)
    return np_read(p, tokens, gate, *(proposal + (start - proposal) * share for share in left))


def np_full(p: Arrays, values: np.ndarray, categories: np.ndarray) -> np.ndarray:
    tokens = np_norm(np_fields(p, values, categories))
    return np_scalarlens(p, tokens, range(N_VALUES + N_CATEGORIES))


def np_one_step(p: Arrays, values: np.ndarray, categories: np.ndarray) -> np.ndarray:
    tokens = np_norm(np_fields(p, values, categories))
    drive, gate, (size,) = np_forces(p, tokens)
    start = np.tanh(drive)
    end = np.tanh(drive + gate * np_message(p, start, range(tokens.shape[1])))
    return np_read(p, tokens, gate, start + size * (end - start))


def np_deer_norm(p: Arrays, values: np.ndarray, categories: np.ndarray) -> np.ndarray:
    return np_norm(np_coordinate(p, values)) * np.exp(p["readout.gain_logits"])[:, None]


def np_local_mlp(p: Arrays, values: np.ndarray, categories: np.ndarray) -> np.ndarray:
    return np_read(p, np_norm(np_coordinate(p, values)))


def np_film(p: Arrays, values: np.ndarray, categories: np.ndarray) -> np.ndarray:
    row = np_norm(categories).reshape(len(values), -1)
    context = np_silu(row @ p["readout.context_weight"] + p["readout.context_bias"])
    hidden = np_silu(np_maps(p, "readout.hidden", np.repeat(context[:, None], N_VALUES, axis=1)))
    both = np_maps(p, "readout.modulation", hidden)
    scale, shift = both[..., :DIM], both[..., DIM:]
    gain = np.exp(p["readout.gain.gain_logits"])[:, None]
    return gain * ((1 + scale) * np_norm(np_coordinate(p, values)) + shift)


FORMULAS: dict[str, Formula] = {
    "numerical-context-only": np_numerical,
    "categorical-context-only": np_categorical,
    "local-only": np_local,
    "no-norm": np_no_norm,
    "frozen-message": np_frozen,
    "stop-grad": np_full,
    "one-step": np_one_step,
    "deer-norm": np_deer_norm,
    "local-mlp": np_local_mlp,
    "context-film": np_film,
}


def check_formula(part: Part, name: str) -> None:
    encoder = scrambled(seeded(part)).double()
    values, context = inputs_of()
    actual = encoder(values, context.double()).detach().numpy()
    arrays = {key: tensor.numpy() for key, tensor in encoder.state_dict().items()}
    expected = FORMULAS[name](arrays, values.numpy(), context.double().numpy())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)


class HearsCategories(NumericalContextOnly):
    """Masks nothing."""

    def message(self, state: Tensor) -> Tensor:
        return ScalarLens.message(self, state)


class ReceiversMasked(CategoricalContextOnly):
    """Numbers hear categories only, but categories hear numbers, and pass them on at the second step."""

    def message(self, state: Tensor) -> Tensor:
        n, unmasked = self.n_values, ScalarLens.message(self, state)
        return torch.cat([super().message(state)[:, :n], unmasked[:, n:]], dim=1)


class EmptyStates(LocalOnly):
    """Zeros instead of the states that no message moved."""

    def respond(self, drive: Tensor, gate: Tensor) -> list[Tensor]:
        return [torch.zeros_like(state) for state in super().respond(drive, gate)]


class NormalizedHeads(NoNorm):
    """The norm is gone from the readout only."""

    def force(self, normalized: Tensor) -> tuple[Tensor, Tensor]:
        return super().force(ScalarLens.normalize(normalized))


class ThawedAtLast(FrozenMessage):
    """The last step computes a message of its own."""

    def respond(self, drive: Tensor, gate: Tensor) -> list[Tensor]:
        states = super().respond(drive, gate)
        proposal = torch.tanh(drive + gate * self.message(states[-2]))
        return [*states[:-1], torch.lerp(states[-2], proposal, torch.sigmoid(self.step_logits[-1]))]


class StopsForward(StopGrad):
    """What carries no gradient carries nothing."""

    def force(self, normalized: Tensor) -> tuple[Tensor, Tensor]:
        return super().force(torch.zeros_like(normalized))


class ReadsTheStart(OneStep):
    """The readout gets `s^(0)`."""

    def respond(self, drive: Tensor, gate: Tensor) -> list[Tensor]:
        return super().respond(drive, gate)[:1] * 2


class NoGain(DeerNorm):
    """The norm without the gain."""

    def read(self, normalized: Tensor, category_tokens: Tensor) -> Tensor:
        return normalized


class MissingIsTheLowest(DeerNorm):
    """A missing value gets the coordinate of the lowest one."""

    def coordinate(self, values: Tensor) -> Tensor:
        return super().coordinate(torch.where(values.isnan(), self.mesh.low, values))


class WithoutNorm(LocalMlp):
    """The head on the coordinate itself."""

    def forward(self, values: Tensor, category_tokens: Tensor) -> Tensor:
        return self.read(self.coordinate(values), category_tokens)


class RawCategories(ContextFilm):
    """Categories that were not normalised."""

    def read(self, normalized: Tensor, category_tokens: Tensor) -> Tensor:
        tokens: Tensor = self.readout(normalized, category_tokens)
        return tokens


@every_ablation
def test_equals_its_formula(name: str) -> None:
    assert encoders.get(name) is ABLATIONS[name]
    check_formula(ABLATIONS[name], name)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("numerical-context-only", HearsCategories),
        ("categorical-context-only", ReceiversMasked),
        ("local-only", EmptyStates),
        ("no-norm", NormalizedHeads),
        ("frozen-message", ThawedAtLast),
        ("stop-grad", StopsForward),
        ("one-step", ReadsTheStart),
        ("deer-norm", NoGain),
        ("deer-norm", MissingIsTheLowest),
        ("local-mlp", WithoutNorm),
        ("context-film", RawCategories),
    ],
)
def test_formula_rejects(name: str, mutant: Part) -> None:
    with pytest.raises(AssertionError):
        check_formula(mutant, name)


# --- what an ablation shares with ScalarLens ---


def check_names(part: Part, expected: set[str]) -> None:
    assert set(seeded(part).state_dict()) == expected


class GainRenamed(LocalOnly):
    """A parameter that a checkpoint of ScalarLens does not have."""

    def __init__(self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        self.gain = self.readout.gain_logits
        del self.readout.gain_logits


@every_component
def test_state_has_the_names_of_scalarlens(name: str) -> None:
    check_names(COMPONENT[name], set(seeded(ScalarLens).state_dict()))


def test_deer_norm_adds_the_gain_to_deer() -> None:
    check_names(DeerNorm, {*seeded(Deer).state_dict(), "readout.gain_logits"})
    assert count(seeded(DeerNorm)) == count(seeded(Deer)) + N_VALUES


def test_names_reject_another_parameter() -> None:
    with pytest.raises(AssertionError):
        check_names(GainRenamed, set(seeded(ScalarLens).state_dict()))


def check_start(part: Part, **options: Any) -> None:
    """Same seed, same mesh as ScalarLens; what the mesh needs can be chosen for both."""
    encoder, full = seeded(part, **options), seeded(ScalarLens, **options)
    values, _ = inputs_of()
    assert encoder.promises_coordinate
    assert same_bits(encoder.coordinate(values), full.coordinate(values))


class ReadoutFirst(DeerNorm):
    """Draws something before the mesh does."""

    def __init__(self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int) -> None:
        torch.rand(1)
        super().__init__(statistics, n_categories, embedding_dim)


@every_ablation
def test_starts_with_the_mesh_of_scalarlens(name: str) -> None:
    check_start(ABLATIONS[name])
    check_start(ABLATIONS[name], intervals=5, mesh_start="uniform", width_floor=1e-3, temperature=2.0)


def test_start_rejects_another_draw() -> None:
    with pytest.raises(AssertionError):
        check_start(ReadoutFirst)


def check_options(part: Part, reference: Part, without: tuple[str, ...] = ()) -> None:
    expected = {name: default for name, default in options_of(reference).items() if name not in without}
    assert options_of(part) == expected


@every_ablation
def test_options_are_those_of_the_reference(name: str) -> None:
    reference: Part = Deer if name in MATCHED else ScalarLens
    check_options(ABLATIONS[name], reference, without=("steps",) if name == "one-step" else ())


class FinerMesh(DeerNorm):
    """One default that is not that of the reference."""

    def __init__(
        self,
        statistics: TrainingStatistics,
        n_categories: int,
        embedding_dim: int,
        *,
        intervals: int = 32,
        mesh_start: MeshStart = "quantile",
        width_floor: float = 1e-7,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(statistics, n_categories, embedding_dim, intervals=intervals)


@pytest.mark.parametrize("mutant", [FinerMesh, ReadoutFirst])
def test_options_reject(mutant: Part) -> None:
    with pytest.raises(AssertionError):
        check_options(mutant, Deer)


# --- context sources ---


def replacements(values: Tensor, context: Tensor, field: int, source: str) -> list[tuple[Tensor, Tensor]]:
    """Inputs in which one whole source is something else, and the focal column is not."""
    if source == "categories":
        absent = torch.full_like(context, torch.nan)
        return [(values, other) for other in (context.roll(1, 0), context * -100, absent)]
    constants = [torch.full_like(values, number) for number in (torch.nan, 1e12)]
    others = [values.roll(1, 0), values * -3, *constants]
    for other in others:
        other[:, field] = values[:, field]
    return [(other, context) for other in others]


def check_sources(part: Part) -> None:
    """Token i keeps its bits when a source outside the context is replaced, and follows one inside it."""
    encoder = scrambled(seeded(part))
    values, context = inputs_of()
    tokens = encoder(values, context)
    for source, heard_in in (("categories", ("categorical", "all")), ("numbers", ("numerical", "all"))):
        for field in range(N_VALUES):
            for inputs in replacements(values, context, field, source):
                same = same_bits(encoder(*inputs)[:, field], tokens[:, field])
                assert same == (part.context not in heard_in), f"field {field} and {source}, {part.context=}"


class MaskedByProduct(NumericalContextOnly):
    """Zero times NaN is NaN."""

    def message(self, state: Tensor) -> Tensor:
        sends = torch.arange(state.shape[1]) < self.n_values
        return ScalarLens.message(self, state * sends.unsqueeze(-1))


class MaskedAtTheStart(CategoricalContextOnly):
    """Numbers are heard again after the first step."""

    def respond(self, drive: Tensor, gate: Tensor) -> list[Tensor]:
        first = torch.lerp(torch.tanh(drive), torch.tanh(drive + gate * self.message(torch.tanh(drive))), 0.5)
        second = torch.tanh(drive + gate * ScalarLens.message(self, first))
        return [torch.tanh(drive), first, second, second]


class Whispers(LocalOnly):
    """A small rest of every message."""

    def message(self, state: Tensor) -> Tensor:
        return 1e-3 * ScalarLens.message(self, state)


class Deafened(NumericalContextOnly):
    """Declares numerical context and hears nothing."""

    def message(self, state: Tensor) -> Tensor:
        return torch.zeros_like(state)


class NumbersInContext(ContextFilm):
    """The modulation follows the numbers too."""

    def read(self, normalized: Tensor, category_tokens: Tensor) -> Tensor:
        return super().read(normalized, category_tokens + normalized.mean(1, keepdim=True))


@every_ablation
def test_reads_the_sources_of_its_context_and_no_other(name: str) -> None:
    check_sources(ABLATIONS[name])


@pytest.mark.parametrize(
    "mutant",
    [
        HearsCategories,
        MaskedByProduct,
        ReceiversMasked,
        MaskedAtTheStart,
        Whispers,
        Deafened,
        NumbersInContext,
    ],
)
def test_sources_reject(mutant: Part) -> None:
    with pytest.raises(AssertionError):
        check_sources(mutant)


def check_states_stay(part: type[ScalarLens]) -> None:
    encoder = scrambled(seeded(part))
    assert isinstance(encoder, ScalarLens)
    trace = encoder.trace(*inputs_of())
    assert len(trace.states) == 4
    for state in trace.states:
        assert same_bits(state, torch.tanh(trace.drive))


class HearsItself(LocalOnly):
    """Every field gets its own state back."""

    def message(self, state: Tensor) -> Tensor:
        return state


def test_local_states_are_equal_at_every_step() -> None:
    check_states_stay(LocalOnly)
    with pytest.raises(AssertionError):
        check_states_stay(HearsItself)


# --- components ---


def check_frozen(part: type[ScalarLens]) -> None:
    """ScalarLens's bits with one step; with three the first state is ScalarLens's, and no later one is."""
    inputs = inputs_of()
    for steps in (1, 3):
        encoder = scrambled(seeded(part, steps=steps))
        full = copy_of(encoder, ScalarLens, steps=steps)
        assert isinstance(encoder, ScalarLens)
        assert isinstance(full, ScalarLens)
        frozen_states, states = encoder.trace(*inputs).states, full.trace(*inputs).states
        same = [same_bits(one, other) for one, other in zip(frozen_states, states, strict=True)]
        assert same == [True, True, False, False][: steps + 1]
        assert same_bits(encoder(*inputs), full(*inputs)) == (steps == 1)


class FrozenFromTheDrive(FrozenMessage):
    """The message is that of the drive before it was bounded."""

    def respond(self, drive: Tensor, gate: Tensor) -> list[Tensor]:
        states = [torch.tanh(drive)]
        proposal = torch.tanh(drive + gate * self.message(drive))
        for step_size in torch.sigmoid(self.step_logits):
            states.append(torch.lerp(states[-1], proposal, step_size))
        return states


def test_frozen_message_is_scalarlens_with_one_step() -> None:
    check_frozen(FrozenMessage)


@pytest.mark.parametrize("mutant", [FrozenFromTheDrive, ScalarLens])
def test_frozen_rejects(mutant: type[ScalarLens]) -> None:
    with pytest.raises(AssertionError):
        check_frozen(mutant)


def gradients(encoder: NumericalEncoder, tokens: Tensor) -> Arrays:
    """Gradient of every parameter for a weighted sum of the tokens, zero where none arrives."""
    weights = torch.linspace(-1, 1, tokens.numel(), dtype=tokens.dtype).view_as(tokens)
    names, parameters = zip(*encoder.named_parameters(), strict=True)
    loss = (tokens * weights).sum()
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
    return {name: gradient.numpy() for name, gradient in zip(names, found, strict=True)}


def check_stop_grad(part: type[ScalarLens]) -> None:
    """ScalarLens's bits forward; to categories no gradient, to the mesh the one through the readout."""
    encoder = scrambled(seeded(part)).double()
    full = copy_of(encoder, ScalarLens).double()
    assert isinstance(full, ScalarLens)
    values, context = inputs_of()
    context = context.double().requires_grad_()
    tokens = encoder(values, context)
    assert same_bits(tokens, full(values, context))
    (reached,) = torch.autograd.grad(
        tokens.sum(), context, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    assert int(reached.count_nonzero()) == 0
    actual = gradients(encoder, tokens)
    normalized = full.normalize(torch.cat([full.coordinate(values), context], dim=1))
    drive, gate = full.force(normalized.detach())
    response = full.respond(drive, gate)
    response_only = gradients(full, full.read(normalized.detach(), gate, response))
    constant = [state.detach() for state in response]
    readout_only = gradients(full, full.read(normalized, gate.detach(), constant))
    for name, gradient in actual.items():
        expected = readout_only[name] if name.startswith(("mesh.", "readout.")) else response_only[name]
        np.testing.assert_allclose(gradient, expected, rtol=1e-10, atol=1e-12, err_msg=name)
        assert gradient.any(), f"{name} does not learn"


class StopsNothing(StopGrad):
    """Detaches a tensor that nobody reads."""

    def force(self, normalized: Tensor) -> tuple[Tensor, Tensor]:
        normalized.detach()
        return ScalarLens.force(self, normalized)


class StopsCategories(StopGrad):
    """Only categories are constant: the mesh still learns from the response."""

    def force(self, normalized: Tensor) -> tuple[Tensor, Tensor]:
        n = self.n_values
        return ScalarLens.force(self, torch.cat([normalized[:, :n], normalized[:, n:].detach()], dim=1))


class StopsHeads(StopGrad):
    """The heads stop learning too."""

    def force(self, normalized: Tensor) -> tuple[Tensor, Tensor]:
        drive, gate = super().force(normalized)
        return drive.detach(), gate.detach()


class StopsTokens(StopGrad):
    """The readout gets constants as well, and the mesh learns nothing."""

    @staticmethod
    def normalize(tokens: Tensor) -> Tensor:
        return ScalarLens.normalize(tokens).detach()


def test_stop_grad_changes_gradients_only() -> None:
    check_stop_grad(StopGrad)


@pytest.mark.parametrize("mutant", [StopsForward, StopsNothing, StopsCategories, StopsHeads, StopsTokens])
def test_stop_grad_rejects(mutant: type[ScalarLens]) -> None:
    with pytest.raises(AssertionError):
        check_stop_grad(mutant)


def check_one_step(part: Part) -> None:
    encoder, full = seeded(part), seeded(ScalarLens, steps=1)
    assert same_bits(encoder(*inputs_of()), full(*inputs_of()))
    shorter = count(seeded(ScalarLens)) - count(encoder)
    assert shorter == N_VALUES * 2 * 8 * 32 + 2


class TwoSteps(ScalarLens):
    """One step too many."""

    def __init__(self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int) -> None:
        super().__init__(statistics, n_categories, embedding_dim, steps=2)


def test_one_step_is_scalarlens_with_one_step() -> None:
    check_one_step(OneStep)
    for mutant in (TwoSteps, ReadsTheStart):
        with pytest.raises(AssertionError):
            check_one_step(mutant)


def test_one_step_has_no_option_for_steps() -> None:
    with pytest.raises(UsageError, match="steps"):
        build("one-step", STATISTICS, N_CATEGORIES, DIM, steps=2)
    assert build("frozen-message", STATISTICS, N_CATEGORIES, DIM, steps=2).step_logits.shape == (2,)


# --- capacity ---


def parameters_at(part: Part, n_values: int, n_categories: int, dim: int) -> int:
    """The number of parameters, missing tokens left out."""
    encoder = part(TrainingStatistics.from_arrays(np.zeros((1, n_values))), n_categories, dim)
    return count(encoder) - encoder.mesh.missing.numel()


def check_budget(budget: Callable[[int, int, int], int], shape: tuple[int, int, int]) -> None:
    assert budget(*shape) == parameters_at(ScalarLens, *shape)


def check_capacity(part: Part, shape: tuple[int, int, int]) -> None:
    share = parameters_at(part, *shape) / parameters_at(ScalarLens, *shape)
    assert 0.98 <= share <= 1.02


class AsWideAsScalarLens(LocalMlp):
    """The same hidden width instead of the same number of parameters."""

    def build_readout(self) -> nn.Module:
        return Readout(self.n_values, self.embedding_dim, 32, self.embedding_dim)


class ContextNotCounted(ContextFilm):
    """The whole budget goes to the fields, and the shared summary comes on top."""

    def build_readout(self) -> nn.Module:
        n, c, d = self.n_values, self.n_categories, self.embedding_dim
        width = round((scalarlens_budget(n, c, d) / n - 2 * d - 1) / (17 + 2 * d))
        return ContextModulation(n, c, d, width)


@pytest.mark.parametrize("table", PAPER)
def test_budget_at_the_sizes_of_the_paper(table: str) -> None:
    n_values, n_categories, parameters = PAPER[table]
    assert scalarlens_budget(n_values, n_categories, 16) == parameters
    check_budget(scalarlens_budget, (n_values, n_categories, 16))


@quick
@given(shapes)
def test_budget_is_that_of_the_real_module(shape: tuple[int, int, int]) -> None:
    check_budget(scalarlens_budget, shape)


def test_budget_rejects_missing_tokens() -> None:
    with pytest.raises(AssertionError):
        check_budget(lambda n, c, d: scalarlens_budget(n, c, d) + n * d, (3, 2, 4))


@pytest.mark.parametrize(
    ("table", "local", "film"), [("AutoML-A", 115, 65), ("AutoML-E", 146, 76), ("Criteo", 111, 64)]
)
def test_matched_widths_at_the_sizes_of_the_paper(table: str, local: int, film: int) -> None:
    n_values, n_categories, _ = PAPER[table]
    for part, width, per_field in ((LocalMlp, local, 33 * local + 17), (ContextFilm, film, 49 * film + 33)):
        shared = 16 * 16 * n_categories + 16 if part is ContextFilm else 0
        mesh = n_values * (16 + 17 * 16)
        assert parameters_at(part, n_values, n_categories, 16) == mesh + shared + n_values * per_field, width
        check_capacity(part, (n_values, n_categories, 16))


@quick
@given(shapes, st.sampled_from([LocalMlp, ContextFilm]))
def test_capacity_is_that_of_scalarlens(shape: tuple[int, int, int], part: Part) -> None:
    check_capacity(part, shape)


@every_component
def test_components_keep_every_parameter_but_those_of_later_steps(name: str) -> None:
    fewer = 13 * 512 + 2 if name == "one-step" else 0
    assert parameters_at(COMPONENT[name], 13, 26, 16) == 51_600 - fewer


@pytest.mark.parametrize("mutant", [AsWideAsScalarLens, ContextNotCounted, DeerNorm])
def test_capacity_rejects(mutant: Part) -> None:
    with pytest.raises(AssertionError):
        check_capacity(mutant, (13, 26, 16))


# --- the start of the matched alternatives ---


def check_starts_silent(part: Part) -> None:
    """Equal meshes, equal tokens; and unequal ones as soon as the modulation has moved."""
    film, plain = seeded(part), seeded(DeerNorm)
    assert same_bits(film.mesh.nodes, plain.mesh.nodes)
    assert same_bits(film(*inputs_of()), plain(*inputs_of()))
    scrambled(film.readout.modulation)
    assert not same_bits(film(*inputs_of()), plain(*inputs_of()))


class StartsLoud(ContextFilm):
    """A modulation that starts like any other map."""

    def build_readout(self) -> nn.Module:
        return scrambled(super().build_readout())


class StaysSilent(ContextFilm):
    """A modulation without effect."""

    def read(self, normalized: Tensor, category_tokens: Tensor) -> Tensor:
        tokens: Tensor = self.readout.gain(normalized)
        return tokens


def test_context_film_starts_as_deer_norm() -> None:
    check_starts_silent(ContextFilm)
    for mutant in (StartsLoud, StaysSilent):
        with pytest.raises(AssertionError):
            check_starts_silent(mutant)


@every_match
def test_matched_alternatives_take_a_table_without_categories(name: str) -> None:
    encoder = MATCHED[name](STATISTICS, 0, DIM)
    values, _ = inputs_of()
    assert encoder(values, torch.empty(len(values), 0, DIM)).isfinite().all()


# --- export ---


def check_export(part: Part) -> None:
    encoder = scrambled(seeded(part)).double().eval()
    rows = torch.export.Dim("rows")
    values, context = inputs_of()
    context = context.double()
    program = torch.export.export(encoder, (values[:6], context[:6]), dynamic_shapes=({0: rows}, {0: rows})).module()
    for some in (slice(0, 12), slice(3, 5), slice(7, 8)):
        exported, eager = program(values[some], context[some]), encoder(values[some], context[some])
        torch.testing.assert_close(exported, eager, rtol=0, atol=1e-12)


class SixRows(LocalMlp):
    """Counts on the rows that it was exported with."""

    def forward(self, values: Tensor, category_tokens: Tensor) -> Tensor:
        return F.pad(super().forward(values, category_tokens), (0, 0, 0, 0, 0, 6 - int(values.shape[0])))


@every_ablation
def test_exports_with_a_free_batch_size(name: str) -> None:
    check_export(ABLATIONS[name])


def test_export_rejects_a_fixed_batch_size() -> None:
    with pytest.raises(RuntimeError, match="rows = 6"):
        check_export(SixRows)
