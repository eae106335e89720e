"""daes-gate, daes-gate-soft and daes-tran against NumPy formulas and torch's own Transformer layer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scalarlens.encoders.daes import DaesGate, DaesGateSoft, DaesTran, QuantileInterpolation
from scalarlens.errors import UsageError
from scalarlens.table.statistics import TrainingStatistics

Make = Callable[..., QuantileInterpolation]
PARTS = (DaesGate, DaesGateSoft, DaesTran)
COLUMNS = ("normal", "heavy", "zeros", "middle", "few", "constant", "missing", "narrow")
SPREAD = [COLUMNS.index(name) for name in COLUMNS if name not in ("constant", "missing")]
C, D, K = 5, 8, 17


def table(rows: int = 500) -> np.ndarray:
    """`zeros` is mostly its lowest value, `middle` mostly a value inside its range."""
    rng = np.random.default_rng(5)
    heavy, normal = rng.lognormal(0, 4, rows), rng.normal(0, 1, rows)
    zeros = np.where(rng.random(rows) < 0.9, 0.0, heavy)
    middle = np.where(rng.random(rows) < 0.98, 0.3, normal)
    columns = [
        normal,
        heavy,
        zeros,
        middle,
        rng.integers(0, 4, rows),
        np.full(rows, 3.0),
        np.full(rows, np.nan),
    ]
    return np.stack([*columns, 1.46e7 + rng.random(rows)], axis=1)


def statistics() -> TrainingStatistics:
    return TrainingStatistics.from_arrays(table())


def probes() -> np.ndarray:
    """Training values, both ends, and values far beyond them; without a missing one."""
    known = statistics()
    far = np.full((2, len(COLUMNS)), [[-1e12], [1e12]])
    return np.nan_to_num(np.concatenate([table(40), known.low[None], known.high[None], far]), nan=0.0)


def context(rows: int, seed: int = 1, n_categories: int = C) -> Tensor:
    return torch.randn(rows, n_categories, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scrambled(encoder: QuantileInterpolation) -> QuantileInterpolation:
    """In float64, with every parameter far from its start."""
    generator = torch.Generator().manual_seed(3)
    encoder = encoder.double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return encoder


def tokens_of(encoder: QuantileInterpolation, values: np.ndarray, category_tokens: Tensor) -> np.ndarray:
    with torch.no_grad():
        return encoder(torch.tensor(values), category_tokens).numpy()


def array(parameter: Tensor) -> np.ndarray:
    return parameter.detach().numpy()


def levels_of(values: np.ndarray, known: TrainingStatistics) -> np.ndarray:
    """Mid-rank ECDF: linear between distinct grid values, each at the middle of its levels."""
    j = np.arange(4097) / 4096
    columns = []
    for x, grid in zip(values.T, known.quantiles, strict=True):
        distinct = np.unique(grid)
        middle = [(j[grid == place][0] + j[grid == place][-1]) / 2 for place in distinct]
        columns.append(np.interp(x, distinct, middle))
    return np.stack(columns, axis=1)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def gate_logits(encoder: DaesGate | DaesGateSoft, category_tokens: Tensor) -> np.ndarray:
    gate, rows = encoder.gate, category_tokens.numpy().reshape(len(category_tokens), -1)
    c = rows @ array(gate.context_weight) + array(gate.context_bias)
    c = c / (1 + np.exp(-c))
    return np.stack([c @ array(g) for g in gate.weight], axis=1) + array(gate.bias)


def gate_weights(encoder: DaesGate, distance: np.ndarray, category_tokens: Tensor) -> np.ndarray:
    gated = np.maximum(0, 1 - distance) / (1 + np.exp(-gate_logits(encoder, category_tokens)))
    return gated / gated.sum(-1, keepdims=True)


def soft_weights(encoder: DaesGateSoft, distance: np.ndarray, category_tokens: Tensor) -> np.ndarray:
    width = np.exp(array(encoder.log_width))[:, None]
    return softmax(gate_logits(encoder, category_tokens) - distance**2 / (2 * width**2))


def transformer(encoder: DaesTran) -> tuple[nn.TransformerEncoderLayer, nn.LayerNorm]:
    """The same layer as torch ships it, with the encoder's weights."""
    own = encoder.attention
    layer = nn.TransformerEncoderLayer(D, 2, own.hidden.out_features, 0.0, norm_first=True, batch_first=True).double()
    names = {
        "self_attn.in_proj_weight": own.attention_input.weight,
        "self_attn.in_proj_bias": own.attention_input.bias,
        "self_attn.out_proj.weight": own.attention_output.weight,
        "self_attn.out_proj.bias": own.attention_output.bias,
        "linear1.weight": own.hidden.weight,
        "linear1.bias": own.hidden.bias,
        "linear2.weight": own.output.weight,
        "linear2.bias": own.output.bias,
        "norm1.weight": own.attention_norm.weight,
        "norm1.bias": own.attention_norm.bias,
        "norm2.weight": own.hidden_norm.weight,
        "norm2.bias": own.hidden_norm.bias,
    }
    layer.load_state_dict(names)
    return layer, own.final_norm


