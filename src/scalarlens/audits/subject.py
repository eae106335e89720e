"""What is audited: an artifact and a sample of rows, in every form in which it can be given rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from scalarlens.artifact import SCORING_BATCH, ModelArtifact
from scalarlens.datasets.files import Table, open_table
from scalarlens.datasets.prepared import MANIFEST_FILE, PreparedTable
from scalarlens.encoders import NumericalEncoder
from scalarlens.errors import DataError, UsageError
from scalarlens.table import cells
from scalarlens.table.batches import Block, PackedSplit
from scalarlens.table.columns import require_columns
from scalarlens.table.tensorizer import CellCounts, Tensorizer, schema_cells

#: rows that the audits look at, spread evenly over the data
AUDITED_ROWS = 10_000


@dataclass(frozen=True)
class Subject:
    """An artifact with the rows that its audits look at.

    *Shape*: values `[B, N]` float64 in serving units, category_ids `[B, C]`, labels `[B]`, where there are any.
    `rows` is the same as a table of plain numbers and texts, `given` as a file of raw rows had it, and `packed` as
    a prepared folder had it.
    """

    artifact: ModelArtifact
    rows: pa.Table
    values: np.ndarray
    category_ids: np.ndarray
    labels: np.ndarray | None = None
    given: pa.Table | None = None
    packed: PackedSplit | None = None

    @property
    def encoder(self) -> NumericalEncoder:
        return self.artifact.model.encoder

    @property
    def encoder_name(self) -> str:
        name: str = self.artifact.spec["model"]["encoder"]
        return name

    @property
    def device(self) -> torch.device:
        return next(self.artifact.model.parameters()).device

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """Values in the encoder's scale and category ids, as the model takes them; a copy for whoever edits them."""
        batch = self.artifact.tensorizer.batch(self.values, self.category_ids, self.device)
        return batch.values.clone(), batch.category_ids.clone()

    def category_tokens(self, category_ids: Tensor) -> Tensor:
        tokens: Tensor = self.artifact.model.categories(category_ids)
        return tokens

    def shuffled(self, seed: int) -> Tensor:
        """Another order of the rows, the same at every call."""
        order = np.random.default_rng(seed).permutation(len(self.values))
        return torch.from_numpy(order).to(self.device)


def open_subject(artifact: ModelArtifact, data: Path, split: str = "valid", rows: int = AUDITED_ROWS) -> Subject:
    """The subject from a prepared folder, of which `split` is looked at, or from a file of raw rows."""
    if rows < 2:
        raise UsageError(f"an audit compares rows and needs at least 2; got --rows {rows}")
    if (data / MANIFEST_FILE).exists():
        return _from_prepared(artifact, PreparedTable(data), split, rows)
    return _from_file(artifact, open_table(data), rows)


def _from_prepared(artifact: ModelArtifact, table: PreparedTable, split: str, rows: int) -> Subject:
    if table.statistics.digest() != artifact.contract["statistics_digest"]:
        raise DataError(
            f"{table.folder} was prepared with other training rows than the artifact was trained on, so its category "
            "ids mean something else; audit the artifact on a file of raw rows"
        )
    whole = table.split(split, artifact.tensorizer.scale)
    chosen = torch.from_numpy(_spread(whole.rows, rows))
    blocks = [Block(block.role, block.columns, block.rows[chosen]) for block in whole.blocks]
    packed = PackedSplit(blocks, whole.n_values, whole.n_categories, artifact.tensorizer.scale)
    batch = PackedSplit(blocks, whole.n_values, whole.n_categories).batch(slice(0, len(chosen)))
    values, ids = batch.values.numpy(), batch.category_ids.numpy()
    raw = raw_rows(artifact.tensorizer, values, ids)
    return Subject(artifact, raw, values, ids, batch.labels.numpy(), packed=packed)


