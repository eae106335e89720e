"""The interactions of the backbones give the numbers of two public packages, with the same weights.

Peers: torch-rechub and deepctr-torch. The mathematics is the same in all of them up to three choices, and
each comparison below sets its peer or ours so that these agree. deepctr-torch scales attention scores only on
request. torch-rechub adds the bias of a DCNv2 layer outside the product. Both share one bilinear map between
the branches of FiBiNET, so each branch is compared with a layer of its own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import types
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalarlens.backbones import Tower, build
from scalarlens.backbones.fibinet import FieldImportance, PairwiseBilinear
from scalarlens.backbones.pnn import InnerProducts

ROWS, FIELDS, DIM = 9, 7, 6
WIDTH = FIELDS * DIM

Interaction = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def rechub() -> types.ModuleType:
    return importlib.import_module("torch_rechub.basic.layers")


@pytest.fixture(scope="module")
def deepctr() -> Iterator[types.ModuleType]:
    """The layers of deepctr-torch alone: its package module asks the network for a newer version."""
    package = types.ModuleType("deepctr_torch")
    package.__path__ = [str(importlib.metadata.distribution("deepctr-torch").locate_file("deepctr_torch"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deepctr_torch", package)
        yield importlib.import_module("deepctr_torch.layers.interaction")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scrambled(module: Any) -> Any:
    """The module in float64 with normal numbers for parameters."""
    module = module.double()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(0.3 * normal(*parameter.shape, seed=number))
    return module


def backbone(name: str) -> Any:
    return scrambled(build(name, 3, FIELDS - 3, DIM, Tower(hidden=(4,))))


def copy(target: Tensor, source: Tensor) -> None:
    assert target.shape == source.shape
    with torch.no_grad():
        target.copy_(source)


def assert_agree(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-10


def assert_equivalent(module: nn.Module, ours: Interaction, theirs: Interaction) -> None:
    """Equal on random tokens; and not equal any more when any of our parameters, or the tokens, move."""
    tokens = normal(ROWS, FIELDS, DIM, seed=100)
    with torch.no_grad():
        expected = theirs(tokens)
        assert_agree(ours(tokens), expected)
        for parameter in module.parameters():
            right = parameter.clone()
            parameter.add_(0.1 * normal(*parameter.shape, seed=101))
            with pytest.raises(AssertionError):
                assert_agree(ours(tokens), expected)
            parameter.copy_(right)
        moved = tokens.index_fill(1, torch.tensor([FIELDS - 1]), 0.5)
        with pytest.raises(AssertionError):
            assert_agree(ours(moved), expected)


def test_fm_term(rechub: types.ModuleType, deepctr: types.ModuleType) -> None:
    """The whole of DeepFM with its linear branch and its tower at zero."""
    deepfm = backbone("deepfm")
    with torch.no_grad():
        for parameter in deepfm.parameters():
            parameter.zero_()

    def fm_term(tokens: Tensor) -> Tensor:
        return deepfm(tokens[:, :3], tokens[:, 3:], tokens.new_zeros(ROWS, FIELDS - 3))

    for peer in (rechub.FM(), deepctr.FM()):
        assert_equivalent(nn.Identity(), fm_term, lambda tokens, peer=peer: peer(tokens).squeeze(-1))


def test_bi_interaction_pooling(rechub: types.ModuleType, deepctr: types.ModuleType) -> None:
    pair_sum = backbone("nfm").pair_sum
    assert_equivalent(pair_sum, pair_sum, rechub.FM(reduce_sum=False))
    pooling = deepctr.BiInteractionPooling()
    assert_equivalent(pair_sum, pair_sum, lambda tokens: pooling(tokens).squeeze(1))


def test_inner_products(deepctr: types.ModuleType) -> None:
    """torch-rechub has no such layer."""
    products, peer = InnerProducts(FIELDS), deepctr.InnerProductLayer()
    assert_equivalent(products, products, lambda tokens: peer(tokens.split(1, dim=1)).squeeze(-1))


def test_cross_of_dcn(rechub: types.ModuleType, deepctr: types.ModuleType) -> None:
    dcn = backbone("dcn")
    crosses = nn.ParameterList([dcn.biases, *(cross.weight for cross in dcn.crosses)])
    first = scrambled(rechub.CrossNetwork(WIDTH, 3))
    second = scrambled(deepctr.CrossNet(WIDTH, 3, parameterization="vector"))
    for layer in range(3):
        copy(first.w[layer].weight, dcn.crosses[layer].weight)
        copy(first.b[layer], dcn.biases[layer])
        copy(second.kernels[layer], dcn.crosses[layer].weight.T)
        copy(second.bias[layer], dcn.biases[layer, :, None])
    for peer in (first, second):
        assert_equivalent(
            crosses,
            lambda tokens: dcn.cross(tokens.flatten(1)),
            lambda tokens, peer=peer: peer(tokens.flatten(1)),
        )


def cross_of_dcnv2(dcnv2: Any) -> Interaction:
    """What the cross layers hand to the head."""

    def cross(tokens: Tensor) -> Tensor:
        inputs: list[Tensor] = []
        hook = dcnv2.head.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        dcnv2(tokens[:, :3], tokens[:, 3:])
        hook.remove()
        return inputs[0][:, :WIDTH]

    return cross


def test_cross_of_dcnv2(deepctr: types.ModuleType) -> None:
    dcnv2 = backbone("dcnv2")
    peer = scrambled(deepctr.CrossNet(WIDTH, 3, parameterization="matrix"))
    for layer in range(3):
        copy(peer.kernels[layer], dcnv2.crosses[layer].weight)
        copy(peer.bias[layer], dcnv2.crosses[layer].bias[:, None])
    assert_equivalent(dcnv2.crosses, cross_of_dcnv2(dcnv2), lambda tokens: peer(tokens.flatten(1)))


def test_cross_of_dcnv2_without_bias(rechub: types.ModuleType) -> None:
    """torch-rechub has `x_0 * (W x) + b + x`, DCNv2 is `x_0 * (W x + b) + x`: equal where `b = 0`."""
    dcnv2 = backbone("dcnv2")
    peer = scrambled(rechub.CrossNetV2(WIDTH, 3))
    for layer in range(3):
        copy(peer.w[layer].weight, dcnv2.crosses[layer].weight)
        copy(peer.b[layer], torch.zeros(WIDTH))
        copy(dcnv2.crosses[layer].bias, torch.zeros(WIDTH))
    assert_equivalent(dcnv2.crosses, cross_of_dcnv2(dcnv2), lambda tokens: peer(tokens.flatten(1)))


def test_attention(rechub: types.ModuleType, deepctr: types.ModuleType) -> None:
    """All three layers of AutoInt; deepctr-torch scales the scores only on request."""
    attention = backbone("autoint").attention
    first = nn.Sequential(*(scrambled(rechub.InteractingLayer(DIM, num_heads=2)) for _ in range(3)))
    second = nn.Sequential(*(scrambled(deepctr.InteractingLayer(DIM, head_num=2, scaling=True)) for _ in range(3)))
    for layer, ours in enumerate(attention):
        weights = [ours.query.weight, ours.key.weight, ours.value.weight, ours.residual.weight]
        names = ["Query", "key", "Value", "Res"]
        for weight, linear in zip(weights, ("W_Q", "W_K", "W_V", "W_Res"), strict=True):
            copy(first[layer].get_submodule(linear).weight, weight)
        for weight, name in zip(weights, names, strict=True):
            copy(second[layer].get_parameter(f"W_{name}"), weight.T)
    assert_equivalent(attention, attention, first)
    assert_equivalent(attention, attention, second)


def test_bilinear(rechub: types.ModuleType, deepctr: types.ModuleType) -> None:
    ours = scrambled(PairwiseBilinear(FIELDS, DIM))
    first = rechub.BiLinearInteractionLayer(DIM, FIELDS, bilinear_type="field_interaction").double()
    second = deepctr.BilinearInteraction(FIELDS, DIM, bilinear_type="interaction").double()
    for pair, (one, other) in enumerate(zip(first.bilinear_layer, second.bilinear, strict=True)):
        copy(one.weight, ours.weight[:, pair].T)
        copy(other.weight, ours.weight[:, pair].T)
    for peer in (first, second):
        assert_equivalent(
            ours,
            lambda tokens: torch.cat(ours(tokens), dim=-1),
            lambda tokens, peer=peer: peer(tokens).flatten(1),
        )


def test_squeeze_and_excitation(rechub: types.ModuleType, deepctr: types.ModuleType) -> None:
    ours = scrambled(FieldImportance(FIELDS, reduction=3))
    first = rechub.SENETLayer(FIELDS, reduction_ratio=3).double()
    second = deepctr.SENETLayer(FIELDS, reduction_ratio=3).double()
    for theirs in (first.mlp, second.excitation):
        for target, source in zip(theirs.parameters(), ours.parameters(), strict=True):
            copy(target, source)
    for peer in (first, second):
        assert_equivalent(ours, lambda tokens: tokens * ours(tokens).unsqueeze(-1), peer)


def test_interactions_of_fibinet(rechub: types.ModuleType) -> None:
    """What FiBiNET hands to its tower: both branches, in the order plain, rescaled."""
    fibinet = backbone("fibinet")
    senet = rechub.SENETLayer(FIELDS, reduction_ratio=3).double()
    for target, source in zip(senet.parameters(), fibinet.importance.parameters(), strict=True):
        copy(target, source)
    layers = []
    for branch in (fibinet.bilinear, fibinet.rescaled_bilinear):
        layer = rechub.BiLinearInteractionLayer(DIM, FIELDS, bilinear_type="field_interaction").double()
        for pair, one in enumerate(layer.bilinear_layer):
            copy(one.weight, branch.weight[:, pair].T)
        layers.append(layer)

    def ours(tokens: Tensor) -> Tensor:
        inputs: list[Tensor] = []
        hook = fibinet.mlp.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        fibinet(tokens[:, :3], tokens[:, 3:])
        hook.remove()
        return inputs[0]

    def theirs(tokens: Tensor) -> Tensor:
        return torch.cat([layers[0](tokens).flatten(1), layers[1](senet(tokens)).flatten(1)], dim=-1)

    parts = (fibinet.bilinear, fibinet.rescaled_bilinear, fibinet.importance)
    parameters = nn.ParameterList(chain.from_iterable(part.parameters() for part in parts))
    assert_equivalent(parameters, ours, theirs)
