"""What holds on a GPU. Skipped, with the reason, where there is none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from scalarlens.backbones import backbones
from scalarlens.encoders import encoders
from scalarlens.model import CtrModel, ModelSpec
from scalarlens.table.batches import PackedSplit
from scalarlens.table.statistics import TrainingStatistics
from scalarlens.training import Recipe, fit
from scalarlens.training.loop import _Run

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that PyTorch can see"),
]
ROWS, N, C = 3000, 5, 3
NEVER = float("inf")
RECIPE = Recipe(batch_size=256, max_epochs=2, averaging=0.9, dropout=0.1, embedding_l2=1e-5, plateau_factor=0.5)


def table(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    values = rng.lognormal(2, 2, size=(ROWS, N)) * np.array([1, -1, 1e4, 1, 1])
    values[:, 3] = 7.0
    values[rng.random(values.shape) < 0.1] = np.nan
    ids = rng.integers(0, 20, size=(ROWS, C))
    logits = np.sin(np.log1p(np.nan_to_num(values[:, 0]))) * (ids[:, 0] - 10) / 4
    return values, ids, (rng.random(ROWS) < 1 / (1 + np.exp(-logits))).astype(np.int64)


def model_of(encoder: str, backbone: str = "dnn", recipe: Recipe = RECIPE) -> CtrModel:
    values, ids, _ = table()
    torch.manual_seed(0)
    spec = ModelSpec(encoder, backbone, recipe.embedding_dim, recipe.tower, recipe.category_std)
    return CtrModel.build(spec, TrainingStatistics.from_arrays(values, ids))


def split(device: str) -> PackedSplit:
    return PackedSplit.from_arrays(*table()).to(device)


@pytest.mark.parametrize("encoder", encoders.names())
def test_tokens_and_gradients_are_those_of_the_cpu(encoder: str) -> None:
    batch = split("cpu").batch(slice(0, 512))
    results = []
    for device in ("cpu", "cuda"):
        model = model_of(encoder).double().to(device)
        tokens = model.encoder(batch.values.to(device), model.categories(batch.category_ids.to(device)))
        weights = torch.linspace(-1, 1, tokens.numel(), dtype=torch.float64).view_as(tokens).to(device)
        (tokens * weights).sum().backward()
        gradients = [p.grad.cpu() for p in model.encoder.parameters() if p.grad is not None]
        results.append((tokens.detach().cpu(), gradients))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-9, atol=1e-9)
    for on_cpu, on_gpu in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(on_cpu, on_gpu, rtol=1e-7, atol=1e-7 * float(1 + on_cpu.abs().max()))


@pytest.mark.parametrize("backbone", backbones.names())
def test_logits_are_those_of_the_cpu(backbone: str) -> None:
    batch = split("cpu").batch(slice(0, 256))
    model = model_of("scalarlens", backbone).double().eval()
    with torch.no_grad():
        on_cpu = model(batch.values, batch.category_ids)
        on_gpu = model.to("cuda")(batch.values.cuda(), batch.category_ids.cuda()).cpu()
    torch.testing.assert_close(on_cpu, on_gpu, rtol=1e-9, atol=1e-9)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Every call that makes the host wait for the device is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("encoder", encoders.names())
def test_an_epoch_never_waits_for_the_gpu(encoder: str) -> None:
    train, model = split("cuda"), model_of(encoder).to("cuda")
    run = _Run(model, train, train, RECIPE, seed=1, folder=None)
    run.train_epoch(None, NEVER)  # lazy initialisation may wait
    with no_waiting():
        run.train_epoch(None, NEVER)


def test_waiting_for_the_gpu_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        torch.zeros(3, device="cuda").sum().item()


@pytest.mark.parametrize("encoder", ["scalarlens", "deer"])
def test_a_resumed_run_ends_in_the_same_bits(encoder: str, tmp_path: Path) -> None:
    train = split("cuda")
    whole = model_of(encoder).to("cuda")
    fit(whole, train, train, RECIPE, seed=3, folder=tmp_path / "whole")

    class Killed(Exception):
        pass

    def kill(epoch: int, done: int, rows: int, entry: object) -> None:
        if epoch == 2 and done >= rows // 2:
            raise Killed

    resumed = model_of(encoder).to("cuda")
    with pytest.raises(Killed):
        fit(resumed, train, train, RECIPE, seed=3, folder=tmp_path / "resumed", progress=kill)
    resumed = model_of(encoder).to("cuda")
    fit(resumed, train, train, RECIPE, seed=3, folder=tmp_path / "resumed")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_metrics_are_within_noise_of_the_cpu() -> None:
    plain = Recipe(batch_size=256, max_epochs=3)
    found = []
    for device in ("cpu", "cuda"):
        data, model = split(device), model_of("scalarlens", recipe=plain).to(device)
        found.append(fit(model, data, data, plain, seed=5).history[-1]["valid_auc"])
    assert abs(found[0] - found[1]) < 0.005
