"""What the contracts of encoders and backbones share; every failure says what was compared."""

from __future__ import annotations

import doctest
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from scalarlens.errors import UsageError
from scalarlens.registry import bind_options, options_of

Module = TypeVar("Module", bound=nn.Module)

#: two computations of one number agree to this, relative to max(1, |number|)
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@contextmanager
def must_work(what: str) -> Iterator[None]:
    """Turn any error into a failed contract that names what had to work."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{what} must work; it raised {type(error).__name__}: {error}") from error


def normal(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers that leave the global generator alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def seeded(make: Callable[[], Module], seed: int = 0) -> Module:
    """What `make` builds right after `torch.manual_seed(seed)`; the global generator is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def scrambled(module: Module) -> Module:
    """The module with noise on every parameter, so that nothing which starts at zero hides a dependence."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.add_(0.5 * normal(*parameter.shape, seed=number).to(parameter.dtype))
    return module


def weighted_sum(outputs: Tensor) -> Tensor:
    """A scalar in which every output has its own weight."""
    return (outputs * normal(*outputs.shape, seed=99).to(outputs.dtype)).sum()


def parameters_reached(module: nn.Module, loss: Callable[[], Tensor], steps: int = 4) -> dict[str, bool]:
    """Name of each parameter -> whether any of its numbers got a gradient within a few training steps."""
    reached = {name: False for name, _ in module.named_parameters()}
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        for name, parameter in module.named_parameters():
            reached[name] |= parameter.grad is not None and bool((parameter.grad != 0).any())
        optimizer.step()
    return reached


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Same shape, same dtype, same bits; NaN is equal to the same NaN."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}"
    if bits(actual) != bits(expected):
        raise AssertionError(f"{what}: {_largest_gap(actual, expected)}")


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Same shape, and equal up to rounding; NaN is equal to NaN."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    gap = (actual - expected).abs()
    small = gap <= TOLERANCE[expected.dtype] * expected.abs().clamp(min=1)
    if not ((actual == expected) | (small & expected.isfinite()) | (actual.isnan() & expected.isnan())).all():
        raise AssertionError(f"{what}: {_largest_gap(actual, expected)}")


def assert_finite(tensor: Tensor, what: str) -> None:
    bad = (~tensor.isfinite()).nonzero()
    assert len(bad) == 0, f"{what}: {len(bad)} of {tensor.numel()} not finite, first at {bad[0].tolist()}"


def assert_same_state(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    assert actual.keys() == expected.keys(), f"{what}: the names differ by {set(actual) ^ set(expected)}"
    for name in expected:
        assert_same_bits(actual[name], expected[name], f"{what}, {name!r}")


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def generator_states() -> tuple[Any, ...]:
    """Where the global generators of torch, NumPy and Python stand."""
    _, numbers, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), numbers.tolist(), rest, random.getstate()


def assert_options_are_bound(kind: str, part: type, positional: list[str]) -> None:
    """A constructor takes these by place and everything else by a name of its own, with a default."""
    parameters = list(inspect.signature(part).parameters.values())
    first, rest = parameters[: len(positional)], parameters[len(positional) :]
    names = [parameter.name for parameter in first]
    assert names == positional, f"a constructor must start with {positional}; got {names}"
    loose = [str(parameter) for parameter in rest if parameter.kind is not parameter.KEYWORD_ONLY]
    assert not loose, f"options must be keyword-only and named one by one; got {loose}"
    options = options_of(part)
    bare = [name for name, default in options.items() if default is inspect.Parameter.empty]
    assert not bare, f"options without a default: {bare}"
    for name in options:
        message = _refusal(kind, part, f"{name}_")
        assert repr(name) in message, f"the refusal of '{name}_' must name {name!r}; it says {message!r}"
    _refusal(kind, part, "no_such_option")


def _refusal(kind: str, part: type, option: str) -> str:
    with must_work("refusing an unknown option with a UsageError"):
        try:
            bind_options(kind, "candidate", part, {option: 1})
        except UsageError as error:
            return str(error)
    raise AssertionError(f"option {option!r} does not exist but was accepted")


def assert_documented(part: type) -> None:
    """A docstring of its own: one sentence, the shape, and examples that print what they say."""
    text = inspect.cleandoc(part.__dict__.get("__doc__") or "")
    sentence = " ".join(text.split("\n\n")[0].split())
    assert sentence.endswith("."), f"the docstring must start with one sentence; got {sentence!r}"
    assert not re.search(r"(?<!et al)\.\s+[A-Z]", sentence), f"one sentence, not two: {sentence!r}"
    assert "*Shape*" in text, "the docstring must state its *Shape*"
    names = dict(vars(sys.modules[part.__module__]))
    found = doctest.DocTestFinder(recurse=False).find(part, part.__name__, globs=names)
    assert any(test.examples for test in found), "the docstring must hold an example"
    failures: list[str] = []
    doctest.DocTestRunner(verbose=False).run(found[0], out=failures.append)
    assert not failures, "the example must run as printed:\n" + "".join(failures)


def _largest_gap(actual: Tensor, expected: Tensor) -> str:
    if actual.numel() == 0:
        return "both are empty"
    gap = (actual.detach().double() - expected.detach().double()).abs().nan_to_num(nan=torch.inf)
    place = np.unravel_index(int(gap.argmax()), gap.shape)
    return (
        f"{int((gap > 0).sum())} of {gap.numel()} numbers differ, most at {[int(i) for i in place]}: "
        f"{actual[place].item()!r} instead of {expected[place].item()!r}"
    )
