"""Every backbone against a formula of its own, and what all promise: tokens only, rows apart, any size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from scalarlens.backbones import Backbone, Tower, backbones, build
from scalarlens.backbones.autoint import AutoInt, FieldAttention
from scalarlens.backbones.blocks import LinearBranch, PairSum
from scalarlens.backbones.dcn import Dcn
from scalarlens.backbones.dcnv2 import DcnV2
from scalarlens.backbones.deepfm import DeepFm
from scalarlens.backbones.dnn import Dnn
from scalarlens.backbones.fibinet import FiBiNet, FieldImportance, PairwiseBilinear
from scalarlens.backbones.linear import LinearConsumer
from scalarlens.backbones.nfm import Nfm
from scalarlens.backbones.pnn import InnerProducts, Pnn
from scalarlens.backbones.widedeep import WideDeep
from scalarlens.encoders.base import NumericalEncoder
from scalarlens.errors import UsageError
from scalarlens.model import CtrModel
from scalarlens.table.statistics import TrainingStatistics

Arrays = dict[str, np.ndarray]
Make = Callable[[int, int, int, Tower], Backbone]

N_VALUES, N_CATEGORIES, DIM, ROWS = 3, 2, 4, 7
TOWER = Tower(hidden=(6, 5))

quick = hypothesis.settings(max_examples=25, deadline=None)
sizes = st.tuples(st.integers(0, 4), st.integers(1, 7), st.integers(1, 5), st.integers(0, 2**31))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scrambled(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module in float64 evaluation mode with normal numbers for parameters: no bias hides at zero."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def scrambled_backbone(make: Make, n_values: int = N_VALUES, n_categories: int = N_CATEGORIES) -> Backbone:
    backbone = scrambled(make(n_values, n_categories, DIM, TOWER))
    assert isinstance(backbone, Backbone)
    return backbone


def inputs_of(n_values: int = N_VALUES, n_categories: int = N_CATEGORIES, rows: int = ROWS) -> tuple[Tensor, ...]:
    """value_tokens, category_tokens, category_weights."""
    return (
        normal(rows, n_values, DIM, seed=1),
        normal(rows, n_categories, DIM, seed=2),
        normal(rows, n_categories, seed=3),
    )


# --- an independent formula for every backbone ---


def np_layers(p: Arrays, prefix: str, x: np.ndarray, last_relu: bool) -> np.ndarray:
    numbers = sorted({int(name.split(".")[-2]) for name in p if name.startswith(prefix + ".")})
    for number in numbers:
        x = x @ p[f"{prefix}.{number}.weight"].T + p[f"{prefix}.{number}.bias"]
        if last_relu or number != numbers[-1]:
            x = np.where(x > 0, x, 0.0)
    return x


def np_mlp(p: Arrays, x: np.ndarray) -> np.ndarray:
    return np_layers(p, "mlp", x, last_relu=False)[:, 0]


def np_head(p: Arrays, x: np.ndarray) -> np.ndarray:
    return x @ p["head.weight"][0] + p["head.bias"][0]


def np_linear_branch(p: Arrays, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    u = p["linear.weight"].reshape(values.shape[1], values.shape[2])
    logits = np.full(len(values), p["linear.bias"][0])
    for i in range(values.shape[1]):
        logits = logits + values[:, i] @ u[i]
    return logits + weights.sum(1)


def np_pair_sum(z: np.ndarray) -> np.ndarray:
    total = np.zeros((z.shape[0], z.shape[2]))
    for f in range(z.shape[1]):
        for g in range(f + 1, z.shape[1]):
            total += z[:, f] * z[:, g]
    return total


def np_attention(p: Arrays, prefix: str, z: np.ndarray, heads: int) -> np.ndarray:
    maps = {name: z @ p[f"{prefix}.{name}.weight"].T for name in ("query", "key", "value", "residual")}
    width = z.shape[-1] // heads
    out = np.empty_like(z)
    for b in range(len(z)):
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            scores = maps["query"][b][:, part] @ maps["key"][b][:, part].T / np.sqrt(width)
            weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            out[b][:, part] = weights @ maps["value"][b][:, part]
    return np.maximum(out + maps["residual"], 0.0)


def np_bilinear(weight: np.ndarray, z: np.ndarray) -> np.ndarray:
    pairs = combinations(range(z.shape[1]), 2)
    return np.concatenate([(z[:, f] @ weight[:, k]) * z[:, g] for k, (f, g) in enumerate(pairs)], axis=1)


def np_dnn(p: Arrays, values: np.ndarray, categories: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np_mlp(p, flat(values, categories))


def np_linear(p: Arrays, values: np.ndarray, categories: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np_head(p, flat(values, categories))


def np_deepfm(p: Arrays, values: np.ndarray, categories: np.ndarray, weights: np.ndarray) -> np.ndarray:
    fm = np_pair_sum(np.concatenate([values, categories], 1)).sum(1)
    return np_linear_branch(p, values, weights) + fm + np_mlp(p, flat(values, categories))


def np_widedeep(p: Arrays, values: np.ndarray, categories: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np_linear_branch(p, values, weights) + np_mlp(p, flat(values, categories))


def np_nfm(p: Arrays, values: np.ndarray, categories: np.ndarray, weights: np.ndarray) -> np.ndarray:
    pooled = np_pair_sum(np.concatenate([values, categories], 1))
    return np_linear_branch(p, values, weights) + np_mlp(p, pooled)


def np_pnn(p: Arrays, values: np.ndarray, categories: np.ndarray, weights: np.ndarray) -> np.ndarray:
    z = np.concatenate([values, categories], 1)
    products = [(z[:, f] * z[:, g]).sum(1) for f, g in combinations(range(z.shape[1]), 2)]
    return np_mlp(p, np.concatenate([flat(values, categories), np.stack(products, 1)], 1))


def np_dcn(p: Arrays, values: np.ndarray, categories: np.ndarray, weights: np.ndarray) -> np.ndarray:
    x0 = x = flat(values, categories)
    for layer in range(3):
        x = x0 * (x * p[f"crosses.{layer}.weight"][0]).sum(1, keepdims=True) + p["biases"][layer] + x
    return np_head(p, np.concatenate([x, np_layers(p, "deep", x0, last_relu=True)], 1))


def np_dcnv2(p: Arrays, values: np.ndarray, categories: np.ndarray, weights: np.ndarray) -> np.ndarray:
    x0 = x = flat(values, categories)
    for layer in range(3):
        x = x0 * (x @ p[f"crosses.{layer}.weight"].T + p[f"crosses.{layer}.bias"]) + x
    return np_head(p, np.concatenate([x, np_layers(p, "deep", x0, last_relu=True)], 1))


def np_autoint(p: Arrays, values: np.ndarray, categories: np.ndarray, weights: np.ndarray) -> np.ndarray:
    a = z = np.concatenate([values, categories], 1)
    for layer in range(3):
        a = np_attention(p, f"attention.{layer}", a, heads=2)
    return np_head(p, a.reshape(len(z), -1)) + np_mlp(p, flat(values, categories))


def np_fibinet(p: Arrays, values: np.ndarray, categories: np.ndarray, weights: np.ndarray) -> np.ndarray:
    z = np.concatenate([values, categories], 1)
    squeezed = np.maximum(z.mean(2) @ p["importance.excitation.0.weight"].T, 0.0)
    scale = np.maximum(squeezed @ p["importance.excitation.2.weight"].T, 0.0)
    plain = np_bilinear(p["bilinear.weight"], z)
    rescaled = np_bilinear(p["rescaled_bilinear.weight"], z * scale[:, :, None])
    return np_mlp(p, np.concatenate([plain, rescaled], 1))


def flat(values: np.ndarray, categories: np.ndarray) -> np.ndarray:
    return np.concatenate([values.reshape(len(values), -1), categories.reshape(len(values), -1)], 1)


# --- mutants, each one slip away from the real thing ---


class CategoriesFirst(Dnn):
    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        return self.score(torch.cat([category_tokens, value_tokens], dim=1))


class NoBias(LinearConsumer):
    def score(self, tokens: Tensor) -> Tensor:
        return super().score(tokens) - self.head.bias


class FieldsPairedWithThemselves(PairSum):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.sum(1).square() / 2


class PairsCountedTwice(PairSum):
    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * super().forward(tokens)


class DeepFmCountedTwice(DeepFm):
    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.pair_sum = PairsCountedTwice()


class NfmWithSelfPairs(Nfm):
    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.pair_sum = FieldsPairedWithThemselves()


class CategoryWeightsForgotten(WideDeep):
    def forward(self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor | None = None) -> Tensor:
        assert category_weights is not None
        return super().forward(value_tokens, category_tokens, torch.zeros_like(category_weights))


class ColumnByColumn(InnerProducts):
    def __init__(self, n_fields: int) -> None:
        super().__init__(n_fields)
        right, left = torch.tril_indices(n_fields, n_fields, offset=-1)
        self.pairs = left * n_fields + right


class PnnColumnByColumn(Pnn):
    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.products = ColumnByColumn(self.n_fields)


class BiasInsideProduct(Dcn):
    def cross(self, first: Tensor) -> Tensor:
        crossed = first
        for weight, bias in zip(self.crosses, self.biases, strict=True):
            crossed = first * (weight(crossed) + bias) + crossed
        return crossed


class CrossedWithItself(DcnV2):
    def score(self, tokens: Tensor) -> Tensor:
        first = crossed = tokens.flatten(1)
        for cross in self.crosses:
            crossed = crossed * cross(crossed) + crossed
        return self.head(torch.cat([crossed, self.deep(first)], dim=-1)).squeeze(-1)


class Unscaled(FieldAttention):
    def weights(self, tokens: Tensor) -> Tensor:
        query, key = self._per_head(self.query(tokens)), self._per_head(self.key(tokens))
        return torch.softmax(query @ key.transpose(-1, -2), dim=-1)


class AutoIntUnscaled(AutoInt):
    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.attention = nn.Sequential(*(Unscaled(embedding_dim, 2) for _ in range(3)))


class SharedBilinear(FiBiNet):
    def score(self, tokens: Tensor) -> Tensor:
        rescaled = tokens * self.importance(tokens).unsqueeze(-1)
        return self.mlp(torch.cat([*self.bilinear(tokens), *self.bilinear(rescaled)], dim=-1)).squeeze(-1)


@dataclass(frozen=True)
class Case:
    """A backbone, its formula, a mutant of it, and the modules whose outputs are its branches."""

    part: type[Backbone]
    formula: Callable[[Arrays, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    mutant: type[Backbone]
    branches: tuple[str, ...]


CASES = {
    "autoint": Case(AutoInt, np_autoint, AutoIntUnscaled, ("attention", "mlp")),
    "dcn": Case(Dcn, np_dcn, BiasInsideProduct, ("crosses.2", "deep")),
    "dcnv2": Case(DcnV2, np_dcnv2, CrossedWithItself, ("crosses.2", "deep")),
    "deepfm": Case(DeepFm, np_deepfm, DeepFmCountedTwice, ("linear", "pair_sum", "mlp")),
    "dnn": Case(Dnn, np_dnn, CategoriesFirst, ("mlp",)),
    "fibinet": Case(FiBiNet, np_fibinet, SharedBilinear, ("bilinear", "rescaled_bilinear", "importance", "mlp")),
    "linear": Case(LinearConsumer, np_linear, NoBias, ("head",)),
    "nfm": Case(Nfm, np_nfm, NfmWithSelfPairs, ("linear", "pair_sum", "mlp")),
    "pnn": Case(Pnn, np_pnn, PnnColumnByColumn, ("products", "mlp")),
    "widedeep": Case(WideDeep, np_widedeep, CategoryWeightsForgotten, ("linear", "mlp")),
}
every_backbone = pytest.mark.parametrize("name", CASES)


def assert_close(actual: Tensor, expected: np.ndarray, within: float = 1e-10) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=0, atol=within)


def check_formula(make: Make, case: Case) -> None:
    backbone = scrambled_backbone(make)
    inputs = inputs_of()
    parameters = {name: tensor.numpy() for name, tensor in backbone.state_dict().items()}
    logits = backbone(*inputs)
    assert logits.shape == (ROWS,)
    assert_close(logits, case.formula(parameters, *(tokens.numpy() for tokens in inputs)))


@every_backbone
def test_equals_its_formula(name: str) -> None:
    case = CASES[name]
    assert backbones.get(name) is case.part
    check_formula(case.part, case)
    with pytest.raises(AssertionError):
        check_formula(case.mutant, case)


# --- the pieces ---


def check_pair_sum(pair_sum: PairSum, rows: int, n_fields: int, dim: int, seed: int) -> None:
    tokens = normal(rows, n_fields, dim, seed=seed)
    assert_close(pair_sum(tokens), np_pair_sum(tokens.numpy()))


@quick
@given(sizes)
def test_pair_sum_is_the_double_loop(size: tuple[int, int, int, int]) -> None:
    check_pair_sum(PairSum(), *size)


@pytest.mark.parametrize("mutant", [FieldsPairedWithThemselves, PairsCountedTwice])
def test_pair_sum_rejects(mutant: type[PairSum]) -> None:
    with pytest.raises(AssertionError):
        check_pair_sum(mutant(), 3, 4, 2, 0)


def test_pair_sum_of_one_field_is_zero() -> None:
    assert PairSum()(normal(ROWS, 1, DIM) * 1e5).tolist() == [[0.0] * DIM] * ROWS
    assert FieldsPairedWithThemselves()(normal(ROWS, 1, DIM)).any()


def test_pair_sum_cancels_in_float32_beside_a_large_token() -> None:
    """The hazard that `PairSum` declares: known, and not to be mistaken for a fault of an encoder."""
    tokens = torch.tensor([[[1e5], [1e-3], [1e-3]]], dtype=torch.float64)
    exact = np_pair_sum(tokens.numpy())
    relative = abs(PairSum()(tokens.float()).double().numpy() - exact) / exact
    assert relative.item() > 0.5
    assert_close(PairSum()(tokens) / exact.item(), np.ones((1, 1)), within=1e-6)


def check_products(products: nn.Module, rows: int, n_fields: int, dim: int, seed: int) -> None:
    tokens = normal(rows, n_fields, dim, seed=seed)
    gram = tokens.numpy() @ tokens.numpy().transpose(0, 2, 1)
    assert_close(products(tokens), gram[:, *np.triu_indices(n_fields, 1)])


@quick
@given(sizes)
def test_products_are_the_strict_upper_triangle_row_by_row(size: tuple[int, int, int, int]) -> None:
    check_products(InnerProducts(size[1]), *size)


def test_products_reject_another_order() -> None:
    with pytest.raises(AssertionError):
        check_products(ColumnByColumn(4), 2, 4, 3, 0)


def test_products_keep_their_index_out_of_the_state() -> None:
    products = InnerProducts(4)
    assert products.pairs.dtype == torch.int64
    assert products.state_dict() == {}
    assert products.half().pairs.tolist() == [1, 2, 3, 6, 7, 11]


class LastPairOnly(DcnV2):
    """A cross layer that forgets what came in."""

    def score(self, tokens: Tensor) -> Tensor:
        first = crossed = tokens.flatten(1)
        for cross in self.crosses:
            crossed = first * cross(crossed)
        return self.head(torch.cat([crossed, self.deep(first)], dim=-1)).squeeze(-1)


def check_doubling(part: type[DcnV2]) -> None:
    """With W = 0 and b = 1 one layer doubles `x_0`; a head that sums the cross part shows it."""
    backbone = part(N_VALUES, N_CATEGORIES, DIM, TOWER, cross_layers=1).double()
    width = backbone.n_fields * DIM
    with torch.no_grad():
        backbone.crosses[0].weight.zero_()
        backbone.crosses[0].bias.fill_(1.0)
        backbone.head.weight.copy_(torch.cat([torch.ones(width), torch.zeros(TOWER.hidden[-1])]))
        backbone.head.bias.zero_()
    values, categories, _ = inputs_of()
    assert_close(backbone(values, categories), 2 * flat(values.numpy(), categories.numpy()).sum(1))


def test_dcnv2_layer_doubles() -> None:
    check_doubling(DcnV2)
    with pytest.raises(AssertionError):
        check_doubling(LastPairOnly)


def check_cross(part: type[Dcn]) -> None:
    """`x_2` written out component by component."""
    backbone = part(1, 1, 2, TOWER, cross_layers=2)
    scrambled(backbone)
    w = [cross.weight[0].tolist() for cross in backbone.crosses]
    b = backbone.biases.tolist()
    x0 = [0.5, -1.25, 2.0, 0.75]
    x1 = [x0[k] * sum(w[0][m] * x0[m] for m in range(4)) + b[0][k] + x0[k] for k in range(4)]
    x2 = [x0[k] * sum(w[1][m] * x1[m] for m in range(4)) + b[1][k] + x1[k] for k in range(4)]
    assert_close(backbone.cross(torch.tensor([x0], dtype=torch.float64)), np.array([x2]))


def test_dcn_cross_component_by_component() -> None:
    check_cross(Dcn)
    with pytest.raises(AssertionError):
        check_cross(BiasInsideProduct)


class OverQueries(FieldAttention):
    """The softmax over the wrong axis."""

    def weights(self, tokens: Tensor) -> Tensor:
        query, key = self._per_head(self.query(tokens)), self._per_head(self.key(tokens))
        return torch.softmax(query @ key.transpose(-1, -2) / self.head_width**0.5, dim=-2)


class WithPositions(FieldAttention):
    """An attention that knows where a field stands."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens + torch.arange(tokens.shape[1])[:, None])


