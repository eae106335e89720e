"""Small trained artifacts that several test files take apart, and the rows behind them."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch

from scalarlens.artifact import ModelArtifact, load
from scalarlens.cli import main
from scalarlens.datasets.prepared import PreparedTable
from scalarlens.job import ARTIFACT_FOLDER, Job, train
from scalarlens.model import ModelSpec
from scalarlens.table.schema import CategoricalColumn, NumericColumn, Schema
from scalarlens.training import Recipe

ROWS = 400
#: no order of these columns is that of their names
SCHEMA = Schema(
    numeric=(
        NumericColumn("spend", unit="EUR"),
        NumericColumn("balance", missing=(-999.0, "n/a")),
        NumericColumn("never", unit="km"),
        NumericColumn("constant", unit="°C"),
    ),
    categorical=(CategoricalColumn("ville", min_count=16), CategoricalColumn("code")),
    label="clicked",
)
#: categories that a reader may trip over; none of them is a marker for a missing cell
TEXTS = (
    "Zürich", "東京", 'a "quoted", one', " spaces around ", "two\nlines", "nan", "NULL", "None", "0.10", "-", "e\u0301",
    "\u00e9", "🚲", "\t", "true", "1e5",
)  # fmt: skip


@dataclass(frozen=True)
class Sealed:
    """A trained artifact, what it was trained on, and its rows as dicts."""

    artifact: ModelArtifact
    folder: Path
    table: PreparedTable
    rows: list[dict[str, Any]]

    def load(self) -> ModelArtifact:
        return load(self.folder)


def raw_rows(seed: int, count: int = ROWS) -> list[dict[str, Any]]:
    """Rows with a heavy tail, negative numbers, a constant, a column without a value, and odd texts."""
    rng = np.random.default_rng(seed)
    spend = np.exp(rng.normal(0.0, 3.0, count)).tolist()
    balance = np.round(rng.normal(0.0, 50.0, count), 2).tolist()
    ville, code = (rng.integers(0, high, count).tolist() for high in (len(TEXTS) + 1, 6))
    clicked = (rng.random(count) < 1 / (1 + np.exp(0.5 - 0.03 * np.array(balance)))).astype(int).tolist()
    return [
        {
            "spend": spend[i] if i % 11 else None,
            "balance": balance[i] if i % 7 else -999.0,
            "never": None,
            "constant": 36.6,
            "ville": TEXTS[ville[i]] if ville[i] < len(TEXTS) else None,
            "code": code[i] + 5,
            "clicked": clicked[i],
        }
        for i in range(count)
    ]


def arrow_table(rows: list[dict[str, Any]]) -> pa.Table:
    types = {"never": pa.float64(), "ville": pa.string()}
    return pa.table({name: pa.array([row[name] for row in rows], types.get(name)) for name in rows[0]})


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Every cell as Python writes it, an empty one where there is none."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), quoting=csv.QUOTE_MINIMAL)
        writer.writeheader()
        writer.writerows(rows)
    return path


def seal_trained(folder: Path, input_scale: str, seed: int, encoder: str = "scalarlens") -> Sealed:
    """Prepare a table and train one epoch on it, as the command line does."""
    folder.mkdir()
    rows = raw_rows(seed)
    (folder / "schema.toml").write_text(SCHEMA.to_toml(), encoding="utf-8")
    command = ["prepare", "-q", "--schema", str(folder / "schema.toml"), "--out", str(folder / "data")]
    for split, part in (("train", rows[:300]), ("valid", rows[300:])):
        pa.parquet.write_table(arrow_table(part), folder / f"{split}.parquet")
        command += [f"--{split}", str(folder / f"{split}.parquet")]
    assert main(command) == 0
    recipe = Recipe(hidden=(8,), embedding_dim=4, batch_size=64, max_epochs=1)
    options = {"intervals": 8} if encoder == "scalarlens" else {}
    spec = ModelSpec(encoder, "dnn", 4, recipe.tower, recipe.category_std, options).resolved()
    job = Job(folder / "data", spec, recipe, input_scale, seed)  # type: ignore[arg-type]
    artifact = train(job, folder / "run", device=torch.device("cpu"))
    return Sealed(artifact, folder / "run" / ARTIFACT_FOLDER, PreparedTable(folder / "data"), rows[:300])


def present(values: list[float | None]) -> np.ndarray:
    """The numbers of a column as float64, without the missing ones."""
    return np.array([v for v in values if v is not None and not math.isnan(v)], dtype=np.float64)
