"""Write the golden numbers anew, after a change that is meant to move them: `python tests/golden/regenerate.py`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from scalarlens.backbones import Tower
from scalarlens.model import CtrModel, ModelSpec
from scalarlens.table.batches import PackedSplit
from scalarlens.table.statistics import TrainingStatistics
from scalarlens.training import Recipe, fit

TRAINING = Path(__file__).with_name("training.json")
RECIPE = Recipe(embedding_dim=8, hidden=(16, 8), batch_size=128, learning_rate=5e-3, max_epochs=4, patience=4)


def table(first: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows by arithmetic alone: no generator of random numbers decides what is in them."""
    row = np.arange(first, first + rows)
    turns = [row * step % 1009 / 1009 for step in (13, 131, 577, 911)]
    values = np.stack([np.exp(6 * turns[0]), np.floor(50 * turns[1] ** 2)], 1)
    values[row % 11 == 0, 1] = np.nan
    ids = np.stack([2 + row % 5, 2 + row * 7 % 12], 1)
    sign = np.where(ids[:, 0] % 2 == 0, 1.0, -1.0)
    logits = 3 * sign * np.sin(5 * turns[0]) + np.nan_to_num(values[:, 1], nan=20.0) / 20 - 1
    return values, ids, logits + 3 * (turns[2] + turns[3] - 1) > 0


def training_curves() -> dict[str, list[dict[str, float]]]:
    """Loss and validation AUC of every epoch, by encoder."""
    values, ids, labels = table(0, 2000)
    statistics = TrainingStatistics.from_arrays(values, ids)
    train, valid = PackedSplit.from_arrays(values, ids, labels), PackedSplit.from_arrays(*table(2000, 1500))
    curves = {}
    for encoder in ("scalarlens", "deer"):
        spec = ModelSpec(encoder, "dnn", RECIPE.embedding_dim, Tower(RECIPE.hidden), RECIPE.category_std)
        torch.manual_seed(2026)
        model = CtrModel.build(spec.resolved(), statistics)
        history = fit(model, train, valid, RECIPE, seed=2026).history
        curves[encoder] = [{key: entry[key] for key in ("train_loss", "valid_auc")} for entry in history]
    return curves


if __name__ == "__main__":
    TRAINING.write_text(json.dumps(training_curves(), indent=2) + "\n")