def check_attention_weights(part: type[FieldAttention]) -> None:
    tokens = normal(ROWS, 5, DIM)
    attention = scrambled(part(DIM, 2))
    weights = attention.weights(tokens)
    assert weights.shape == (ROWS, 2, 5, 5)
    assert (weights > 0).all()
    assert_close(weights.sum(-1), np.ones((ROWS, 2, 5)))


def check_attention_equivariance(part: type[FieldAttention], order: list[int]) -> None:
    tokens = normal(ROWS, len(order), DIM)
    attention = scrambled(part(DIM, 2))
    assert_close(attention(tokens[:, order]), attention(tokens)[:, order].detach().numpy())


def test_attention_weights_sum_to_one() -> None:
    check_attention_weights(FieldAttention)
    with pytest.raises(AssertionError):
        check_attention_weights(OverQueries)


@quick
@given(st.permutations(range(5)))
def test_attention_follows_a_permutation_of_fields(order: list[int]) -> None:
    check_attention_equivariance(FieldAttention, order)


def test_attention_equivariance_rejects_positions() -> None:
    with pytest.raises(AssertionError):
        check_attention_equivariance(WithPositions, [1, 0, 2, 3, 4])


def test_attention_refuses_heads_that_do_not_divide() -> None:
    with pytest.raises(UsageError, match=r"heads=3 for embedding_dim=4"):
        build("autoint", 1, 1, 4, heads=3)


