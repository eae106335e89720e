"""nary-dis-lite and nary-dis against digits and formulas computed with Python integers and NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from scalarlens.encoders.base import ValueEncoder
from scalarlens.encoders.nary import CODE_LIMIT, DigitTable, IntegerCode, NaryDis, NaryDisLite
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics

Make = Callable[..., ValueEncoder]
#: integers, one decimal, two values, constant, all missing, narrow and far from zero, wider than any code
COLUMNS = ("counts", "tenths", "flag", "constant", "missing", "narrow", "huge")


def table(rows: int = 300) -> np.ndarray:
    rng = np.random.default_rng(5)
    columns = [rng.integers(0, 70_000, rows), rng.integers(-99, 999, rows) / 10, rng.integers(0, 2, rows)]
    columns += [np.full(rows, 3.0), np.full(rows, np.nan), 1.46e7 + rng.random(rows)]
    return np.stack([*columns, rng.uniform(-1e30, 1e30, rows)], axis=1)


def statistics() -> TrainingStatistics:
    return TrainingStatistics.from_arrays(table())


def of_columns(*columns: list[float]) -> TrainingStatistics:
    return TrainingStatistics.from_arrays(np.array(columns).T)


def scrambled(encoder: ValueEncoder) -> ValueEncoder:
    """In float64, with every parameter far from its start."""
    generator = torch.Generator().manual_seed(3)
    encoder = encoder.double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return encoder


def digits_of(code: int, base: int, length: int) -> list[int]:
    """Digits by repeated division, lowest first."""
    digits = []
    for _ in range(length):
        code, digit = divmod(code, base)
        digits.append(digit)
    assert code == 0
    return digits


def length_of(largest: int, base: int) -> int:
    return max(len(np.base_repr(largest, base)), 1)


def codes_of(known: TrainingStatistics, values: np.ndarray) -> np.ndarray:
    """`round(10^p (clip(x) - low))` with the largest p <= decimals whose codes fit in 31 bits."""
    codes = np.empty(values.shape, dtype=object)
    for field, (low, high, decimals) in enumerate(zip(known.low, known.high, known.decimals, strict=True)):
        places = int(decimals)
        while round(float(high - low) * 10.0**places) >= 2**31:
            places -= 1
        clipped = np.clip(values[:, field], low, high)
        codes[:, field] = [round(float(x - low) * 10.0**places) for x in clipped]
    return codes


def rows_of(encoder: ValueEncoder, known: TrainingStatistics, code: int, field: int, number: int) -> np.ndarray:
    """The digit vectors of one code in one base, `[positions, width]`, out of the flat table."""
    digit_table = encoder.tables[number]
    largest = codes_of(known, known.high[None])[0]
    lengths = [length_of(int(top), digit_table.base) for top in largest]
    first = sum(lengths[:field]) * digit_table.base
    digits = digits_of(code, digit_table.base, lengths[field])
    weight = digit_table.weight.detach().numpy()
    return np.stack([weight[first + k * digit_table.base + digit] for k, digit in enumerate(digits)])


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def lite_token(encoder: NaryDisLite, known: TrainingStatistics, code: int, field: int) -> np.ndarray:
    return np.concatenate([rows_of(encoder, known, code, field, n).sum(0) for n in range(len(encoder.tables))])


def attended_token(encoder: NaryDis, known: TrainingStatistics, code: int, field: int) -> np.ndarray:
    a = {name: p.detach().numpy() for name, p in encoder.digit_attention.named_parameters()}
    b = {name: p.detach().numpy() for name, p in encoder.base_attention.named_parameters()}
    systems = []
    for n in range(len(encoder.tables)):
        t = rows_of(encoder, known, code, field, n)
        scores = np.tanh(t @ a["weight"][field] + a["bias"][field]) @ a["query"][n, field]
        systems.append(softmax(scores) @ t)
    v = np.stack(systems)
    return softmax(np.tanh(v @ b["weight"][field] + b["bias"][field]) @ b["query"][0, field]) @ v


ORACLES = {NaryDisLite: lite_token, NaryDis: attended_token}


def check_formula(make: Make, token_of: Callable[..., np.ndarray]) -> None:
    known = statistics()
    encoder = scrambled(make(known, 0, 8))
    rows = np.nan_to_num(np.concatenate([table(12), known.low[None], known.high[None]]), nan=0.0)
    rows = np.concatenate([rows, np.full((2, len(COLUMNS)), [[-1e12], [1e12]])])
    codes = codes_of(known, rows)
    with torch.no_grad():
        tokens = encoder(torch.tensor(rows)).numpy()
    expected = [[token_of(encoder, known, int(code), i) for i, code in enumerate(row)] for row in codes]
    np.testing.assert_allclose(tokens, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("part", ORACLES)
def test_tokens_follow_the_formula(part: type) -> None:
    check_formula(part, ORACLES[part])


class PaddingLeaks(DigitTable):
    """Padded positions are read as leading zeros."""

    def forward(self, codes: Tensor) -> Tensor:
        self.present.fill_(True)
        return super().forward(codes)


class SharedPositions(DigitTable):
    """One vector per digit, whatever its position."""

    def vectors(self) -> Tensor:
        return self.weight[self.rows % self.base]


class HighestFirst(DigitTable):
    """Digits counted from the longest field's highest position."""

    def digits(self, codes: Tensor) -> Tensor:
        return super().digits(codes).flip(-1)