def attention_weights(encoder: DaesTran, distance: np.ndarray, category_tokens: Tensor) -> np.ndarray:
    layer, norm = transformer(encoder)
    c = array(norm(layer(category_tokens + encoder.attention.fields)).mean(1))
    heat = np.exp(array(encoder.log_temperature))[:, None]
    logits = np.empty_like(distance)
    for field, (query, key) in enumerate(zip(array(encoder.queries), array(encoder.keys), strict=True)):
        logits[:, field] = [(key @ (query @ one)) / D**0.5 for one in c]
    base = np.log(softmax(-distance / heat))
    return softmax(base + logits)


ORACLES = {DaesGate: gate_weights, DaesGateSoft: soft_weights, DaesTran: attention_weights}


def check_formula(make: Make, weights_of: Callable[..., np.ndarray]) -> None:
    encoder = scrambled(make(statistics(), C, D))
    values, rows = probes(), context(len(probes()))
    distance = np.abs(levels_of(values, statistics())[..., None] * (K - 1) - np.arange(K))
    expected = np.einsum("bnk,nkd->bnd", weights_of(encoder, distance, rows), array(encoder.nodes))
    np.testing.assert_allclose(tokens_of(encoder, values, rows), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("part", PARTS)
def test_tokens_follow_the_formula(part: type) -> None:
    check_formula(part, ORACLES[part])


class NotRenormalized(DaesGate):
    """The gated hats are left as they are."""

    def weights(self, values: Tensor, category_tokens: Tensor) -> Tensor:
        hats = (1 - self.distances(values)).clamp(min=0)
        return hats * torch.sigmoid(self.gate(category_tokens))


class LaplacianKernel(DaesGateSoft):
    """An absolute distance where the square belongs."""

    def distances(self, values: Tensor) -> Tensor:
        return super().distances(values).sqrt()


class FieldBlind(DaesTran):
    """The categorical fields are not told apart."""

    def weights(self, values: Tensor, category_tokens: Tensor) -> Tensor:
        return super().weights(values, category_tokens - self.attention.fields)


@pytest.mark.parametrize("mutant", [NotRenormalized, LaplacianKernel, FieldBlind], ids=lambda part: part.__name__)
def test_mutant_formulas_are_rejected(mutant: type) -> None:
    with pytest.raises(AssertionError, match="Not equal"):
        check_formula(mutant, ORACLES[mutant.__base__])


def test_levels_are_mid_ranks() -> None:
    rows, known = table(), statistics()
    levels = DaesGate(known, 0, D).level(torch.tensor(np.nan_to_num(rows))).numpy()
    for name in ("normal", "heavy", "zeros", "middle", "few", "constant", "narrow"):
        column = rows[:, COLUMNS.index(name)]
        ranks = [((column < x).mean() + (column <= x).mean()) / 2 for x in column]
        # One row of 500, and one cell of the grid on either side of a tie.
        np.testing.assert_allclose(levels[:, COLUMNS.index(name)], ranks, rtol=0, atol=1 / 500 + 1 / 4096)


def test_levels_are_flat_beyond_the_range() -> None:
    known = statistics()
    level = DaesGate(known, 0, D).level
    ends = level(torch.tensor(np.stack([known.low, known.high])))
    for value, end in ((-1e12, 0), (-np.inf, 0), (1e12, 1), (np.inf, 1)):
        assert torch.equal(level(torch.full((1, len(COLUMNS)), value, dtype=torch.float64))[0], ends[end])
    assert torch.equal(ends[0, :2], torch.zeros(2).double())
    assert ends[0, COLUMNS.index("zeros")].item() == pytest.approx(0.45, abs=0.02)
    assert torch.equal(ends[:, COLUMNS.index("constant")], torch.full((2,), 0.5).double())


def check_weights_sum_to_one(make: Make, dtype: torch.dtype) -> None:
    """Also where all gates of a value underflow together."""
    encoder = scrambled(make(statistics(), C, D))
    for bias in (0.0, -1e4, 1e4):
        if isinstance(encoder, DaesGate):
            nn.init.constant_(encoder.gate.bias, bias)
        weights = encoder.to(dtype).weights(torch.tensor(probes()), context(len(probes())).to(dtype))
        assert weights.shape == (len(probes()), len(COLUMNS), K)
        assert bool((weights >= 0).all())
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", PARTS)
def test_weights_sum_to_one(part: type, dtype: torch.dtype) -> None:
    check_weights_sum_to_one(part, dtype)


class PlainQuotient(DaesGate):
    """The renormalisation as a quotient."""

    def weights(self, values: Tensor, category_tokens: Tensor) -> Tensor:
        hats = (1 - self.distances(values)).clamp(min=0).to(category_tokens.dtype)
        gated = hats * torch.sigmoid(self.gate(category_tokens))
        return gated / gated.sum(-1, keepdim=True)


def test_mutant_quotient_is_rejected() -> None:
    with pytest.raises(AssertionError):
        check_weights_sum_to_one(PlainQuotient, torch.float32)


@pytest.mark.parametrize("part", PARTS)
def test_gradients_stay_finite_where_gates_underflow(part: type) -> None:
    encoder = scrambled(part(statistics(), C, D)).float()
    if hasattr(encoder, "gate"):
        nn.init.constant_(encoder.gate.bias, -1e4)
    rows = context(len(probes())).float().requires_grad_()
    encoder(torch.tensor(probes()), rows).square().sum().backward()
    assert bool(rows.grad.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for name, p in encoder.named_parameters() if name != "missing")


@pytest.mark.parametrize("part", PARTS)
def test_the_context_says_nothing_at_the_start(part: type) -> None:
    encoder = part(statistics(), C, D).double()
    values = probes()
    one, other = (tokens_of(encoder, values, context(len(values), seed)) for seed in (1, 2))
    np.testing.assert_array_equal(one, other)
    distance = np.abs(levels_of(values, statistics())[..., None] * (K - 1) - np.arange(K))
    static = {
        DaesGate: np.maximum(0, 1 - distance),
        DaesGateSoft: softmax(-(distance**2) / 2),
        DaesTran: softmax(-distance),
    }[part]
    np.testing.assert_allclose(one, np.einsum("bnk,nkd->bnd", static, array(encoder.nodes)), rtol=0, atol=1e-10)


def check_other_numbers_are_not_read(make: Make) -> None:
    encoder = scrambled(make(statistics(), C, D))
    values, rows = probes(), context(len(probes()))
    expected = tokens_of(encoder, values, rows)
    shuffled = np.random.default_rng(0).permuted(values, axis=0)
    for others in (shuffled, np.full_like(values, np.nan), np.full_like(values, 1e12)):
        for field in range(len(COLUMNS)):
            replaced = others.copy()
            replaced[:, field] = values[:, field]
            np.testing.assert_array_equal(tokens_of(encoder, replaced, rows)[:, field], expected[:, field])


@pytest.mark.parametrize("part", PARTS)
def test_other_numbers_are_not_read(part: type) -> None:
    check_other_numbers_are_not_read(part)


class PeeksAtNeighbours(DaesGate):
    """The mean level of the row slips into the context."""

    def weights(self, values: Tensor, category_tokens: Tensor) -> Tensor:
        leak = self.level(values).mean(1)[:, None, None]
        return super().weights(values, category_tokens + 1e-3 * leak)


def test_mutant_that_reads_neighbours_is_rejected() -> None:
    with pytest.raises(AssertionError, match="not equal"):
        check_other_numbers_are_not_read(PeeksAtNeighbours)


def check_categories_are_read(make: Make) -> None:
    """Replacing one categorical token of one row moves that row's tokens and no other."""
    encoder = scrambled(make(statistics(), C, D))
    values, rows = probes()[:6], context(6)
    expected = tokens_of(encoder, values, rows)
    for category in range(C):
        replaced = rows.clone()
        replaced[2, category] = context(1, seed=9)[0, 0]
        moved = (tokens_of(encoder, values, replaced) != expected).any(-1)
        assert not moved[[0, 1, 3, 4, 5]].any()
        assert moved[2, COLUMNS.index("normal")]
        assert moved[2, COLUMNS.index("narrow")]


@pytest.mark.parametrize("part", PARTS)
def test_categories_are_read(part: type) -> None:
    check_categories_are_read(part)


class FirstCategoryOnly(DaesGateSoft):
    """All but the first categorical field are dropped."""

    def weights(self, values: Tensor, category_tokens: Tensor) -> Tensor:
        return super().weights(values, category_tokens * (torch.arange(C) == 0)[:, None])


def test_mutant_that_drops_categories_is_rejected() -> None:
    with pytest.raises(AssertionError):
        check_categories_are_read(FirstCategoryOnly)


def test_a_gate_cannot_move_a_token_at_an_anchor() -> None:
    uniform = TrainingStatistics.from_arrays(np.linspace(0.0, 16.0, 4097)[:, None])
    at_anchor, between = np.array([[5.0]]), np.array([[5.5]])
    for part, stays in ((DaesGate, True), (DaesGateSoft, False)):
        encoder = scrambled(part(uniform, C, D))
        one, other = (tokens_of(encoder, at_anchor, context(1, seed)) for seed in (1, 2))
        assert np.array_equal(one, other) is stays
        one, other = (tokens_of(encoder, between, context(1, seed)) for seed in (1, 2))
        assert not np.array_equal(one, other)


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_value_is_its_own_token_in_any_context(part: type) -> None:
    encoder = scrambled(part(statistics(), C, D))
    absent = np.full((3, len(COLUMNS)), np.nan)
    for seed in (1, 2):
        tokens = tokens_of(encoder, absent, context(3, seed))
        np.testing.assert_array_equal(tokens, np.broadcast_to(array(encoder.missing), tokens.shape))


@pytest.mark.parametrize("part", PARTS)
def test_categorical_embeddings_learn_through_the_encoder(part: type) -> None:
    encoder = scrambled(part(statistics(), C, D))
    rows = context(4).requires_grad_()
    encoder(torch.tensor(probes()[:4]), rows).sum().backward()
    assert bool((rows.grad != 0).any(-1).all())


def check_affine(make: Make) -> None:
    """Refit in other units and keep the parameters: the tokens stay."""
    columns = table()[:, [i for i, name in enumerate(COLUMNS) if name != "narrow"]]
    encoder = scrambled(make(TrainingStatistics.from_arrays(columns), C, D)).float()
    rows = context(len(columns)).float()
    expected = tokens_of(encoder, columns, rows)
    units = np.random.default_rng(0).normal(size=(6, 2)) * [2, 20]
    for scale, shift in [(1e4, 0.0), *zip(np.exp(units[:, 0]), units[:, 1], strict=True)]:
        moved = make(TrainingStatistics.from_arrays(columns * scale + shift), C, D)
        moved.load_state_dict(dict(encoder.named_parameters()), strict=False)
        np.testing.assert_allclose(tokens_of(moved, columns * scale + shift, rows), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("part", PARTS)
def test_units_do_not_matter(part: type) -> None:
    check_affine(part)


class InUnits(DaesGate):
    """The value itself takes the place of its level."""

    def distances(self, values: Tensor) -> Tensor:
        return (values.clamp(0, 16).unsqueeze(-1) - torch.arange(self.anchors)).abs()


def test_mutant_in_units_is_rejected() -> None:
    with pytest.raises(AssertionError, match="Not equal"):
        check_affine(InUnits)


def test_the_order_of_categories_does_not_matter_if_their_vectors_move_along() -> None:
    encoder = scrambled(DaesTran(statistics(), C, D))
    values, rows = probes(), context(len(probes()))
    expected = tokens_of(encoder, values, rows)
    order = torch.tensor([3, 0, 4, 1, 2])
    with torch.no_grad():
        encoder.attention.fields.copy_(encoder.attention.fields[order].clone())
    np.testing.assert_allclose(tokens_of(encoder, values, rows[:, order]), expected, rtol=0, atol=1e-12)
    assert np.abs(tokens_of(encoder, values, rows) - expected).max() > 1e-3


@pytest.mark.parametrize(("part", "count"), [(DaesGate, 24_173), (DaesGateSoft, 24_186), (DaesTran, 13_085)])
def test_parameter_count_on_the_shape_of_criteo(part: type, count: int) -> None:
    encoder = part(TrainingStatistics.from_arrays(np.random.default_rng(0).normal(size=(50, 13))), 26, 16)
    assert sum(p.numel() for name, p in encoder.named_parameters() if name != "missing") == count


@pytest.mark.parametrize("part", PARTS)
def test_without_categories(part: type) -> None:
    encoder = scrambled(part(statistics(), 0, D))
    values = probes()
    tokens = tokens_of(encoder, values, context(len(values), n_categories=0))
    assert tokens.shape == (len(values), len(COLUMNS), D)
    assert np.isfinite(tokens).all()
    assert (tokens[:20, SPREAD].std(0) > 0).any()
    assert tokens_of(encoder, values[:0], context(0, n_categories=0)).shape == (0, len(COLUMNS), D)


@pytest.mark.parametrize("part", PARTS)
def test_state_dict_is_the_whole_encoder(part: type) -> None:
    trained = scrambled(part(statistics(), C, D))
    other = scrambled(part(TrainingStatistics.from_arrays(table()[:, ::-1] * 2 + 1), C, D))
    values, rows = probes(), context(len(probes()))
    expected = tokens_of(trained, values, rows)
    assert not np.array_equal(tokens_of(other, values, rows), expected)
    other.load_state_dict(trained.state_dict())
    np.testing.assert_array_equal(tokens_of(other, values, rows), expected)


@pytest.mark.parametrize("part", PARTS)
def test_half_precision_keeps_the_levels(part: type) -> None:
    encoder = part(statistics(), C, D)
    values = torch.tensor(probes())
    expected = encoder.distances(values)
    assert torch.equal(encoder.half().float().distances(values), expected)


@pytest.mark.parametrize("n_categories", [0, C])
@pytest.mark.parametrize("part", PARTS)
def test_exports_with_a_free_batch(part: type, n_categories: int) -> None:
    encoder = scrambled(part(statistics(), n_categories, D))
    free = {0: torch.export.Dim("rows")}
    example = torch.tensor(probes()[:6]), context(6, n_categories=n_categories)
    program = torch.export.export(encoder, example, dynamic_shapes=(free, free)).module()
    for rows in (0, 1, 11):
        batch = torch.tensor(probes()[:rows]), context(rows, n_categories=n_categories)
        torch.testing.assert_close(program(*batch), encoder(*batch), rtol=0, atol=1e-12)


@pytest.mark.parametrize("part", PARTS)
def test_an_anchor_is_not_enough(part: type) -> None:
    with pytest.raises(UsageError, match="at least 2"):
        part(statistics(), C, D, anchors=1)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(UsageError, match="heads=3"):
        DaesTran(statistics(), C, D, heads=3)