class FirstFieldSquared(PairwiseBilinear):
    def forward(self, tokens: Tensor) -> list[Tensor]:
        return [
            ((tokens[:, f] @ weight.flatten(1)).unflatten(1, (-1, tokens.shape[2])) * tokens[:, f, None]).flatten(1)
            for f, weight in enumerate(self.weight.split(self.sizes, dim=1))
        ]


def check_bilinear_identity(part: type[PairwiseBilinear], rows: int, n_fields: int, dim: int, seed: int) -> None:
    """With every `W_fg = I` the output is `Z_f * Z_g`."""
    tokens = normal(rows, n_fields, dim, seed=seed)
    bilinear = part(n_fields, dim).double()
    with torch.no_grad():
        bilinear.weight.copy_(torch.eye(dim)[:, None, :].expand_as(bilinear.weight))
    left, right = np.triu_indices(n_fields, 1)
    expected = tokens.numpy()[:, left] * tokens.numpy()[:, right]
    assert_close(torch.cat(bilinear(tokens), dim=-1), expected.reshape(rows, len(left) * dim))


@quick
@given(sizes.filter(lambda size: size[1] > 1))
def test_bilinear_with_identity_matrices(size: tuple[int, int, int, int]) -> None:
    check_bilinear_identity(PairwiseBilinear, *size)