@pytest.mark.parametrize("part", ORACLES)
@pytest.mark.parametrize("broken", [PaddingLeaks, SharedPositions, HighestFirst], ids=lambda part: part.__name__)
def test_mutants_are_rejected(part: type, broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalarlens.encoders.nary.DigitTable", broken)
    with pytest.raises(AssertionError, match="Not equal"):
        check_formula(part, ORACLES[part])


class UniformAttention(NaryDis):
    """The attention over digits is replaced by their mean."""

    def digit_weights(self, values: Tensor) -> list[Tensor]:
        chosen = [digit_table(self.integer_code(values)).double() for digit_table in self.tables]
        return [slots / slots.sum(-1, keepdim=True) for slots in chosen]


def test_mutant_without_attention_is_rejected() -> None:
    with pytest.raises(AssertionError, match="Not equal"):
        check_formula(UniformAttention, attended_token)


@pytest.mark.parametrize(("base", "digits"), [(2, "110011"), (3, "1220"), (9, "56"), (10, "51")])
def test_digits_of_51(base: int, digits: str) -> None:
    found = DigitTable([51], base, width=1).digits(torch.tensor([[51]])).flatten().tolist()
    assert "".join(map(str, reversed(found))) == digits


def check_digits(part: type[DigitTable], code: int, base: int) -> None:
    digits = part([CODE_LIMIT - 1], base, width=1).digits(torch.tensor([[code]])).flatten().tolist()
    assert all(0 <= digit < base for digit in digits)
    assert sum(digit * base**k for k, digit in enumerate(digits)) == code


@given(code=st.integers(0, CODE_LIMIT - 1), base=st.integers(2, 40))
@example(code=CODE_LIMIT - 1, base=2)
@example(code=0, base=9)
@settings(max_examples=60, deadline=None)
def test_digits_rebuild_the_code(code: int, base: int) -> None:
    check_digits(DigitTable, code, base)


@pytest.mark.parametrize("base", [2, 3, 7, 9, 10])
def test_digits_are_exact_beside_every_multiple_of_a_power(base: int) -> None:
    codes = {m * base**k + shift for k in range(31) for m in range(1, base + 1) for shift in (-1, 0, 1)}
    kept = torch.tensor(sorted(code for code in codes if 0 <= code < CODE_LIMIT))
    digit_table = DigitTable([CODE_LIMIT - 1], base, width=1)
    digits = digit_table.digits(kept.unsqueeze(1)).squeeze(1)
    assert torch.equal((digits * digit_table.powers[:-1]).sum(-1), kept)
    assert int(digits.min()) == 0
    assert int(digits.max()) == base - 1


class SingleDigits(DigitTable):
    """Digits out of float32 quotients."""

    def digits(self, codes: Tensor) -> Tensor:
        return (codes.float().unsqueeze(-1) / self.powers[:-1]).floor().long() % self.base


def test_mutant_digits_are_rejected() -> None:
    with pytest.raises(AssertionError):
        check_digits(SingleDigits, 2**24 + 1, 2)


@pytest.mark.parametrize(
    ("column", "values", "codes"),
    [
        ([0.0, 23_159_456.0], [23_159_455.0, 16_777_217.0], [23_159_455, 16_777_217]),
        ([-0.5, 0.25, 1.25], [0.0, 1.26, -9.0], [50, 175, 0]),
        ([0.1, 0.3], [0.3, 0.2], [2, 1]),
        ([0.0, 0.12345, 5e8], [4e8 + 0.4, 1.0], [400_000_000, 1]),
        ([0.0, 0.5, 2e8], [1e8 + 0.25, 0.5], [1_000_000_002, 5]),
        ([0.0, 2.0**31 - 1], [2.0**31 - 1, 7.0], [2**31 - 1, 7]),
        ([0.0, 2.0**31], [2.0**31, 14.0], [214_748_365, 1]),
        ([-1e30, 1e30], [0.0, 1e300], [1_000_000_000, 2_000_000_000]),
        ([-8e307, 8e307], [8e307, 0.0], [1_600_000_000, 800_000_000]),
        ([3.0, 3.0], [3.0, 1e12], [0, 0]),
        ([np.nan, np.nan], [5.0, -1e12], [0, 0]),
        ([1.46e7, 1.46e7 + 1], [1.46e7 + 1, -np.inf], [1, 0]),
    ],
)
def test_codes(column: list[float], values: list[float], codes: list[int]) -> None:
    code = IntegerCode(of_columns(column))
    found = code(torch.tensor(values, dtype=torch.float64).unsqueeze(1))
    assert found.dtype == torch.int64
    assert found.flatten().tolist() == codes


@given(
    low=st.floats(-1e300, 1e300),
    width=st.floats(0, 1e300),
    decimals=st.integers(0, 4),
    share=st.floats(-1, 2),
)
@settings(max_examples=80, deadline=None)
def test_codes_always_fit(low: float, width: float, decimals: int, share: float) -> None:
    known = of_columns([low, low + width])
    known.decimals[:] = decimals
    code = int(IntegerCode(known)(torch.tensor([[low + width * share]], dtype=torch.float64)))
    top = int(IntegerCode(known)(torch.tensor(known.high[None])))
    assert 0 <= code <= top < CODE_LIMIT
    if (known.high - known.low).item() * 10.0**decimals >= CODE_LIMIT:
        assert top >= CODE_LIMIT // 11, "the code must not be scaled down further than it has to be"


def test_standardized_values_keep_four_decimals() -> None:
    values = np.random.default_rng(0).integers(0, 1000, (500, 1)).astype(float)
    known = TrainingStatistics.from_arrays(values)
    shared = known.standardized()
    z = known.standardize(values)
    codes = IntegerCode(shared)(torch.tensor(z))
    assert known.decimals[0] == 0
    np.testing.assert_array_equal(codes.numpy(), np.round((z - shared.low) * 1e4))


@pytest.mark.parametrize("part", ORACLES)
def test_same_code_same_bits(part: type) -> None:
    encoder = scrambled(part(of_columns([0.0, 900.0]), 0, 8))
    one, other = torch.tensor([[511.6], [17.2]]).double(), torch.tensor([[512.4], [16.8]]).double()
    assert torch.equal(encoder(one), encoder(other))
    assert not torch.equal(encoder(one), encoder(one - 1))


@pytest.mark.parametrize(("base", "k"), [(2, 0), (2, 5), (9, 1), (9, 3)])
def test_one_digit_moves_the_sum_by_two_rows(base: int, k: int) -> None:
    encoder = scrambled(NaryDisLite(of_columns([0.0, 9000.0]), 0, 4, bases=(base,)))
    values = torch.tensor([[0.0], [float(base**k)]]).double()
    tokens = encoder(values)[:, 0]
    rows = encoder.tables[0].weight[k * base : k * base + 2]
    torch.testing.assert_close(tokens[1] - tokens[0], rows[1] - rows[0], rtol=0, atol=1e-13)


def test_both_attentions_sum_to_one() -> None:
    encoder = scrambled(NaryDis(statistics(), 0, 8))
    values = torch.tensor(np.nan_to_num(table(50)))
    for weights, digit_table in zip(encoder.digit_weights(values), encoder.tables, strict=True):
        torch.testing.assert_close(weights.sum(-1), torch.ones(50, len(COLUMNS)).double(), rtol=0, atol=1e-12)
        assert torch.equal(weights > 0, digit_table(encoder.integer_code(values)))
    shares = encoder.base_weights(encoder.systems(values))
    torch.testing.assert_close(shares.sum(-1), torch.ones(50, len(COLUMNS)).double(), rtol=0, atol=1e-12)
    assert bool((shares > 0).all())


def test_without_queries_the_token_is_a_mean_of_means() -> None:
    known = statistics()
    encoder = scrambled(NaryDis(known, 0, 8))
    with torch.no_grad():
        encoder.digit_attention.query.zero_()
        encoder.base_attention.query.zero_()
    values = np.nan_to_num(table(9))
    codes = codes_of(known, values)
    expected = [
        [np.mean([rows_of(encoder, known, int(c), i, n).mean(0) for n in (0, 1)], 0) for i, c in enumerate(row)]
        for row in codes
    ]
    np.testing.assert_allclose(encoder(torch.tensor(values)).detach().numpy(), expected, rtol=0, atol=1e-12)


def test_the_order_of_positions_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = scrambled(NaryDis(statistics(), 0, 8))
    values = torch.tensor(np.nan_to_num(table(20)))
    expected = encoder(values)
    for digit_table in encoder.tables:
        positions = torch.randperm(digit_table.present.shape[1], generator=torch.Generator().manual_seed(1))
        slots = (positions[:, None] * digit_table.base + torch.arange(digit_table.base)).flatten()
        selected = digit_table(encoder.integer_code(values))[..., slots]
        monkeypatch.setattr(digit_table, "forward", lambda codes, selected=selected: selected)
        digit_table.rows = digit_table.rows[:, slots]
    torch.testing.assert_close(encoder(values), expected, rtol=0, atol=1e-12)


def test_only_the_rows_of_a_value_learn_from_it() -> None:
    known = statistics()
    encoder = NaryDisLite(known, 0, 8)
    values = known.high[None]
    encoder(torch.tensor(np.nan_to_num(values)))[0, :1].sum().backward()
    for digit_table in encoder.tables:
        code = int(codes_of(known, values)[0, 0])
        digits = digits_of(code, digit_table.base, length_of(code, digit_table.base))
        touched = digit_table.weight.grad.abs().sum(-1).nonzero().flatten().tolist()
        assert touched == [k * digit_table.base + digit for k, digit in enumerate(digits)]


@pytest.mark.parametrize("dim", [8, 16])
def test_parameter_counts(dim: int) -> None:
    known = statistics()
    n, h = len(COLUMNS), 16
    largest = [int(code) for code in codes_of(known, known.high[None])[0]]
    rows = {base: base * sum(length_of(code, base) for code in largest) for base in (2, 9)}

    def count(encoder: ValueEncoder) -> int:
        return sum(p.numel() for name, p in encoder.named_parameters() if name != "missing")

    assert count(NaryDisLite(known, 0, dim)) == (rows[2] + rows[9]) * dim // 2
    attention = 2 * n * (dim * h + h) + n * 2 * h + n * h
    assert count(NaryDis(known, 0, dim)) == (rows[2] + rows[9]) * dim + attention


@pytest.mark.parametrize("part", ORACLES)
def test_state_dict_is_the_whole_encoder(part: type) -> None:
    rng = np.random.default_rng(1)
    a, b = (TrainingStatistics.from_arrays(rng.uniform(*ends, (200, 2)).round()) for ends in ((0, 500), (-490, 9)))
    trained, other = scrambled(part(a, 0, 8)), scrambled(part(b, 0, 8))
    values = torch.linspace(-600, 600, 40).double().unsqueeze(1).repeat(1, 2)
    assert not torch.equal(trained(values), other(values))
    other.load_state_dict(trained.state_dict())
    assert torch.equal(trained(values), other(values))


@pytest.mark.parametrize("part", ORACLES)
def test_half_precision_keeps_the_code(part: type) -> None:
    encoder = part(of_columns([0.0, 23_159_456.0]), 0, 8).half().float()
    codes = encoder.integer_code(torch.tensor([[23_159_455.0]], dtype=torch.float64))
    assert codes.item() == 23_159_455


@pytest.mark.parametrize("part", ORACLES)
def test_exports_with_a_free_batch(part: type) -> None:
    encoder = scrambled(part(statistics(), 0, 8))
    values, context = torch.tensor(table(6)), torch.zeros(6, 0, 8).double()
    free = {0: torch.export.Dim("rows")}
    program = torch.export.export(encoder, (values, context), dynamic_shapes=(free, free)).module()
    for rows in (0, 1, 11):
        batch, none = torch.tensor(table(300)[:rows]), torch.zeros(rows, 0, 8).double()
        torch.testing.assert_close(program(batch, none), encoder(batch), rtol=0, atol=1e-12)


@pytest.mark.parametrize("part", ORACLES)
@pytest.mark.parametrize("bases", [(), (1,), (2, 0)])
def test_bad_bases(part: type, bases: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="bases"):
        part(statistics(), 0, 8, bases=bases)


def test_lite_needs_a_width_per_base() -> None:
    with pytest.raises(UsageError, match="embedding_dim=8"):
        NaryDisLite(statistics(), 0, 8, bases=(2, 3, 9))
