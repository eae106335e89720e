"""ModelArtifact: contract, statistics, vocabularies, weights and specification in one sealed folder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch.overrides import TorchFunctionMode

import scalarlens
from scalarlens import metrics
from scalarlens.backbones import Tower
from scalarlens.card import model_card
from scalarlens.contract import build_contract, check_contract, describes
from scalarlens.errors import ArtifactError, ScalarLensError, UsageError
from scalarlens.model import CtrModel, ModelSpec
from scalarlens.registry import fit_option
from scalarlens.storage import (
    as_stored,
    one_line,
    parse_json,
    read_json,
    replacing_folder,
    sha256_of_file,
    shown,
    write_json,
)
from scalarlens.table.columns import require_columns
from scalarlens.table.schema import Schema
from scalarlens.table.statistics import TrainingStatistics
from scalarlens.table.stored import STATISTICS_FILE, VOCABULARIES_FILE, load_statistics, save_statistics
from scalarlens.table.tensorizer import CellCounts, Tensorizer, rows_to_table

FORMAT = 1
MANIFEST = "MANIFEST.sha256"
CARD = "MODEL_CARD.md"
FILES = (
    "contract.json",
    "model.safetensors",
    STATISTICS_FILE,
    VOCABULARIES_FILE,
    "spec.json",
    "metrics.json",
    CARD,
)
SPEC_KEYS = {"format", "scalarlens", "model", "input_scale", "training"}
#: rows are scored in batches of this size, on every path
SCORING_BATCH = 4096
#: no whole number in a specification of a model comes near this, and no list of them is as long
LARGEST_OPTION, LONGEST_OPTION = 1 << 14, 256
#: building a model makes its tensors and what they start from: this many times as much as they are, at most
SLACK = 4
#: the functions by which parts make tensors of a size that an option says
MAKERS = {
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.randperm,
    torch.tensor,
    torch.tril_indices,
    torch.triu_indices,
    torch.zeros,
}


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
        """Write the folder so that it is there whole or not at all; the same content gives the same bytes.

        An artifact that is there already is replaced; a folder that holds anything else is refused.
        """
        folder = Path(folder)
        foreign = {path.name for path in folder.iterdir()} - {*FILES, MANIFEST} if folder.is_dir() else set()
        if foreign:
            raise UsageError(
                f"{folder} is not empty and holds no artifact, but {shown(*sorted(foreign))}; choose another"
            )
        with replacing_folder(folder) as partial:
            write_json(partial / "contract.json", self.contract)
            write_json(partial / "spec.json", self.spec)
            write_json(partial / "metrics.json", self.metrics)
            (partial / CARD).write_bytes(self.card())
            save_statistics(self.tensorizer.statistics, partial)
            tensors = {name: t.detach().cpu().contiguous() for name, t in self.model.state_dict().items()}
            (partial / "model.safetensors").write_bytes(save(tensors))
            digests = [f"{sha256_of_file(partial / name)}  {name}\n" for name in sorted(FILES)]
            (partial / MANIFEST).write_text("".join(digests), "utf-8")

    def card(self) -> bytes:
        """The model card, from the facts that the artifact holds."""
        return model_card(self.spec, self.contract, self.metrics).encode()

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
    tables = spec.resolved().to_tables()
    refuse_large_options(tables, UsageError)
    document = {
        "format": FORMAT,
        "scalarlens": scalarlens.__version__,
        "model": tables,
        "input_scale": tensorizer.input_scale,
        "training": training,
    }
    contract = build_contract(model, tensorizer, training_digest)
    return ModelArtifact(model, tensorizer, *map(as_stored, (document, contract, metrics)))


def load(folder: str | Path) -> ModelArtifact:
    """Open an artifact: digests before contents, contents before use; anything that does not fit is refused."""
    folder = Path(folder)
    try:
        check_digests(folder)
        return _open(folder)
    except ArtifactError:
        raise
    except Exception as error:  # there is no end to the ways in which foreign content can break what reads it
        raise ArtifactError(
            f"{folder} is not a consistent artifact: {type(error).__name__}: {one_line(error)}"
        ) from error


def check_digests(folder: Path) -> None:
    """Refuse a folder whose files are not exactly those that were sealed."""
    if not folder.is_dir():
        raise ArtifactError(f"no artifact at {folder}; `scalarlens train` writes one under its --out")
    odd = sorted({path.name for path in folder.iterdir()} ^ {*FILES, MANIFEST})
    if odd:
        raise ArtifactError(
            f"{folder} must hold {MANIFEST} and what it lists, no more; absent or foreign: {shown(*odd)}"
        )
    for name in (MANIFEST, *FILES):
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
            raise ArtifactError(f"{folder / name} was changed: SHA-256 is {found}, the manifest says {shown(digest)}")


def _open(folder: Path) -> ModelArtifact:
    spec, contract, found = (read_json(folder / name) for name in ("spec.json", "contract.json", "metrics.json"))
    _check_spec(spec, folder / "spec.json")
    _check_metrics(found, folder / "metrics.json")
    check_contract(contract, folder)
    statistics = load_statistics(folder, contract["training_rows"])
    _check_statistics(statistics, contract, folder)
    schema = Schema.from_tables(contract["schema"], str(folder / "contract.json"))
    tensorizer = Tensorizer(schema, statistics, spec["input_scale"])
    path = folder / "model.safetensors"
    shapes = read_shapes(path)
    with Budget(shapes), np.errstate(all="ignore"), torch.random.fork_rng(devices=[]):
        model = CtrModel.build(ModelSpec.from_tables(spec["model"]), tensorizer.encoder_statistics)
    _load_weights(model, path, shapes)
    artifact = ModelArtifact(model.eval(), tensorizer, spec, contract, found)
    if not describes(contract, build_contract(model, tensorizer, contract["training_digest"])):
        raise ArtifactError(f"{folder}: contract.json does not describe this model; it was changed after sealing")
    # Another version may word its cards in another way.
    if spec["scalarlens"] == scalarlens.__version__ and artifact.card() != (folder / CARD).read_bytes():
        raise ArtifactError(f"{folder / CARD} does not say what the other files say; it was changed after sealing")
    return artifact


def _check_spec(spec: dict[str, Any], path: Path) -> None:
    """Refuse a specification of another version, with a value of another type, or with an absurd size."""
    if spec.get("format") != FORMAT:
        raise ArtifactError(f"{path} has format {shown(spec.get('format'))}; this version of scalarlens reads {FORMAT}")
    if spec.keys() != SPEC_KEYS:
        raise ArtifactError(
            f"{path} must hold {shown(*sorted(SPEC_KEYS))}; odd: {shown(*sorted(spec.keys() ^ SPEC_KEYS))}"
        )
    model, tower = spec["model"], spec["model"]["tower"]
    fit_option("embedding_dim", 1, model["embedding_dim"])
    fit_option("category_std", 1.0, model["category_std"])
    for name, default in vars(Tower()).items():
        fit_option(f"tower.{name}", default, tower[name])
    refuse_large_options(model, ArtifactError)


def refuse_large_options(value: Any, refuse: type[ScalarLensError]) -> None:
    """Refuse sizes that no model has, in everything that a specification says."""
    if isinstance(value, dict | list | tuple):
        if len(value) > LONGEST_OPTION:
            raise refuse(f"an option of {len(value)} entries is beyond {LONGEST_OPTION}")
        for item in value.values() if isinstance(value, dict) else value:
            refuse_large_options(item, refuse)
    elif isinstance(value, int) and not -LARGEST_OPTION <= value <= LARGEST_OPTION:
        raise refuse(f"an option of {shown(value)} is beyond {LARGEST_OPTION}")


def _check_metrics(found: dict[str, Any], path: Path) -> None:
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise ArtifactError(f"{path}: {shown(name)} must be a number or null; got {shown(value)}")


def _check_statistics(statistics: TrainingStatistics, contract: dict[str, Any], folder: Path) -> None:
    if statistics.digest() != contract["statistics_digest"]:
        raise ArtifactError(f"{folder}: the statistics are not those that the contract was written for")
    columns = [len(contract["schema"][kind]) for kind in ("numeric", "categorical")]
    if columns != [statistics.n_values, len(statistics.vocabularies)] or sum(columns) != len(contract["fields"]):
        raise ArtifactError(f"{folder}: contract and statistics disagree on the number of columns")


def read_shapes(path: Path) -> dict[str, list[int]]:
    """The shape of every tensor in a safetensors file, from its header alone."""
    try:
        with safe_open(path, framework="pt"), path.open("rb") as file:  # opening checks all sizes and offsets
            header = parse_json(file.read(int.from_bytes(file.read(8), "little")), str(path))
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{path} is not an intact safetensors file: {one_line(error)}") from error
    return {name: entry["shape"] for name, entry in header.items()}


class Budget(TorchFunctionMode):
    """Within it no more tensors, and no larger ones, are made than those of a file need.

    A specification of a few bytes can ask for terabytes. Each tensor is measured on the meta device, which
    allocates nothing, before it is made.

    >>> with Budget({"weight": [2, 3]}):
    ...     torch.zeros(10**6, 10**6)
    Traceback (most recent call last):
    ...
    scalarlens.errors.ArtifactError: the specification asks for a larger model than the weights are of
    """

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()
        self.tensors = SLACK * len(shapes) + 256
        self.elements = SLACK * sum(map(math.prod, shapes.values())) + 65536

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if function in MAKERS:
            self.tensors -= 1
            self.elements -= function(*args, **{**options, "device": "meta"}).numel()
            if min(self.tensors, self.elements) < 0:
                raise ArtifactError("the specification asks for a larger model than the weights are of")
        return function(*args, **options)


def _load_weights(model: CtrModel, path: Path, shapes: dict[str, list[int]]) -> None:
    """Exactly the tensors of this model, of the right shape and type; learned ones finite, others as derived."""
    expected = model.state_dict()
    odd = sorted(shapes.keys() ^ expected.keys())
    if odd:
        raise ArtifactError(f"{path} holds other tensors than this model: {shown(*odd)}")
    tensors = load_file(path)
    derived = {f"encoder.{name}" for name, _ in model.encoder.named_buffers()}
    for name, tensor in tensors.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise ArtifactError(
                f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected {wanted.dtype} {tuple(wanted.shape)}"
            )
        if name in derived and not follows(tensor, wanted):
            raise ArtifactError(f"{path}: {name} is not what follows from the training statistics")
        if name not in derived and not torch.isfinite(tensor).all():
            raise ArtifactError(f"{path}: {name} holds a value that is not finite")
    model.load_state_dict(tensors)
    mesh = getattr(model.encoder, "mesh", None)
    if mesh is not None and not (mesh.unit_boundaries().diff() > 0).all():
        raise ArtifactError(f"{path}: the edges of a mesh do not increase")


def follows(stored: torch.Tensor, derived: torch.Tensor) -> bool:
    """Whether a stored buffer is the one that an encoder derives, up to the rounding of another machine.

    >>> derived = torch.tensor([[0.0, 8.0, torch.inf]])
    >>> follows(derived + 1e-9, derived), follows(derived + 1e-6, derived)
    (True, False)
    """
    if torch.equal(stored, derived):
        return True
    if not derived.is_floating_point():
        return False
    size = torch.where(derived.isfinite(), derived.abs(), 0.0)
    # Within a field a number near zero may be the difference of larger ones.
    size = size.amax(-1, keepdim=True) if size.dim() > 1 else size
    return bool(((stored == derived) | ((stored - derived).abs() <= 1e-9 * size)).all())