def test_bilinear_identity_rejects_a_wrong_factor() -> None:
    with pytest.raises(AssertionError):
        check_bilinear_identity(FirstFieldSquared, 2, 3, 2, 0)


class Signed(FieldImportance):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.excitation[:-1](tokens.mean(-1))


def check_importance(part: type[FieldImportance]) -> None:
    importance = scrambled(part(7, reduction=3))(normal(50, 7, DIM))
    assert importance.shape == (50, 7)
    assert (importance >= 0).all()
    assert (importance > 0).any()


def test_importance_is_never_negative() -> None:
    check_importance(FieldImportance)
    with pytest.raises(AssertionError):
        check_importance(Signed)


@pytest.mark.parametrize(("n_fields", "squeezed"), [(2, 1), (5, 1), (6, 2), (39, 13), (74, 24)])
def test_importance_squeezes_by_a_third(n_fields: int, squeezed: int) -> None:
    assert FieldImportance(n_fields, reduction=3).excitation[0].weight.shape == (squeezed, n_fields)


def test_starts_follow_the_xavier_rule_per_map() -> None:
    torch.manual_seed(0)
    assert PairwiseBilinear(30, 16).weight.std().item() == pytest.approx(16**-0.5, rel=0.02)
    assert LinearBranch(500, 16).weight.std().item() == pytest.approx((2 / 8001) ** 0.5, rel=0.05)
    assert LinearBranch(500, 16).bias.item() == 0
    taken_as_one_tensor = nn.init.xavier_normal_(torch.empty(435, 16, 16))
    assert taken_as_one_tensor.std().item() != pytest.approx(16**-0.5, rel=0.02)


