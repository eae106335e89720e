"""ModelArtifact: contract, statistics, vocabularies, weights and specification in one sealed folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

import scalarlens
from scalarlens import metrics
from scalarlens.card import model_card
from scalarlens.contract import build_contract, check_contract, describes
from scalarlens.errors import ArtifactError, ScalarLensError
from scalarlens.model import CtrModel, ModelSpec
from scalarlens.storage import read_json, replacing_folder, sha256_of_file, write_json
from scalarlens.table.schema import Schema
from scalarlens.table.stored import STATISTICS_FILE, VOCABULARIES_FILE, load_statistics, save_statistics
from scalarlens.table.tensorizer import CellCounts, Tensorizer, require_columns, rows_to_table

FORMAT = 1
MANIFEST = "MANIFEST.sha256"
FILES = (
    "contract.json",
    "model.safetensors",
    STATISTICS_FILE,
    VOCABULARIES_FILE,
    "spec.json",
    "metrics.json",
    "MODEL_CARD.md",
)
#: rows are scored in batches of this size, on every path
SCORING_BATCH = 4096
#: no whole number in a specification comes near this
LARGEST_OPTION = 1 << 20


@dataclass
class ModelArtifact:
    """A trained model with everything that scoring a raw row takes."""

    model: CtrModel
    tensorizer: Tensorizer
    spec: dict[str, Any]
    contract: dict[str, Any]
    metrics: dict[str, Any]

    @property
    def schema(self) -> Schema:
        return self.tensorizer.schema

    def save(self, folder: str | Path) -> None:
        """Write the folder so that it is there whole or not at all; the same content gives the same bytes."""
        with replacing_folder(Path(folder)) as partial:
            write_json(partial / "contract.json", self.contract)
            write_json(partial / "spec.json", self.spec)
            write_json(partial / "metrics.json", self.metrics)
            (partial / "MODEL_CARD.md").write_text(model_card(self.spec, self.contract, self.metrics), "utf-8")
            save_statistics(self.tensorizer.statistics, partial)
            tensors = {name: t.detach().cpu().contiguous() for name, t in self.model.state_dict().items()}
            (partial / "model.safetensors").write_bytes(save(tensors))
            digests = [f"{sha256_of_file(partial / name)}  {name}\n" for name in sorted(FILES)]
            (partial / MANIFEST).write_text("".join(digests), "utf-8")

    def to(self, device: torch.device | str) -> ModelArtifact:
        self.model.to(device)
        return self

    def predict(self, rows: Any, counts: CellCounts | None = None) -> np.ndarray:
        """Probabilities of raw rows, `[rows]` float64: dicts, Arrow, pandas or polars, in serving units.

        Columns outside the contract are ignored, a missing column is refused; missing cells, unseen categories and
        values out of range are scored, and counted in `counts`.
        """
        return metrics.sigmoid(self.logits(rows, counts))

    def logits(self, rows: Any, counts: CellCounts | None = None) -> np.ndarray:
        table = rows_to_table(rows, self.schema.features)
        require_columns(self.schema.features, table.column_names)
        return self.model.score(self._batches(table, counts or CellCounts()))

    def _batches(self, table: pa.Table, counts: CellCounts) -> Iterator[Any]:
        device = next(self.model.parameters()).device
        for start in range(0, table.num_rows, SCORING_BATCH):
            values, ids = self.tensorizer.read(table.slice(start, SCORING_BATCH), counts)
            yield self.tensorizer.batch(values, ids, device)


def seal(
    model: CtrModel,
    tensorizer: Tensorizer,
    spec: ModelSpec,
    *,
    training: dict[str, Any],
    metrics: dict[str, Any],
    training_digest: str,
) -> ModelArtifact:
    """Put a trained model and what it was trained with together; `training` records recipe, seed and the like."""
    document = {
        "format": FORMAT,
        "scalarlens": scalarlens.__version__,
        "model": spec.to_tables(),
        "input_scale": tensorizer.input_scale,
        "training": training,
    }
    contract = build_contract(model, tensorizer, training_digest)
    return ModelArtifact(model, tensorizer, document, contract, metrics)


def load(folder: str | Path) -> ModelArtifact:
    """Open an artifact: digests before contents, contents before use; anything that does not fit is refused."""
    folder = Path(folder)
    check_digests(folder)
    spec = read_json(folder / "spec.json")
    contract = read_json(folder / "contract.json")
    try:
        if spec["format"] != FORMAT:
            raise ArtifactError(f"{folder} has format {spec['format']!r}; this version reads {FORMAT}")
        check_contract(contract, folder)
        _refuse_large_options(spec["model"], folder)
        schema = Schema.from_tables(contract["schema"], str(folder / "contract.json"))
        statistics = load_statistics(folder, contract["training_rows"])
        tensorizer = Tensorizer(schema, statistics, spec["input_scale"])
        _check_statistics(contract, tensorizer, folder)
        model = CtrModel.build(ModelSpec.from_tables(spec["model"]), tensorizer.encoder_statistics)
        _load_weights(model, folder / "model.safetensors")
        artifact = ModelArtifact(model.eval(), tensorizer, spec, contract, read_json(folder / "metrics.json"))
        if not describes(contract, build_contract(model, tensorizer, contract["training_digest"])):
            raise ArtifactError(f"{folder}: contract.json does not describe this model; it was changed after sealing")
    except ArtifactError:
        raise
    except (ScalarLensError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{folder} is not a consistent artifact: {type(error).__name__}: {error}") from error
    return artifact


def check_digests(folder: Path) -> None:
    """Refuse a folder whose files are not exactly those that were sealed."""
    if not folder.is_dir():
        raise ArtifactError(f"no artifact at {folder}; `scalarlens train` writes one under its --out")
    present = sorted(path.name for path in folder.iterdir())
    wanted = sorted((*FILES, MANIFEST))
    if present != wanted:
        odd = sorted(set(present) ^ set(wanted))
        raise ArtifactError(f"{folder} must hold exactly {', '.join(wanted)}; absent or foreign: {', '.join(odd)}")
    for name in wanted:
        if (folder / name).is_symlink() or not (folder / name).is_file():
            raise ArtifactError(f"{folder / name} is not a regular file")
    if (folder / MANIFEST).stat().st_size > 4096:
        raise ArtifactError(f"{folder / MANIFEST} is larger than a manifest can be")
    lines = (folder / MANIFEST).read_bytes().decode("utf-8", "replace").splitlines()
    sealed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if len(lines) != len(FILES) or sorted(sealed) != sorted(FILES):
        raise ArtifactError(f"{folder / MANIFEST} must list each file once")
    for name, digest in sealed.items():
        found = sha256_of_file(folder / name)
        if found != digest:
            raise ArtifactError(f"{folder / name} was changed: SHA-256 is {found}, the manifest says {digest}")


def _refuse_large_options(value: Any, folder: Path) -> None:
    """A specification with an absurd size must not be built before it is refused."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_large_options(item, folder)
    elif isinstance(value, int | float) and not -LARGEST_OPTION <= value <= LARGEST_OPTION:
        raise ArtifactError(f"{folder / 'spec.json'} asks for {value!r}, beyond {LARGEST_OPTION}")


