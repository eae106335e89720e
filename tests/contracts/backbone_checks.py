"""The contracts of every backbone: one plain function each, which raises AssertionError with the reason.

A check receives `make(n_values, n_categories, embedding_dim, tower)` and knows nothing else of the backbone.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from scalarlens.backbones.base import Backbone, Tower

from .comparisons import (
    assert_close,
    assert_documented,
    assert_finite,
    assert_options_are_bound,
    assert_same_bits,
    assert_same_state,
    bits,
    generator_states,
    must_work,
    normal,
    parameters_reached,
    scrambled,
    seeded,
    state_of,
    weighted_sum,
)

Make = Callable[[int, int, int, Tower], Backbone]

N_VALUES = 3
N_CATEGORIES = 4
EMBEDDING_DIM = 8
TOWER = Tower(hidden=(16, 8))


class Fields(NamedTuple):
    """What a backbone may read: `[B, N, d]`, `[B, C, d]`, `[B, C]`."""

    value_tokens: Tensor
    category_tokens: Tensor
    category_weights: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> Fields:
        return Fields(*(change(tensor) for tensor in self))


def fields(rows: int, n_values: int = N_VALUES, n_categories: int = N_CATEGORIES, seed: int = 21) -> Fields:
    return Fields(
        normal(rows, n_values, EMBEDDING_DIM, seed=seed),
        normal(rows, n_categories, EMBEDDING_DIM, seed=seed + 1),
        normal(rows, n_categories, seed=seed + 2),
    )


def build(make: Make, seed: int = 0, tower: Tower = TOWER) -> Backbone:
    return seeded(lambda: make(N_VALUES, N_CATEGORIES, EMBEDDING_DIM, tower), seed)


def forward(backbone: nn.Module, first_order: bool, batch: Fields) -> Tensor:
    """Logits as the model asks for them: category weights only for a backbone with a linear branch."""
    inputs = batch if first_order else batch[:2]
    logits: Tensor = backbone(*inputs)
    return logits


@torch.no_grad()
def logits_of(backbone: Backbone, batch: Fields, program: nn.Module | None = None) -> Tensor:
    """Logits from copies of the inputs, so that a backbone which edits them spoils only its own check.

    With `program`, what was exported runs in the place of the backbone.
    """
    return forward(program or backbone, backbone.first_order, batch.each(torch.clone))


def check_shape_and_dtype(make: Make) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        backbone = build(make).to(dtype)
        with must_work(f"a forward pass with parameters in {dtype}"):
            logits = logits_of(backbone, Fields(*(tensor.to(dtype) for tensor in fields(7))))
        assert logits.shape == (7,), f"logits must be [B] = [7]; got {list(logits.shape)}"
        assert logits.dtype == dtype, f"logits must be in {dtype}, as the parameters; got {logits.dtype}"


def check_finite(make: Make) -> None:
    backbone = build(make)
    for scale in (0.0, 0.01, 1.0, 1e4):
        backbone.zero_grad()
        batch = Fields(*(tensor * scale for tensor in fields(32)))
        logits = forward(backbone, backbone.first_order, batch)
        assert_finite(logits, f"logits of tokens of size {scale}")
        weighted_sum(logits).backward()
        for name, parameter in backbone.named_parameters():
            if parameter.grad is not None:
                assert_finite(parameter.grad, f"gradient of {name} at tokens of size {scale}")


def check_logit_is_not_a_probability(make: Make) -> None:
    outputs = [logits_of(scrambled(build(make, seed)), fields(64).each(lambda t: 3 * t)) for seed in range(3)]
    logits = torch.cat(outputs).nan_to_num()
    low, high = float(logits.min()), float(logits.max())
    assert low < 0 < 1 < high, f"logits must reach beyond [0, 1]; all of them lie in [{low:.3f}, {high:.3f}]"


def check_tables_without_categories_or_without_numbers(make: Make) -> None:
    for n_values, n_categories in ((N_VALUES, 0), (0, N_CATEGORIES)):
        with must_work(f"a table of {n_values} numerical and {n_categories} categorical fields"):
            backbone = seeded(lambda n=n_values, c=n_categories: make(n, c, EMBEDDING_DIM, TOWER))
            logits = logits_of(backbone, fields(6, n_values, n_categories))
        assert len(logits) == 6, f"6 rows must give 6 logits; got {list(logits.shape)}"
        assert_finite(logits, f"logits with {n_values} numerical and {n_categories} categorical fields")


def check_rows_are_independent(make: Make) -> None:
    backbone = scrambled(build(make)).double()  # so that rounding can neither hide nor feign a dependence
    batch, chosen = fields(64).each(torch.Tensor.double), torch.tensor([40, 3, 17, 63, 5])
    expected = logits_of(backbone, batch)[chosen]
    actual = logits_of(backbone, batch.each(lambda tensor: tensor[chosen]))
    assert_close(actual, expected, "a sub-batch must give the logits of the full batch")


def check_batch_of_none_and_one(make: Make) -> None:
    backbone = scrambled(build(make)).double()
    batch = fields(1).each(torch.Tensor.double)
    with must_work("a batch of 0 rows, forward and backward"):
        none = forward(backbone, backbone.first_order, batch.each(lambda tensor: tensor[:0]))
        none.sum().backward()
    assert len(none) == 0, f"0 rows must give 0 logits; got {list(none.shape)}"
    with must_work("a batch of 1 row"):
        one = logits_of(backbone, batch)
    two = logits_of(backbone, batch.each(lambda tensor: tensor.repeat(2, *[1] * (tensor.ndim - 1))))
    assert_close(one, two[:1], "1 row must give the logit that it has when it comes twice")


def check_memory_layout_does_not_matter(make: Make) -> None:
    backbone = scrambled(build(make)).double()
    batch = fields(6).each(torch.Tensor.double)
    strided = batch.each(lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1))
    with must_work("inputs that are not contiguous in memory"):
        actual = logits_of(backbone, strided)
    what = "the layout of the inputs in memory must not move a logit"
    assert_close(actual, logits_of(backbone, batch), what)


def check_every_parameter_learns(make: Make) -> None:
    backbone, batch = build(make), fields(192)
    logits = partial(forward, backbone, backbone.first_order, batch)
    reached = parameters_reached(backbone, lambda: weighted_sum(logits()))
    dead = sorted(name for name, learns in reached.items() if not learns)
    assert not dead, f"no gradient ever reached {dead}"


def check_inputs_are_untouched(make: Make) -> None:
    backbone = scrambled(build(make))
    # part of a graph, as in the model: not leaves, so that an edit in place would be possible
    batch = fields(12).each(lambda tensor: tensor.requires_grad_().clone())
    before = [bits(tensor) for tensor in batch]
    with must_work("forward and backward with tokens that are part of a graph"):
        weighted_sum(forward(backbone, backbone.first_order, batch)).backward()
    with torch.no_grad():
        forward(backbone, backbone.first_order, batch)
    for name, tensor, old in zip(Fields._fields, batch, before, strict=True):
        assert bits(tensor) == old, f"{name} was edited in place"


def check_reads_tokens_only(make: Make) -> None:
    names = list(inspect.signature(type(build(make)).forward).parameters)
    allowed = ["self", *Fields._fields]
    assert names == allowed, f"forward must take {allowed} and never a raw value; it takes {names}"


def check_every_field_moves_the_logit(make: Make) -> None:
    backbone = scrambled(build(make))
    leaves = fields(64).each(torch.Tensor.requires_grad_)
    weighted_sum(forward(backbone, backbone.first_order, leaves.each(torch.clone))).backward()
    for name, leaf in zip(Fields._fields[:2], leaves[:2], strict=True):
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        deaf = (gradient == 0).all(0).any(-1).nonzero().flatten().tolist()
        assert not deaf, f"no row's logit moves with every component of {name} of fields {deaf}"


def check_first_order_is_as_declared(make: Make) -> None:
    backbone = scrambled(build(make))
    batch, other = fields(24), fields(24, seed=31)
    changed = batch._replace(category_weights=other.category_weights)
    if not backbone.first_order:
        for given in (batch, changed):
            with torch.no_grad():
                actual = backbone(*given.each(torch.clone))
            what = "first_order is off, but category_weights are read"
            assert_same_bits(actual, logits_of(backbone, batch), what)
        return
    expected = logits_of(backbone, batch)
    for field in range(N_CATEGORIES):
        weights = batch.category_weights.clone()
        weights[:, field] = other.category_weights[:, field]
        moved = logits_of(backbone, batch._replace(category_weights=weights))
        assert (moved != expected).any(), f"first_order is on, but weight {field} moves nothing"


def check_state_dict_is_the_whole_backbone(make: Make) -> None:
    trained, restored = scrambled(build(make)), build(make, seed=1)
    with must_work("writing the state dict as safetensors and loading it"):
        saved = safetensors.torch.save(trained.state_dict())
        restored.load_state_dict(safetensors.torch.load(saved), strict=True)
    actual, expected = logits_of(restored, fields(24)), logits_of(trained, fields(24))
    assert_same_bits(actual, expected, "logits after loading the state dict")


def check_exports_with_a_free_batch_size(make: Make) -> None:
    backbone = scrambled(build(make)).eval()
    rows = torch.export.Dim("rows")
    inputs = 3 if backbone.first_order else 2
    with must_work("torch.export with a free batch size"):
        program = torch.export.export(
            backbone, tuple(fields(6))[:inputs], dynamic_shapes=tuple({0: rows} for _ in range(inputs))
        ).module()
    batch = fields(36)
    for n_rows in (36, 3, 2):
        part = Fields(*(tensor[:n_rows] for tensor in batch))
        with must_work(f"the exported program on {n_rows} rows"):
            actual = logits_of(backbone, part, program)
        assert_close(actual, logits_of(backbone, part), f"exported with 6 rows, run with {n_rows}")
    with must_work("the exported program on 1 row"):
        one = logits_of(backbone, batch.each(lambda tensor: tensor[:1]), program)
    assert one.shape[:1] == (1,), f"exported, 1 row must give 1 logit; got {list(one.shape)}"


def check_same_seed_same_bits(make: Make) -> None:
    outside = np.random.get_state(), random.getstate()
    np.random.seed(1)
    random.seed(1)
    first, other = build(make, seed=5), build(make, seed=6)
    np.random.seed(2)
    random.seed(2)
    second = build(make, seed=5)
    np.random.set_state(outside[0])
    random.setstate(outside[1])
    what = "built twice after the same torch.manual_seed"
    assert_same_state(second.state_dict(), first.state_dict(), what)
    assert_same_bits(logits_of(second, fields(24)), logits_of(first, fields(24)), f"{what}: logits")
    starts = [{name: bits(p) for name, p in backbone.named_parameters()} for backbone in (first, other)]
    assert starts[0] != starts[1], "another seed must give another start; the backbone seeds itself"


def check_forward_draws_nothing_and_changes_nothing(make: Make) -> None:
    backbone = scrambled(build(make))
    generators, state = generator_states(), state_of(backbone)
    first, second = (logits_of(backbone, fields(24)) for _ in range(2))
    assert generator_states() == generators, "forward drew from a global random generator"
    assert_same_state(backbone.state_dict(), state, "forward changed the state dict")
    assert_same_bits(second, first, "a second pass over the same rows")


def check_dropout_acts_in_training_only(make: Make) -> None:
    if not _has_tower(make):
        return
    plain, dropping = scrambled(build(make)), build(make, tower=Tower(hidden=(16, 8), dropout=0.5))
    _copy_parameters(plain, dropping)
    batch = fields(32)
    with torch.random.fork_rng(devices=[]):
        first, second = logits_of(dropping.train(), batch), logits_of(dropping, batch)
    assert bits(first) != bits(second), "in training, dropout must change the logits from pass to pass"
    actual = logits_of(dropping.eval(), batch)
    expected = logits_of(plain.eval(), batch)
    assert_same_bits(actual, expected, "in evaluation, dropout must leave every logit alone")


def check_batch_norm_learns_in_training_only(make: Make) -> None:
    if not _has_tower(make):
        return
    backbone = scrambled(build(make, tower=Tower(hidden=(16, 8), batch_norm=True))).double()
    batch = fields(32).each(torch.Tensor.double)
    some = batch.each(lambda tensor: tensor[5:9])
    start = state_of(backbone)
    together = logits_of(backbone.train(), batch)
    trained = state_of(backbone)
    moved = [name for name in start if bits(start[name]) != bits(trained[name])]
    assert moved, "in training, batch norm must follow the batches; no running statistic moved"
    apart = logits_of(backbone, some)
    assert bits(apart) != bits(together[5:9]), "in training, batch norm must read the batch"
    trained = state_of(backbone.eval())
    expected = logits_of(backbone, batch)[5:9]
    assert_close(logits_of(backbone, some), expected, "in evaluation, batch norm must keep rows independent")
    assert_same_state(backbone.state_dict(), trained, "in evaluation, batch norm must not follow the batches")


def check_options_are_keyword_only_with_defaults(make: Make) -> None:
    part = type(build(make))
    assert_options_are_bound("backbone", part, ["n_values", "n_categories", "embedding_dim", "tower"])


def check_documented_with_shape_example_and_citation(make: Make) -> None:
    part = type(build(make))
    assert_documented(part)
    citation = getattr(part, "citation", None)
    assert citation, f"citation must name the source; got {citation!r}"


def _has_tower(make: Make) -> bool:
    """Whether the widths of the tower reach any parameter."""
    shapes = [[p.shape for p in build(make, tower=Tower(hidden=(w, 8))).parameters()] for w in (16, 24)]
    return shapes[0] != shapes[1]


@torch.no_grad()
def _copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """By place: a dropout layer moves the names."""
    for given, taken in zip(source.parameters(), target.parameters(), strict=True):
        taken.copy_(given)


#: every contract, in the order of this file
CHECKS = tuple(check for name, check in list(globals().items()) if name.startswith("check_"))