# --- what every backbone promises ---


def check_signature(part: type[Backbone]) -> None:
    parameters = list(inspect.signature(part.forward).parameters)
    assert parameters == ["self", "value_tokens", "category_tokens", "category_weights"]


class TakesValues(Dnn):
    def forward(  # type: ignore[override]
        self, value_tokens: Tensor, category_tokens: Tensor, category_weights: Tensor, values: Tensor
    ) -> Tensor:
        return super().forward(value_tokens, category_tokens) + values.sum(1)


@every_backbone
def test_takes_tokens_only(name: str) -> None:
    check_signature(CASES[name].part)
    assert CASES[name].part.citation


def test_signature_check_rejects_raw_values() -> None:
    with pytest.raises(AssertionError):
        check_signature(TakesValues)


class Deaf(NumericalEncoder):
    """Tokens of its own, whatever the values are."""

    def __init__(self, seed: int) -> None:
        super().__init__(TrainingStatistics.from_arrays(np.zeros((2, N_VALUES))), N_CATEGORIES, DIM)
        self.tokens = normal(N_VALUES, DIM, seed=seed)

    def forward(self, values: Tensor, category_tokens: Tensor) -> Tensor:
        return self.tokens.expand(len(values), -1, -1)


class Leaky(CtrModel):
    """A model with a way around the encoder."""

    def forward(self, values: Tensor, category_ids: Tensor) -> Tensor:
        return super().forward(values, category_ids) + 1e-9 * values.nan_to_num().sum(1)