def _check_statistics(contract: dict[str, Any], tensorizer: Tensorizer, folder: Path) -> None:
    statistics, schema = tensorizer.statistics, tensorizer.schema
    if statistics.digest() != contract["statistics_digest"]:
        raise ArtifactError(f"{folder}: the statistics are not those that the contract was written for")
    if (statistics.n_values, len(statistics.vocabularies)) != (len(schema.numeric), len(schema.categorical)):
        raise ArtifactError(f"{folder}: contract and statistics disagree on the number of columns")


def _load_weights(model: CtrModel, path: Path) -> None:
    """Exactly the tensors of this model, of the right shape and type, and finite."""
    try:
        tensors = load_file(path)
    except (SafetensorError, ValueError, OSError) as error:
        raise ArtifactError(f"{path} is not an intact safetensors file: {error}") from error
    expected = model.state_dict()
    if tensors.keys() != expected.keys():
        raise ArtifactError(
            f"{path} holds other tensors than this model: {sorted(tensors.keys() ^ expected.keys())[:5]}"
        )
    for name, tensor in tensors.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise ArtifactError(
                f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected {wanted.dtype} {tuple(wanted.shape)}"
            )
        if not torch.isfinite(tensor).all():
            raise ArtifactError(f"{path}: {name} holds a value that is not finite")
    model.load_state_dict(tensors)