def _from_file(artifact: ModelArtifact, table: Table, rows: int) -> Subject:
    schema, tensorizer = artifact.schema, artifact.tensorizer
    require_columns(schema.features, table.columns)
    labelled = schema.label in table.columns
    columns = (*schema.features, schema.label) if labelled else schema.features
    pieces = list(_sampled(table, columns, rows))
    if not pieces:
        raise DataError(f"{table.path} has no rows to audit")
    read = [tensorizer.read(piece, CellCounts()) for piece in pieces]
    values, ids = (np.concatenate(parts) for parts in zip(*read, strict=True))
    texts = zip(*(schema_cells(schema, piece)[1] for piece in pieces), strict=True)
    raw = plain_table(tensorizer, values, [pa.concat_arrays(parts) for parts in texts])
    labels = [cells.labels(piece.column(schema.label), schema.label) for piece in pieces] if labelled else None
    # The files of a folder may differ in their types, and then no one table has all of their rows.
    given = pa.concat_tables(pieces) if all(p.schema.equals(pieces[0].schema) for p in pieces) else None
    return Subject(artifact, raw, values, ids, None if labels is None else np.concatenate(labels), given=given)


def _spread(total: int, wanted: int) -> np.ndarray:
    """Up to `wanted` row numbers, spread evenly, because files come sorted by time or by label."""
    return np.unique(np.linspace(0, total - 1, min(total, wanted)).round().astype(np.int64))


def _sampled(table: Table, columns: tuple[str, ...], wanted: int) -> Iterator[pa.Table]:
    chosen, begin = _spread(table.count_rows(), wanted), 0
    for batch in table.batches(columns):
        here = chosen[(chosen >= begin) & (chosen < begin + batch.num_rows)] - begin
        if len(here):
            yield pa.Table.from_batches([batch]).take(pa.array(here))
        begin += batch.num_rows


def raw_rows(tensorizer: Tensorizer, values: np.ndarray, category_ids: np.ndarray) -> pa.Table:
    """Raw rows that read as these values and ids. An unseen category gets a text that training never kept."""
    texts = []
    for column, vocabulary in enumerate(tensorizer.statistics.vocabularies):
        schema = tensorizer.schema
        taken = {*vocabulary.texts, *schema.missing, *schema.categorical[column].missing}
        unseen = "unseen"
        while unseen in taken:
            unseen += "_"
        names = pa.array([None, unseen, *vocabulary.texts], pa.string())
        texts.append(names.take(pa.array(category_ids[:, column])))
    return plain_table(tensorizer, values, texts)


def plain_table(tensorizer: Tensorizer, values: np.ndarray, texts: list[pa.Array]) -> pa.Table:
    """Values and texts under the names of their columns, a missing one as null."""
    numeric = [pa.array(column, pa.float64(), from_pandas=True) for column in values.T]
    return pa.table([*numeric, *texts], names=list(tensorizer.schema.features))


def scored_in(subject: Subject, batch_size: int = SCORING_BATCH, rows: np.ndarray | None = None) -> np.ndarray:
    """Logits of the rows with these numbers, or of all, taken in batches of one size."""
    tensorizer, device = subject.artifact.tensorizer, subject.device
    chosen = np.arange(len(subject.values)) if rows is None else rows
    parts = (chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size))
    batches = (tensorizer.batch(subject.values[part], subject.category_ids[part], device) for part in parts)
    return subject.artifact.model.score(batches)


def largest_change(found: Tensor, expected: Tensor) -> float:
    """The largest difference; a number that is not defined differs from one that is, and not from its like."""
    return largest_gap(found.double().cpu().numpy(), expected.double().cpu().numpy())


def largest_gap(found: np.ndarray, expected: np.ndarray) -> float:
    """`largest_change` of arrays; arrays of other shapes differ without a bound."""
    if found.shape != expected.shape:
        return np.inf
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    if same.all():
        return 0.0
    with np.errstate(invalid="ignore"):
        return float(np.nan_to_num(np.abs(found - expected)[~same], nan=np.inf, posinf=np.inf).max())