def deaf_logits(model: type[CtrModel], name: str, values: Tensor, seed: int) -> Tensor:
    backbone = scrambled_backbone(CASES[name].part)
    ctr = scrambled(model(Deaf(seed), backbone, vocabulary_sizes=[5] * N_CATEGORIES))
    ids = torch.arange(ROWS * N_CATEGORIES).reshape(ROWS, N_CATEGORIES) % 5
    return ctr(values, ids)


def check_values_come_as_tokens(model: type[CtrModel], name: str) -> None:
    values = normal(ROWS, N_VALUES, seed=4)
    others = torch.full_like(values, 1e7)
    others[0] = torch.nan
    assert torch.equal(deaf_logits(model, name, values, 0), deaf_logits(model, name, others, 0))
    assert not torch.equal(deaf_logits(model, name, values, 0), deaf_logits(model, name, values, 1))


@every_backbone
def test_values_reach_the_logit_as_tokens_only(name: str) -> None:
    check_values_come_as_tokens(CtrModel, name)
    with pytest.raises(AssertionError):
        check_values_come_as_tokens(Leaky, name)


def check_branch(backbone: Backbone, branch: str) -> None:
    """The output of this branch, in a whole forward pass, moves with the token of every numerical field."""
    outputs: list[Tensor] = []
    keep = backbone.get_submodule(branch).register_forward_hook(
        lambda module, inputs, output: outputs.extend([output] if isinstance(output, Tensor) else output)
    )
    values, categories, weights = inputs_of(rows=64)
    values.requires_grad_()
    backbone(values, categories, weights)
    keep.remove()
    total = sum((output * normal(*output.shape, seed=9)).sum() for output in outputs)
    assert isinstance(total, Tensor)
    assert total.requires_grad, f"{branch} does not depend on anything"
    (gradient,) = torch.autograd.grad(total, values, allow_unused=True)
    assert gradient is not None, f"{branch} does not read the numerical tokens"
    assert (gradient.abs().amax(dim=(0, 2)) > 0).all()


