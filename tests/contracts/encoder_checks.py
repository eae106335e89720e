"""The contracts of every encoder: one plain function each, which raises AssertionError with the reason.

A check receives `make(statistics, n_categories, embedding_dim)` and knows nothing else of the encoder.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from scalarlens.encoders.base import NumericalEncoder, Source
from scalarlens.table.statistics import TrainingStatistics

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

Make = Callable[[TrainingStatistics, int, int], NumericalEncoder]

N_CATEGORIES = 3
EMBEDDING_DIM = 8
#: the columns of the training table, by place
HEAVY, NORMAL, CONSTANT, MISSING, NARROW = range(5)
FIELDS = ("heavy-tailed", "normal", "constant", "all-missing", "narrow")
#: what an encoder that declares this context reads beside the value itself
READS_CATEGORIES = ("categorical", "all")
READS_NUMBERS = ("numerical", "all")
#: columns in which a value has somewhere to move
SPREAD = (HEAVY, NORMAL, NARROW)


@cache
def training_table() -> np.ndarray:
    """400 rows: heavy-tailed whole numbers, normal, constant, nothing at all, [1.46e7, 1.46e7 + 1]."""
    rng = np.random.default_rng(7)
    heavy, normals = rng.lognormal(0, 4, 400).round(), rng.normal(0, 1, 400)
    heavy[rng.random(400) < 0.1] = np.nan
    normals[rng.random(400) < 0.1] = np.nan
    narrow = 1.46e7 + rng.random(400)
    narrow[:2] = 1.46e7, 1.46e7 + 1
    return np.stack([heavy, normals, np.full(400, 3.0), np.full(400, np.nan), narrow], axis=1)


@cache
def training_statistics() -> TrainingStatistics:
    return TrainingStatistics.from_arrays(training_table())


@cache
def other_statistics() -> tuple[TrainingStatistics, ...]:
    """The table with its columns in another order, in other units, and mirrored."""
    table = training_table()
    others = (table[:, ::-1], table[:, np.roll(np.arange(5), 2)], table * 2 + 3, -table)
    return tuple(TrainingStatistics.from_arrays(other) for other in others)


def training_rows(n: int) -> Tensor:
    """Rows as training saw them, with missing cells."""
    return torch.tensor(training_table()[:n])


def present_rows(n: int) -> Tensor:
    """Rows without a missing cell; the column that training never saw gets ordinary numbers."""
    rows = training_rows(n)
    return torch.where(rows.isnan(), normal(*rows.shape, seed=3).double(), rows)


def extreme_rows() -> Tensor:
    """Values at and far beyond the ends of every range."""
    statistics = training_statistics()
    numbers = (-1e12, -2.5e7, -1.0, -1e-12, -0.0, 1e-12, 0.5, 2.0, 3.0, 16777217.0, 1.46e7 + 0.25, 1e12)
    ends = (statistics.low, statistics.high, np.nextafter(statistics.high, np.inf), statistics.mean)
    return torch.tensor(np.stack([*(np.full(5, number) for number in numbers), *ends]))


def context_rows(n: int, seed: int = 11) -> Tensor:
    return normal(n, N_CATEGORIES, EMBEDDING_DIM, seed=seed)


def build(make: Make, seed: int = 0, statistics: TrainingStatistics | None = None) -> NumericalEncoder:
    statistics = statistics or training_statistics()
    return seeded(lambda: make(statistics, N_CATEGORIES, EMBEDDING_DIM), seed)


@torch.no_grad()
def tokens_of(encoder: nn.Module, values: Tensor, category_tokens: Tensor | None = None) -> Tensor:
    """Tokens from copies of the inputs, so that an encoder which edits them spoils only its own check."""
    if category_tokens is None:
        category_tokens = context_rows(len(values))
    tokens: Tensor = encoder(values.clone(), category_tokens.clone())
    return tokens


def check_shape_and_dtype(make: Make) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        encoder = build(make).to(dtype)
        with must_work(f"a forward pass with parameters in {dtype}"):
            tokens = tokens_of(encoder, training_rows(7), context_rows(7).to(dtype))
        assert tokens.shape == (7, 5, EMBEDDING_DIM), (
            f"tokens must be [B, N, d] = [7, 5, {EMBEDDING_DIM}]; got {list(tokens.shape)}"
        )
        assert tokens.dtype == dtype, f"tokens must be in {dtype}, as the parameters; got {tokens.dtype}"


def check_finite(make: Make) -> None:
    encoder = build(make)
    for values, what in ((training_rows(400), "training rows"), (extreme_rows(), "values out of range")):
        encoder.zero_grad()
        tokens = encoder(values, context_rows(len(values)))
        for field, name in enumerate(FIELDS):
            assert_finite(tokens[:, field], f"tokens of the {name} column at {what}")
        weighted_sum(tokens).backward()
        for name, parameter in encoder.named_parameters():
            if parameter.grad is not None:
                assert_finite(parameter.grad, f"gradient of {name} at {what}")


def check_no_categories_or_no_numbers(make: Make) -> None:
    with must_work("a table without categorical fields"):
        encoder = seeded(lambda: make(training_statistics(), 0, EMBEDDING_DIM))
        tokens = tokens_of(encoder, training_rows(6), torch.zeros(6, 0, EMBEDDING_DIM))
    assert tokens.shape[:2] == (6, 5), f"tokens must be [6, 5, d]; got {list(tokens.shape)}"
    assert_finite(tokens[:, SPREAD], "tokens without categories")
    empty = TrainingStatistics.from_arrays(np.empty((6, 0)))
    with must_work("a table without numerical fields"):
        encoder = seeded(lambda: make(empty, N_CATEGORIES, EMBEDDING_DIM))
        tokens = tokens_of(encoder, torch.empty(6, 0).double(), context_rows(6))
    assert tokens.shape[:2] == (6, 0), f"tokens must be [6, 0, d]; got {list(tokens.shape)}"


def check_rows_are_independent(make: Make) -> None:
    encoder = scrambled(build(make)).double()  # so that rounding can neither hide nor feign a dependence
    values, context = training_rows(64), context_rows(64).double()
    chosen = torch.tensor([40, 3, 17, 63, 5])
    expected = tokens_of(encoder, values, context)[chosen]
    actual = tokens_of(encoder, values[chosen], context[chosen])
    assert_close(actual, expected, "a sub-batch must give the tokens of the full batch")
    if encoder.promises_coordinate:
        with torch.no_grad():
            expected, actual = encoder.coordinate(values)[chosen], encoder.coordinate(values[chosen])
        assert_close(actual, expected, "a sub-batch must give the coordinates of the full batch")


def check_batch_of_none_and_one(make: Make) -> None:
    encoder = scrambled(build(make)).double()
    with must_work("a batch of 0 rows, forward and backward"):
        none = encoder(training_rows(0), context_rows(0).double())
        none.sum().backward()
    assert none.shape[:2] == (0, 5), f"0 rows must give tokens [0, 5, d]; got {list(none.shape)}"
    values, context = training_rows(1), context_rows(1).double()
    with must_work("a batch of 1 row"):
        one = tokens_of(encoder, values, context)
    two = tokens_of(encoder, values.repeat(2, 1), context.repeat(2, 1, 1))
    assert_close(one, two[:1], "1 row must give the token that it has when it comes twice")


def check_memory_layout_does_not_matter(make: Make) -> None:
    encoder = scrambled(build(make)).double()
    values, context = training_rows(6), context_rows(6).double()
    expected = tokens_of(encoder, values, context)
    strided_values = values.T.contiguous().T
    strided_context = context.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    with must_work("inputs that are not contiguous in memory"):
        actual = tokens_of(encoder, strided_values, strided_context)
    assert_close(actual, expected, "the layout of the inputs in memory must not move a token")


def check_every_parameter_learns_or_is_declared_idle(make: Make) -> None:
    encoder = build(make)
    values = torch.cat([training_rows(96), present_rows(96)])
    context = context_rows(len(values))
    reached = parameters_reached(encoder, lambda: weighted_sum(encoder(values, context)))
    idle = set(encoder.idle_parameters)
    unknown = sorted(idle - reached.keys())
    assert not unknown, f"idle_parameters names what does not exist: {unknown}"
    dead = sorted(name for name, learns in reached.items() if not learns and name not in idle)
    assert not dead, f"no gradient ever reached {dead}; let them learn or declare them in idle_parameters"
    alive = sorted(name for name in idle if reached[name])
    assert not alive, f"declared in idle_parameters, but a gradient reached {alive}"


def check_inputs_are_untouched(make: Make) -> None:
    encoder = scrambled(build(make))
    values, table = training_rows(12), context_rows(12).requires_grad_()
    context = table.clone()  # as in the model: not a leaf, so that an edit in place would be possible
    value_bits, context_bits = bits(values), bits(context)
    with must_work("forward and backward with category tokens that are part of a graph"):
        weighted_sum(encoder(values, context)).backward()
    with torch.no_grad():
        encoder(values, context)
    assert bits(values) == value_bits, "values were edited in place"
    assert bits(context) == context_bits, "category_tokens were edited in place"


def check_state_dict_is_finite(make: Make) -> None:
    """An artifact refuses a tensor with an infinite or undefined number in it."""
    for name, tensor in build(make).state_dict().items():
        assert torch.isfinite(tensor).all(), f"{name} holds a number that is not finite"


def check_state_dict_is_the_whole_encoder(make: Make) -> None:
    trained = scrambled(build(make))
    with must_work("writing the state dict as safetensors"):
        saved = safetensors.torch.save(trained.state_dict())
    state = safetensors.torch.load(saved)
    values = torch.cat([training_rows(40), extreme_rows()])
    expected, compared = tokens_of(trained, values), 0
    for statistics in other_statistics():
        restored = build(make, seed=1, statistics=statistics)
        fresh = restored.state_dict()
        assert fresh.keys() == state.keys(), f"names move with the data: {fresh.keys() ^ state.keys()}"
        if any(fresh[name].shape != state[name].shape for name in state):
            continue  # a table whose size follows the data, as the number of buckets does
        restored.load_state_dict(state, strict=True)
        actual = tokens_of(restored, values)
        assert_same_bits(actual, expected, "tokens after loading the state dict over other statistics")
        compared += 1
    assert compared, "the shapes of the state dict must survive another order of the same columns"


def check_categories_are_ignored_unless_declared(make: Make) -> None:
    encoder = scrambled(build(make))
    if encoder.context in READS_CATEGORIES:
        return
    values = training_rows(24)
    expected = tokens_of(encoder, values, context_rows(24))
    for other in (context_rows(24, seed=12), torch.full((24, N_CATEGORIES, EMBEDDING_DIM), torch.nan)):
        what = f'context = "{encoder.context}", but the tokens moved with the category tokens'
        assert_same_bits(tokens_of(encoder, values, other), expected, what)


def check_other_numbers_are_ignored_unless_declared(make: Make) -> None:
    encoder = scrambled(build(make))
    if encoder.context in READS_NUMBERS:
        return
    values, context = training_rows(24), context_rows(24)
    expected = tokens_of(encoder, values, context)
    for field, others in _with_other_columns_replaced(values):
        what = f'context = "{encoder.context}", but the {FIELDS[field]} column moved with other columns'
        assert_same_bits(tokens_of(encoder, others, context)[:, field], expected[:, field], what)


def check_declared_context_is_read(make: Make) -> None:
    encoder = scrambled(build(make))
    values, context = training_rows(24), context_rows(24)
    tokens = tokens_of(encoder, values, context)
    for field in SPREAD:
        others = _replace(values.roll(1, dims=0), field, values[:, field])
        moved = {
            "category tokens": tokens_of(encoder, values, context_rows(24, seed=12)),
            "other numbers": tokens_of(encoder, others, context),
        }
        for read_by, what in ((READS_CATEGORIES, "category tokens"), (READS_NUMBERS, "other numbers")):
            assert encoder.context not in read_by or bits(moved[what][:, field]) != bits(tokens[:, field]), (
                f'context = "{encoder.context}", but the {FIELDS[field]} column ignores {what}; declare less'
            )


def check_coordinate_follows_its_own_value_only(make: Make) -> None:
    encoder = scrambled(build(make))
    if not encoder.promises_coordinate:
        return
    values = training_rows(24)
    with torch.no_grad(), must_work("coordinate(values), which promises_coordinate announces,"):
        expected = encoder.coordinate(values)
        for field, others in _with_other_columns_replaced(values):
            what = f"the coordinate of the {FIELDS[field]} column moved with other columns"
            assert_same_bits(encoder.coordinate(others)[:, field], expected[:, field], what)
        for seed in (11, 12):
            encoder(values, context_rows(24, seed))
            assert_same_bits(encoder.coordinate(values), expected, "the coordinate moved with the context")
            if hasattr(encoder, "trace"):
                traced = encoder.trace(values, context_rows(24, seed)).coordinate
                assert_same_bits(traced, expected, "the traced coordinate moved with the context")


def check_coordinate_keeps_precision(make: Make) -> None:
    encoder = scrambled(build(make))
    if not encoder.promises_coordinate:
        return
    values = present_rows(64)
    with torch.no_grad():
        coordinate = encoder.coordinate(values)
        exact = copy.deepcopy(encoder).double().coordinate(values)
    assert_close(coordinate, exact.float(), "the coordinate in float32 must be that of float64, rounded")


def check_exports_with_a_free_batch_size(make: Make) -> None:
    encoder = scrambled(build(make)).eval()
    rows = torch.export.Dim("rows")
    with must_work("torch.export with a free batch size"):
        program = torch.export.export(
            encoder, (training_rows(6), context_rows(6)), dynamic_shapes=({0: rows}, {0: rows})
        ).module()
    values = torch.cat([training_rows(20), extreme_rows()])
    for batch, what in ((values, "36"), (values[7:10], "3"), (values[:1].repeat(2, 1), "2")):
        with must_work(f"the exported program on {what} rows"):
            actual = tokens_of(program, batch)
        assert_close(actual, tokens_of(encoder, batch), f"exported with 6 rows, run with {what}")
    with must_work("the exported program on 1 row"):
        one = tokens_of(program, values[:1])
    assert len(one) == 1, f"exported, 1 row must give the tokens of 1 row; got {list(one.shape)}"


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
    tokens, again = (tokens_of(encoder, training_rows(24)) for encoder in (first, second))
    assert_same_bits(again, tokens, f"{what}: tokens")
    starts = [{name: bits(p) for name, p in encoder.named_parameters()} for encoder in (first, other)]
    assert starts[0] != starts[1], "another seed must give another start; the encoder seeds itself"


def check_forward_draws_nothing_and_changes_nothing(make: Make) -> None:
    encoder = scrambled(build(make))
    generators, state = generator_states(), state_of(encoder)
    first, second = (tokens_of(encoder, training_rows(24)) for _ in range(2))
    assert generator_states() == generators, "forward drew from a global random generator"
    assert_same_state(encoder.state_dict(), state, "forward changed the state dict")
    assert_same_bits(second, first, "a second pass over the same rows")


def check_missing_has_a_learned_token_of_its_own(make: Make) -> None:
    encoder = scrambled(build(make))
    absent = torch.full((1, 5), torch.nan, dtype=torch.float64)
    token = tokens_of(encoder, absent)[0]
    for number in torch.cat([extreme_rows(), torch.zeros(1, 5).double()]):
        same = (tokens_of(encoder, number.unsqueeze(0))[0] == token).all(-1)
        columns = [FIELDS[i] for i in same.nonzero().flatten()]
        assert not columns, f"a missing value must not look like a number; it does in {columns}: {number.tolist()}"
    present = torch.cat([present_rows(200), extreme_rows()])
    taken = _reached_by(encoder, present, slice(None))
    rows = present_rows(24)
    by_field = [_reached_by(encoder, _replace(rows, field, torch.nan), field) for field in range(5)]
    for field, name in enumerate(FIELDS):
        rest = [reached for other, reached in enumerate(by_field) if other != field]
        own = by_field[field] & ~taken & ~torch.stack(rest).any(0)
        assert own.any(), (
            f"a missing value in the {name} column must have a learned token of its own: no number in any "
            "parameter gets a gradient from it and none from present values or other columns"
        )


def check_conversions_keep_float64_buffers(make: Make) -> None:
    for dtypes in ((torch.float32,), (torch.float16,), (torch.bfloat16, torch.float32), (torch.float64,)):
        encoder = build(make)
        exact = {name: b.clone() for name, b in encoder.named_buffers() if b.dtype == torch.float64}
        for dtype in dtypes:
            encoder = encoder.to(dtype)
        buffers = dict(encoder.named_buffers())
        for name, buffer in exact.items():
            assert_same_bits(buffers[name], buffer, f"float64 buffer {name!r} after a conversion to {dtypes}")
        wrong = [n for n, p in encoder.named_parameters() if p.dtype != dtypes[-1]]
        assert not wrong, f"parameters {wrong} did not follow a conversion to {dtypes[-1]}"


def check_options_are_keyword_only_with_defaults(make: Make) -> None:
    assert_options_are_bound("encoder", type(build(make)), ["statistics", "n_categories", "embedding_dim"])


def check_documented_with_shape_example_and_source(make: Make) -> None:
    part = type(build(make))
    assert_documented(part)
    source = getattr(part, "source", None)
    assert isinstance(source, Source), f"source must be a Source; got {source!r}"
    blank = [name for name, entry in vars(source).items() if entry == ""]
    assert not blank, f"source leaves {blank} blank"
    for share in (source.fidelity, source.legitimacy):
        assert 0 <= share <= 1, f"confidence must be in [0, 1]; got {share}"


def check_size_does_not_follow_the_number_of_rows(make: Make) -> None:
    few, many = (build(make, statistics=statistics) for statistics in _few_and_many_rows())
    shapes = [{name: tuple(t.shape) for name, t in e.state_dict().items()} for e in (few, many)]
    assert shapes[0] == shapes[1], "500 and 50,000 rows of the same values must give the same state dict"
    held = [sum(_numbers_held(module) for module in encoder.modules()) for encoder in (few, many)]
    assert held[0] == held[1], f"500 rows leave {held[0]} numbers in the encoder, 50,000 rows {held[1]}"


def _with_other_columns_replaced(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    nothing, huge = torch.full_like(values, torch.nan), torch.full_like(values, 1e12)
    for field in range(values.shape[1]):
        for others in (values.roll(1, dims=0), nothing, huge):
            yield field, _replace(others, field, values[:, field])


def _replace(values: Tensor, field: int, column: Tensor | float) -> Tensor:
    replaced = values.clone()
    replaced[:, field] = column
    return replaced


def _reached_by(encoder: NumericalEncoder, values: Tensor, fields: int | slice) -> Tensor:
    """Which of all numbers in all parameters get a gradient from the tokens of these fields."""
    encoder.zero_grad()
    weighted_sum(encoder(values, context_rows(len(values)))[:, fields]).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in encoder.parameters()]
    return torch.cat([(gradient != 0).flatten() for gradient in gradients])


@cache
def _few_and_many_rows() -> tuple[TrainingStatistics, TrainingStatistics]:
    """The same distinct values once and a hundred times, without the ties that would move a quantile."""
    rng = np.random.default_rng(8)
    columns = [rng.normal(0, 1, 500), rng.uniform(0, 2, 500), np.full(500, 3.0), np.full(500, np.nan)]
    few = np.stack([*columns, 1.46e7 + rng.random(500)], axis=1)
    return TrainingStatistics.from_arrays(few), TrainingStatistics.from_arrays(np.tile(few, (100, 1)))


def _numbers_held(module: nn.Module) -> int:
    """How many numbers the attributes of one module hold, in tensors, arrays and containers."""
    return sum(_size(value) for name, value in vars(module).items() if name != "_modules")


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    if isinstance(value, dict):
        return sum(_size(entry) for entry in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return sum(_size(entry) for entry in value)
    return 1


#: every contract, in the order of this file
CHECKS = tuple(check for name, check in list(globals().items()) if name.startswith("check_"))
