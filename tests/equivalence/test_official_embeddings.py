"""With copied weights, the encoders give the tokens of the official package, which TabM uses too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import rtdl_num_embeddings as official
import tabm
import torch
from torch import Tensor, nn

from scalarlens.encoders import build
from scalarlens.encoders.base import NumericalEncoder
from scalarlens.table.statistics import TrainingStatistics

RNG = np.random.default_rng(0)
ROWS, DIM = 2049, 16
#: raw units: normal, heavy-tailed, zero-inflated counts (fewer bins), a flag (one bin), narrow far from zero
TABLE = np.stack(
    [
        RNG.normal(0, 1, ROWS),
        RNG.lognormal(0, 2, ROWS).clip(0, 1000),
        np.where(RNG.random(ROWS) < 0.3, 0.0, RNG.poisson(4, ROWS)),
        RNG.integers(0, 2, ROWS).astype(float),
        50 + RNG.random(ROWS),
    ],
    axis=1,
)
#: the same shapes within a few units, where float32 leaves room below the tolerance
MODERATE = TABLE * np.array([1.0, 0.005, 0.25, 1.0, 0.02])
#: with values beyond the training range
AROUND_THE_RANGE = torch.tensor(np.concatenate([TABLE, 1.1 * TABLE, -0.1 * TABLE]))
TOLERANCE = 1e-5
#: the package warns of columns with one bin, here the flag
pytestmark = pytest.mark.filterwarnings("ignore:The 3-th feature has just two bin edges:UserWarning")

NAMES = ["linear", "linear-relu", "ple-a", "ple-relu-bounded", "ple-b", "ple-relu", "periodic", "plr"]


@contextmanager
def in_double_precision() -> Iterator[None]:
    """The package forms its bins in the default dtype: float32 loses narrow bins far from zero."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def encoder_of(name: str, table: np.ndarray, **options: bool) -> NumericalEncoder:
    """With weights everywhere: a piecewise part at zero would agree with anything."""
    torch.manual_seed(0)
    encoder = build(name, TrainingStatistics.from_arrays(table), 0, DIM, **options)
    if name in ("ple-b", "ple-relu"):
        nn.init.normal_(encoder.piecewise, std=0.3)
    if name in ("periodic", "plr"):
        nn.init.normal_(encoder.frequencies, std=0.05)
    return encoder


@in_double_precision()
def official_of(name: str, encoder: NumericalEncoder) -> nn.Module:
    """The official module in float64 with a copy of the encoder's weights."""
    own = {key: p.detach() for key, p in encoder.named_parameters()}
    n = encoder.n_values
    if name == "linear":
        module = official.LinearEmbeddings(n, DIM)
        copies = {"weight": own["weight"], "bias": own["bias"]}
    elif name == "linear-relu":
        module = official.LinearReLUEmbeddings(n, DIM)
        copies = {"linear.weight": own["weight"], "linear.bias": own["bias"]}
    elif name in ("periodic", "plr"):
        module = official.PeriodicEmbeddings(n, DIM, activation=name == "plr", lite=False)
        copies = {"periodic.weight": own["frequencies"]}
        copies |= {"linear.weight": own["linear.weight"], "linear.bias": own["linear.bias"]}
    else:
        bins = bins_of(encoder)
        version = "A" if name in ("ple-a", "ple-relu-bounded") else "B"
        module = official.PiecewiseLinearEmbeddings(
            bins, DIM, activation=name in ("ple-relu", "ple-relu-bounded"), version=version
        )
        if version == "A":
            copies = {
                "linear.weight": last_bin_last(own["linear.weight"], bins),
                "linear.bias": own["linear.bias"],
            }
        else:
            copies = {"linear0.weight": own["weight"], "linear0.bias": own["bias"]}
            copies |= {"linear.weight": last_bin_last(own["piecewise"], bins)}
    missing, unexpected = module.load_state_dict(copies, strict=False)
    assert not unexpected
    assert not set(missing) & {key for key, _ in module.named_parameters()}
    return module


def bins_of(encoder: NumericalEncoder) -> list[Tensor]:
    return [torch.from_numpy(np.unique(row)) for row in encoder.encoding.edges.numpy()]


def last_bin_last(weight: Tensor, bins: list[Tensor]) -> Tensor:
    """The package keeps the last bin of every field in the last place."""
    moved = torch.zeros_like(weight)
    for field, edges in enumerate(bins):
        last = len(edges) - 2
        moved[field, :last] = weight[field, :last]
        moved[field, -1] = weight[field, last]
    return moved


def check_tokens(name: str, encoder: NumericalEncoder, values: Tensor) -> None:
    with torch.no_grad():
        expected = official_of(name, encoder)(values)
        actual = encoder(values, torch.zeros(len(values), 0, DIM))
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_on_raw_heavy_tailed_columns(name: str) -> None:
    check_tokens(name, encoder_of(name, TABLE).double(), AROUND_THE_RANGE)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_in_single_precision(name: str) -> None:
    check_tokens(name, encoder_of(name, MODERATE), torch.tensor(MODERATE))


@pytest.mark.parametrize(
    ("theirs", "ours", "options"),
    [
        ("linear", "linear-relu", {}),
        ("plr", "periodic", {}),
        ("ple-b", "ple-relu", {}),
        ("ple-a", "ple-relu-bounded", {}),
        ("ple-a", "ple-a", {"clip_to_range": True}),
        ("ple-b", "ple-b", {"clip_to_range": True}),
    ],
)
def test_comparison_rejects_another_method(theirs: str, ours: str, options: dict[str, bool]) -> None:
    with pytest.raises(AssertionError):
        check_tokens(theirs, encoder_of(ours, TABLE, **options).double(), AROUND_THE_RANGE)


def test_comparison_rejects_bins_in_another_order() -> None:
    encoder = encoder_of("ple-a", TABLE).double()
    module = official_of("ple-a", encoder)
    with torch.no_grad():
        module.linear.weight.copy_(encoder.linear.weight)
        gap = module(AROUND_THE_RANGE) - encoder(AROUND_THE_RANGE)
    assert gap.abs().max() > TOLERANCE


@in_double_precision()
def test_bins_are_the_official_ones() -> None:
    computed = official.compute_bins(torch.tensor(TABLE), n_bins=48)
    for own, theirs in zip(bins_of(encoder_of("ple-a", TABLE)), computed, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)
    assert [len(edges) - 1 for edges in computed] == [48, 48, 9, 1, 48]


@in_double_precision()
def test_ple_b_is_the_numerical_part_that_tabm_takes() -> None:
    encoder = encoder_of("ple-b", TABLE)
    size = {"n_num_features": 5, "d_out": 1, "k": 2, "n_blocks": 1, "d_block": 8}
    with pytest.raises(ValueError, match='set the version argument to "B"'):
        tabm.TabM.make(num_embeddings=official_of("ple-a", encoder_of("ple-a", TABLE)), **size)
    model = tabm.TabM.make(num_embeddings=official_of("ple-b", encoder), **size).eval()
    taken: list[Tensor] = []
    model.num_module.register_forward_hook(lambda module, inputs, tokens: taken.append(tokens))
    with torch.no_grad():
        model(AROUND_THE_RANGE)
        own = encoder(AROUND_THE_RANGE)
    torch.testing.assert_close(own, taken[0], rtol=0, atol=TOLERANCE)