BRANCHES = [(name, branch) for name, case in CASES.items() for branch in case.branches]


@pytest.mark.parametrize(("name", "branch"), BRANCHES)
def test_numerical_tokens_reach_every_branch(name: str, branch: str) -> None:
    backbone = scrambled_backbone(CASES[name].part)
    check_branch(backbone, branch)
    backbone.get_submodule(branch).register_forward_pre_hook(
        lambda module, inputs: tuple(tokens.detach() for tokens in inputs)
    )
    with pytest.raises(AssertionError):
        check_branch(backbone, branch)


@every_backbone
def test_linear_branch_is_where_the_paper_names_one(name: str) -> None:
    part = CASES[name].part
    assert part.first_order == (name in {"deepfm", "widedeep", "nfm"})
    if part.first_order:
        values, categories, _ = inputs_of()
        with pytest.raises(UsageError, match="needs category_weights"):
            scrambled_backbone(part)(values, categories)


class AgainstTheBatch(Dnn):
    """A backbone that looks at the other rows."""

    def score(self, tokens: Tensor) -> Tensor:
        return super().score(tokens - tokens.mean(0))


def check_rows_apart(make: Make) -> None:
    """In evaluation mode a row scores the same alone, and a broken row breaks only itself."""
    tower = Tower(hidden=(6, 5), dropout=0.5, batch_norm=True)
    backbone = scrambled(make(N_VALUES, N_CATEGORIES, DIM, tower))
    inputs = inputs_of()
    together = backbone(*inputs).detach().numpy()
    for row in range(ROWS):
        assert_close(backbone(*(tokens[row : row + 1] for tokens in inputs)), together[row : row + 1])
    inputs[0][0] = torch.nan
    broken = backbone(*inputs)
    assert broken[0].isnan()
    assert_close(broken[1:], together[1:])


@every_backbone
def test_rows_stay_apart(name: str) -> None:
    check_rows_apart(CASES[name].part)


def test_rows_apart_rejects_a_batch_mean() -> None:
    with pytest.raises(AssertionError):
        check_rows_apart(AgainstTheBatch)


NO_VALUES, NO_CATEGORIES, ONE_VALUE, ONE_CATEGORY = (0, 2), (2, 0), (1, 0), (0, 1)


def check_size(make: Make, rows: int, n_values: int, n_categories: int) -> None:
    """A loss can be taken and every parameter has a gradient of its shape, however small the input."""
    backbone = scrambled_backbone(make, n_values, n_categories).train()
    logits = backbone(*inputs_of(n_values, n_categories, rows))
    assert logits.shape == (rows,)
    assert logits.isfinite().all()
    logits.sum().backward()
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


class Squeezes(Dnn):
    """A backbone that loses the batch dimension of one row."""

    def score(self, tokens: Tensor) -> Tensor:
        return self.mlp(tokens.flatten(1)).squeeze()


class StartsFromAValue(Dnn):
    """A backbone that cannot do without numerical fields."""

    def score(self, tokens: Tensor) -> Tensor:
        return super().score(tokens) / min(self.n_values, 1)


def test_size_check_rejects() -> None:
    with pytest.raises(AssertionError):
        check_size(Squeezes, 1, 2, 2)
    with pytest.raises(AssertionError):
        check_size(StartsFromAValue, 2, *NO_VALUES)


@every_backbone
@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("fields", [(2, 2), NO_VALUES, NO_CATEGORIES, ONE_VALUE, ONE_CATEGORY])
def test_small_inputs(name: str, rows: int, fields: tuple[int, int]) -> None:
    if name == "fibinet" and sum(fields) == 1:
        with pytest.raises(UsageError, match="pairs of fields"):
            build(name, *fields, DIM)
    else:
        check_size(CASES[name].part, rows, *fields)
        build(name, *fields, DIM)


def check_export(make: Make) -> None:
    """An exported graph has a free batch size and the numbers of the original."""
    backbone = scrambled_backbone(make)
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(backbone, inputs_of(rows=5), dynamic_shapes=(batch, batch, batch)).module()
    for rows in (0, 1, 2, ROWS):
        inputs = inputs_of(rows=rows)
        assert_close(program(*inputs), backbone(*inputs).detach().numpy())


class FiveRows(Dnn):
    def score(self, tokens: Tensor) -> Tensor:
        return super().score(tokens).reshape(5)


@every_backbone
def test_exports_with_a_free_batch_size(name: str) -> None:
    check_export(CASES[name].part)


def test_export_check_rejects_a_fixed_batch_size() -> None:
    with pytest.raises(Exception, match=r"batch|shape"):
        check_export(FiveRows)


class WholeGram(Pnn):
    def __init__(self, n_values: int, n_categories: int, embedding_dim: int, tower: Tower) -> None:
        super().__init__(n_values, n_categories, embedding_dim, tower)
        self.mlp = tower.to_logit(self.n_fields * embedding_dim + self.n_fields**2)


def check_widths(make: Make, fields: int, width: int) -> None:
    with torch.device("meta"):
        backbone = make(1, fields - 1, 16, Tower())
    assert next(layer_widths(backbone)) == width


def layer_widths(backbone: Backbone) -> Iterator[int]:
    """Number of inputs of the layers of the tower."""
    return (layer.in_features for layer in backbone.get_submodule("mlp") if isinstance(layer, nn.Linear))


@pytest.mark.parametrize(("fields", "pnn", "fibinet"), [(74, 3885, 86432), (31, 961, 14880), (39, 1365, 23712)])
def test_tower_widths_at_the_sizes_of_the_paper(fields: int, pnn: int, fibinet: int) -> None:
    check_widths(Pnn, fields, pnn)
    check_widths(FiBiNet, fields, fibinet)
    with pytest.raises(AssertionError):
        check_widths(WholeGram, fields, pnn)
