"""Every audit passes on what is sound, fails on the broken artifact made for it, and says where it does not apply."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_artifacts import Sealed, present, write_csv
from torch import Tensor

from scalarlens import encoders
from scalarlens.artifact import ModelArtifact, seal
from scalarlens.audits import Finding, Report, Subject, audits, open_subject, run_audits
from scalarlens.audits.context_permutation import FIGURES, Frozen, within_bins
from scalarlens.audits.scoring_parity import PATHS
from scalarlens.audits.subject import largest_change, raw_rows
from scalarlens.audits.unit_invariance import in_other_units
from scalarlens.backbones import Tower
from scalarlens.cli import main
from scalarlens.encoders.base import NumericalEncoder
from scalarlens.encoders.blocks import LearnedMesh
from scalarlens.encoders.deer import Deer
from scalarlens.encoders.linear import Linear
from scalarlens.encoders.matched import ContextFilm
from scalarlens.encoders.scalarlens import ScalarLens, Trace
from scalarlens.errors import DataError, UsageError
from scalarlens.model import CtrModel, ModelSpec
from scalarlens.table.batches import Block, PackedSplit
from scalarlens.table.schema import CategoricalColumn, NumericColumn, Schema
from scalarlens.table.statistics import TrainingStatistics
from scalarlens.table.tensorizer import CellCounts, Tensorizer, rows_to_table, schema_cells

#: audits that an encoder without a coordinate and without states has nothing to say to
FOR_MESHES = {"coordinate-invariance", "bounded-response", "unit-invariance", "mesh-resolution"}


def subject_of(sealed: Sealed) -> Subject:
    return open_subject(sealed.load(), sealed.table.folder, "valid")


def audit(subject: Subject, name: str) -> Finding:
    return run_audits(subject, [name])[0].finding


def with_encoder(subject: Subject, part: type[NumericalEncoder], **options: Any) -> Subject:
    """The same artifact with another encoder, every parameter away from its start."""
    artifact = copy.deepcopy(subject.artifact)
    trained = artifact.model.encoder
    torch.manual_seed(0)
    broken = part(artifact.tensorizer.encoder_statistics, trained.n_categories, trained.embedding_dim, **options)
    with torch.no_grad():
        for parameter in broken.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    artifact.model.encoder = broken.eval()
    artifact.spec["model"] |= {"encoder": part.__name__, "encoder_options": options}
    return replace(subject, artifact=artifact)


def with_artifact(subject: Subject, part: type[ModelArtifact]) -> Subject:
    return replace(subject, artifact=part(**vars(subject.artifact)))


# sound artifacts


@pytest.mark.parametrize("scale", ["raw", "zscore"])
@pytest.mark.parametrize("kind", ["prepared", "parquet", "csv"])
def test_a_trained_artifact_fails_nothing(sealed: dict[str, Sealed], tmp_path: Path, scale: str, kind: str) -> None:
    trained = sealed[scale]
    places = {
        "prepared": lambda: trained.table.folder,
        "parquet": lambda: trained.table.folder.parent / "valid.parquet",
        "csv": lambda: write_csv(tmp_path / "rows.csv", trained.rows),
    }
    reports = {r.name: r.finding for r in run_audits(open_subject(trained.load(), places[kind]()))}
    assert sorted(reports) == audits.names()
    judged = {name for name, found in reports.items() if found.passed}
    assert judged == set(reports) - {"context-permutation", "mesh-resolution"}
    assert all(reports[name].passed is None and reports[name].reason for name in set(reports) - judged)
    compared = reports["scoring-parity"].figures["paths"]
    assert {name: gap for name, gap in compared.items() if not isinstance(gap, str)}.keys() >= {
        "dicts", "pandas", "polars", "csv_file", "parquet_file", "arrow_file",
        "packed_split" if kind == "prepared" else "as_given",
    }  # fmt: skip


@pytest.mark.parametrize("name", encoders.encoders.names())
def test_every_encoder_passes_or_is_told_why_not(sealed: dict[str, Sealed], name: str) -> None:
    subject = with_encoder(subject_of(sealed["zscore"]), encoders.encoders.get(name))
    for report in run_audits(subject, sorted(set(audits.names()) - {"scoring-parity"})):
        assert report.finding.passed is not False, report
        assert report.finding.passed or report.finding.reason, report
    if not hasattr(subject.encoder, "mesh"):
        assert {r.name for r in run_audits(subject, FOR_MESHES) if r.finding.passed is None} == FOR_MESHES


def test_an_audit_changes_neither_the_model_nor_the_generator(sealed: dict[str, Sealed]) -> None:
    subject = subject_of(sealed["raw"])
    before = {name: tensor.clone() for name, tensor in subject.artifact.model.state_dict().items()}
    generator = torch.get_rng_state()
    first = [report.to_tables() for report in run_audits(subject)]
    assert torch.get_rng_state().equal(generator)
    assert all(tensor.equal(before[name]) for name, tensor in subject.artifact.model.state_dict().items())
    assert first == [report.to_tables() for report in run_audits(subject)]


@pytest.mark.parametrize(("numbers", "categories"), [(0, 2), (1, 0), (3, 0), (1, 1)])
@pytest.mark.parametrize("name", ["scalarlens-smooth", "deer", "linear"])
def test_tables_with_columns_of_one_kind(tmp_path: Path, name: str, numbers: int, categories: int) -> None:
    rng = np.random.default_rng(0)
    cells = {f"n{i}": rng.lognormal(0, 1, 60) for i in range(numbers)}
    cells |= {f"c{i}": rng.integers(0, 4, 60).astype(str) for i in range(categories)}
    numeric = tuple(NumericColumn(f"n{i}") for i in range(numbers))
    schema = Schema(numeric, tuple(CategoricalColumn(f"c{i}") for i in range(categories)), label="y")
    table = pa.table({**cells, "y": rng.integers(0, 2, 60)})
    tensorizer = Tensorizer(schema, TrainingStatistics.fit([schema_cells(schema, table)]), "raw")
    spec = ModelSpec(name, "dnn", 4, Tower(hidden=(8,)), 0.01).resolved()
    model = CtrModel.build(spec, tensorizer.encoder_statistics)
    artifact = seal(model, tensorizer, spec, training={}, metrics={}, training_digest="")
    pq.write_table(table, tmp_path / "rows.parquet")
    for report in run_audits(open_subject(artifact, tmp_path / "rows.parquet")):
        assert report.finding.passed is not False, report
        assert report.finding.passed or report.finding.reason, report


# broken artifacts, each with the audit that has to catch it

BROKEN: dict[str, list[Callable[[Subject], Subject]]] = {}
Break = Callable[[Subject], Subject]


def caught_by(audit_name: str) -> Callable[[Any], Any]:
    """File an encoder, an artifact or a function from subject to subject under the audit that must reject it."""

    def file(broken: Any) -> Any:
        def apply(subject: Subject) -> Subject:
            if not isinstance(broken, type):
                made: Subject = broken(subject)
                return made
            return (with_artifact if issubclass(broken, ModelArtifact) else with_encoder)(subject, broken)

        apply.__name__ = broken.__name__
        BROKEN.setdefault(audit_name, []).append(apply)
        return broken

    return file


@caught_by("coordinate-invariance")
class FilmInTheCoordinate(ContextFilm):
    """Says that its coordinate stays, and shows the token that its context has moved."""

    def trace(self, values: Tensor, category_tokens: Tensor) -> SimpleNamespace:
        tokens = self(values, category_tokens)
        return SimpleNamespace(coordinate=tokens, tokens=tokens, states=torch.zeros(1))


@caught_by("coordinate-invariance")
class RemembersItsContext(ContextFilm):
    """Its coordinate is the token that it gave last."""

    def forward(self, values: Tensor, category_tokens: Tensor) -> Tensor:
        self.last = super().forward(values, category_tokens)
        return self.last

    def coordinate(self, values: Tensor) -> Tensor:
        return self.last if hasattr(self, "last") else super().coordinate(values)


@caught_by("coordinate-invariance")
class NumbersInTheCoordinate(Deer):
    """The coordinate of one number moves with the others, by next to nothing."""

    def coordinate(self, values: Tensor) -> Tensor:
        return super().coordinate(values) + 1e-6 * values.nan_to_num().clamp(-5, 5).sum(1).sin()[:, None, None].float()


@caught_by("bounded-response")
class UnboundedState(ScalarLens):
    """The last step is not squashed."""

    def respond(self, drive: Tensor, gate: Tensor) -> list[Tensor]:
        states = super().respond(drive, gate)
        return [*states[:-1], 3 * (drive + gate * self.message(states[-1]))]


@caught_by("bounded-response")
class UndefinedState(ScalarLens):
    """A state is not a number, which no comparison with one tells."""

    def respond(self, drive: Tensor, gate: Tensor) -> list[Tensor]:
        states = super().respond(drive, gate)
        return [*states[:-1], states[-1] * torch.nan]


@caught_by("bounded-response")
class ShowsOtherStates(UnboundedState):
    """`trace` shows states in good order; the tokens come from others."""

    def trace(self, values: Tensor, category_tokens: Tensor) -> Trace:
        shown = ScalarLens.trace(self, values, category_tokens)
        return replace(shown, states=shown.states.clamp(-1, 1), tokens=torch.zeros_like(shown.tokens))

    def forward(self, values: Tensor, category_tokens: Tensor) -> Tensor:
        return ScalarLens.trace(self, values, category_tokens).tokens


@caught_by("unit-invariance")
class ReadsTheRawNumber(Deer):
    """A little of the raw number beside the mesh."""

    def coordinate(self, values: Tensor) -> Tensor:
        return super().coordinate(values) + 1e-3 * values.nan_to_num().clamp(-50, 50).unsqueeze(-1).float()


@caught_by("unit-invariance")
class NeverRefitted(Deer):
    """The range of the mesh is set by hand."""

    def __init__(self, statistics: TrainingStatistics, n_categories: int, embedding_dim: int) -> None:
        super().__init__(statistics, n_categories, embedding_dim)
        self.mesh.low.fill_(-60.0)
        self.mesh.high.fill_(60.0)


@caught_by("categorical-tokens")
class EditsCategories(Linear):
    """Writes into the categorical tokens that the backbone gets as well."""

    def forward(self, values: Tensor, category_tokens: Tensor | None = None) -> Tensor:
        assert category_tokens is not None
        category_tokens[:, -1, 0] += 1e-6
        return super().forward(values)


@caught_by("categorical-tokens")
def numbers_reach_the_categories(subject: Subject) -> Subject:
    """The model itself mixes a number into the categories."""

    class Mixes(CtrModel):
        def forward(self, values: Tensor, category_ids: Tensor) -> Tensor:
            tokens = self.categories(category_ids)
            mixed = tokens + 1e-3 * values[:, :1].nan_to_num().tanh().unsqueeze(-1).float()
            return self.backbone(self.encoder(values, tokens), mixed)

    artifact = copy.deepcopy(subject.artifact)
    artifact.model.__class__ = Mixes
    return replace(subject, artifact=artifact)


@caught_by("column-order")
class ReadsByPlace(ModelArtifact):
    """Takes the numeric columns in the order in which they come, whatever their names."""

    def logits(self, rows: Any, counts: CellCounts | None = None) -> np.ndarray:
        table = rows_to_table(rows, self.schema.features)
        numeric = {column.name for column in self.schema.numeric}
        names = [name for name in table.column_names if name in numeric]
        names += [column.name for column in self.schema.categorical]
        return super().logits(table.select(names).rename_columns(list(self.schema.features)), counts)


@caught_by("column-order")
class RefusesOtherColumns(ModelArtifact):
    """Wants exactly its own columns in its own order."""

    def logits(self, rows: Any, counts: CellCounts | None = None) -> np.ndarray:
        if rows_to_table(rows, self.schema.features).column_names != list(self.schema.features):
            raise DataError("not my columns")
        return super().logits(rows, counts)


@caught_by("batch-invariance")
class ReadsTheBatch(Linear):
    """A batch mean leaks into every token."""

    def embed(self, values: Tensor) -> Tensor:
        tokens = super().embed(values.clamp(-5, 5))
        return tokens + tokens.mean(0, keepdim=True)


@caught_by("batch-invariance")
class NeverTheSame(Linear):
    """Dropout that stays on when scoring."""

    def embed(self, values: Tensor) -> Tensor:
        return torch.nn.functional.dropout(super().embed(values.clamp(-5, 5)), 0.2, training=True)


@caught_by("batch-invariance")
class NotANumber(Linear):
    """Scores that are not numbers once a batch is small."""

    def embed(self, values: Tensor) -> Tensor:
        return super().embed(values) * (torch.nan if len(values) < 10 else 1.0)


@caught_by("mesh-resolution")
def collapsed_nodes(subject: Subject) -> Subject:
    """All nodes of each mesh are one."""
    artifact = copy.deepcopy(subject.artifact)
    with torch.no_grad():
        nodes = artifact.model.encoder.mesh.nodes
        nodes.copy_(nodes[:, :1].expand_as(nodes))
    return replace(subject, artifact=artifact)


@caught_by("context-permutation")
class DeclaresLess(ScalarLens):
    """Says that it reads categories, and reads numbers too."""

    context = "categorical"


@caught_by("context-permutation")
class OtherTokensEachTime(ScalarLens):
    """The same rows get other tokens when they come again."""

    def coordinate(self, values: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().coordinate(values) * self.calls


def skewed(path: str) -> Break:
    """An artifact, or data, in which one path of scoring alone loses digits."""

    class Loses(ModelArtifact):
        def predict(self, rows: Any, counts: CellCounts | None = None) -> np.ndarray:
            kinds = {"dicts": "builtins", "pandas": "pandas", "polars": "polars"}
            lossy = type(rows).__module__.split(".")[0] == kinds.get(path)
            return super().predict(rows, counts) + (1e-12 if lossy else 0.0)

    def apply(subject: Subject) -> Subject:
        if path == "as_given":
            rounded = subject.rows.set_column(0, "spend", pa.array(np.float32(subject.values[:, 0])))
            return replace(subject, given=rounded)
        if path == "packed_split":
            packed = subject.packed
            assert packed is not None
            blocks = [Block(b.role, b.columns, b.rows.half() if b.role == "values" else b.rows) for b in packed.blocks]
            return replace(subject, packed=PackedSplit(blocks, packed.n_values, packed.n_categories))
        return with_artifact(subject, Loses)

    apply.__name__ = f"skewed_{path}"
    return apply


for _path in ("dicts", "pandas", "polars", "as_given", "packed_split"):
    caught_by("scoring-parity")(skewed(_path))


@pytest.mark.parametrize(
    ("name", "broken"),
    [pytest.param(name, broken, id=broken.__name__) for name, found in BROKEN.items() for broken in found],
)
def test_a_broken_artifact_is_caught(sealed: dict[str, Sealed], name: str, broken: Break) -> None:
    subject = subject_of(sealed["raw"])
    found = audit(broken(subject), name)
    assert found.passed is False
    assert found.reason
    assert audit(subject, name).passed is not False


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".arrow"])
def test_a_file_that_loses_digits_is_caught(
    sealed: dict[str, Sealed], monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    from scalarlens.audits import scoring_parity

    write = scoring_parity.write_rows

    def lossy(rows: pa.Table, path: Path) -> None:
        values = rows.column("balance").to_numpy()
        write(rows.set_column(1, "balance", pa.array(np.round(values), from_pandas=True)), path)

    subject = subject_of(sealed["raw"])
    monkeypatch.setattr(
        scoring_parity, "write_rows", lambda rows, path: (lossy if path.suffix == suffix else write)(rows, path)
    )
    found = audit(subject, "scoring-parity")
    assert found.passed is False
    odd = [name for name, gap in found.figures["paths"].items() if not isinstance(gap, str) and gap]
    assert odd == [f"{suffix[1:]}_file"]


def test_every_audit_has_a_mutant() -> None:
    assert set(BROKEN) == set(audits.names())
    assert {name.removeprefix("skewed_") for name in (b.__name__ for b in BROKEN["scoring-parity"])} | {
        "csv_file", "parquet_file", "arrow_file",
    } == set(PATHS)  # fmt: skip


# what each audit reports


def test_the_swaps_tell_which_context_moves_the_coordinate(sealed: dict[str, Sealed]) -> None:
    subject = subject_of(sealed["raw"])
    film = audit(with_encoder(subject, FilmInTheCoordinate), "coordinate-invariance").figures
    assert film["categorical_swap"] > 0 == film["numerical_swap"]
    numbers = audit(with_encoder(subject, NumbersInTheCoordinate), "coordinate-invariance").figures
    assert numbers["numerical_swap"] > 0 == numbers["categorical_swap"]
    assert film["joint_swap"] > 0 < numbers["joint_swap"]
    sound = audit(with_encoder(subject, ScalarLens), "coordinate-invariance").figures
    assert sound["token_change"] > 0.01  # the swaps do change what is around a value


def test_rows_that_are_all_alike_prove_nothing(sealed: dict[str, Sealed]) -> None:
    subject = subject_of(sealed["raw"])
    same = np.zeros(len(subject.values), dtype=int)
    alike = replace(subject, values=subject.values[same], category_ids=subject.category_ids[same])
    found = audit(with_encoder(alike, FilmInTheCoordinate), "coordinate-invariance")
    assert found.passed is None
    assert "differs" in found.reason


def test_a_refitted_range_is_that_of_the_table_in_other_units() -> None:
    values = np.random.default_rng(1).lognormal(2, 2, size=(500, 2))
    values[::9, 1] = np.nan
    schema = Schema((NumericColumn("a"), NumericColumn("b")), (), label="y")
    scale, shift = np.array([0.3, 2.5]), np.array([4.0, -1.0])
    moved = in_other_units(Tensorizer(schema, TrainingStatistics.from_arrays(values), "raw"), scale, shift).statistics
    fitted = TrainingStatistics.from_arrays(values * scale + shift)
    for name in ("low", "high", "mean", "std", "quantiles", "missing", "n_unique"):
        np.testing.assert_allclose(getattr(moved, name), getattr(fitted, name), rtol=1e-12, err_msg=name)


def test_mesh_shares_are_those_of_a_histogram(sealed: dict[str, Sealed]) -> None:
    subject = open_subject(sealed["raw"].load(), sealed["raw"].table.folder, "train")
    entry = audit(subject, "mesh-resolution").figures["fields"]["spend"]
    column = np.array(present([row["spend"] for row in sealed["raw"].rows]))
    edges = np.array(entry["edges"])
    place = np.array([int((x >= edges[1:-1]).sum()) for x in column])
    shares = np.array([(place == k).mean() for k in range(8)])
    assert entry["share_of_rows"] == pytest.approx(shares, abs=2 / len(column))  # rounding at an edge
    assert sum(entry["share_of_rows"]) == pytest.approx(1)
    assert entry["distinct_values"] == sum(entry["distinct_values_per_interval"]) == len(set(column))
    assert entry["missing_share"] == pytest.approx(1 - len(column) / 300)


@cache
def heavy() -> np.ndarray:
    """97 % below 100, two distant rows that stretch the range, and one value only in the second column."""
    rng = np.random.default_rng(0)
    return np.stack([np.r_[rng.random(97) * 100, 500.0, 700.0, 1600.0], np.full(100, 3.0)], axis=1)


def heavy_subject(sealed: Sealed, mesh_start: str, values: np.ndarray | None = None) -> Subject:
    """The trained artifact with a mesh over the heavy-tailed table instead."""
    artifact = copy.deepcopy(sealed.load())
    statistics = TrainingStatistics.from_arrays(heavy(), np.zeros((100, 2), dtype=int))
    schema = Schema(
        (NumericColumn("I3"), NumericColumn("flat")),
        (CategoricalColumn("a"), CategoricalColumn("b")),
        label="clicked",
    )
    artifact.tensorizer = Tensorizer(schema, statistics, "raw")
    artifact.model.encoder = Deer(statistics, 2, 4, intervals=16, mesh_start=mesh_start)  # type: ignore[arg-type]
    rows = heavy() if values is None else values
    return Subject(artifact, pa.table({}), rows, np.zeros((len(rows), 2), dtype=np.int64))


def test_a_crowded_interval_is_named(sealed: dict[str, Sealed]) -> None:
    crowded = audit(heavy_subject(sealed["raw"], "uniform"), "mesh-resolution")
    assert crowded.passed is None
    assert crowded.warnings == ("97 % of the rows of I3 share interval 1, with 97 of its 100 distinct values",)
    assert crowded.figures["fields"]["I3"]["empty_intervals"] == 12
    spread = audit(heavy_subject(sealed["raw"], "quantile"), "mesh-resolution")
    assert not spread.warnings


def test_widths_at_their_floor_are_counted(sealed: dict[str, Sealed]) -> None:
    subject = heavy_subject(sealed["raw"], "uniform")
    mesh = subject.encoder.mesh
    assert isinstance(mesh, LearnedMesh)
    with torch.no_grad():
        mesh.width_logits[0, :3] = -40.0
    found = audit(subject, "mesh-resolution")
    assert found.figures["fields"]["I3"]["floor_limited_widths"] == found.figures["floor_limited_widths"] == 3
    assert any("3 intervals as narrow as the floor allows" in warning for warning in found.warnings)


def test_values_beyond_the_range_that_share_a_coordinate_are_named(sealed: dict[str, Sealed]) -> None:
    beyond = np.stack([np.linspace(1e5, 2e5, 50), np.full(50, 3.0)], axis=1)
    found = audit(heavy_subject(sealed["raw"], "quantile", beyond), "mesh-resolution")
    assert found.passed is False
    assert "all 50 distinct values of I3 share one coordinate" in found.warnings


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_a_permutation_stays_within_its_bins(seed: int) -> None:
    rng = np.random.default_rng(seed)
    column = rng.choice([0.0, 0.0, 0.0, 1.0, 5.0, np.nan, 70.0, 71.0], size=200) + rng.choice([0, 0.25], size=200)
    statistics = TrainingStatistics.from_arrays(column[:, None])
    artifact = SimpleNamespace(
        tensorizer=SimpleNamespace(statistics=statistics),
        model=SimpleNamespace(parameters=lambda: iter([torch.zeros(1)])),
    )
    order = within_bins(Subject(artifact, None, column[:, None], None), 0).numpy()  # type: ignore[arg-type]
    assert sorted(order) == list(range(200))
    levels = [np.nanquantile(column, j / 16) for j in range(17)]
    inner = np.unique(levels)[1:-1]
    for row, source in enumerate(order):
        assert np.isnan(column[row]) == np.isnan(column[source])
        if not np.isnan(column[row]):
            assert (column[row] >= inner).sum() == (column[source] >= inner).sum()
    assert (order != np.arange(200)).any()


def permuted_by_hand(subject: Subject, field: int, order: np.ndarray) -> dict[str, float]:
    """The measurement row by row, with the AUC from all pairs."""
    model, (values, ids) = subject.artifact.model, subject.inputs
    categories = model.categories(ids)
    tokens = model.encoder(values, categories)
    other = torch.stack([values[source] for source in order])
    other[:, field] = values[:, field]
    changed = tokens.clone()
    changed[:, field] = model.encoder(other, categories)[:, field]
    z = [model.backbone(t, categories).double().numpy() for t in (tokens, changed)]
    y = np.asarray(subject.labels, dtype=bool)
    pairs = [(z_[y][:, None] > z_[~y]).mean() + 0.5 * (z_[y][:, None] == z_[~y]).mean() for z_ in z]
    p = [1 / (1 + np.exp(-z_)) for z_ in z]
    loss = [-(np.log(p_[y]).sum() + np.log1p(-p_[~y]).sum()) / len(y) for p_ in p]
    moved = (changed - tokens)[:, field].double().numpy()
    return {
        "auc_drop": pairs[0] - pairs[1],
        "log_loss_increase": loss[1] - loss[0],
        "mean_probability_change": np.abs(p[1] - p[0]).mean(),
        "relative_rms": np.sqrt((moved**2).sum() / (tokens[:, field].double().numpy() ** 2).sum()),
    }


@torch.no_grad()
def test_the_measurement_is_the_one_described(sealed: dict[str, Sealed]) -> None:
    subject = with_encoder(subject_of(sealed["raw"]), ScalarLens)
    found = audit(subject, "context-permutation").figures
    wanted = [permuted_by_hand(subject, field, within_bins(subject, field).numpy()) for field in range(4)]
    for field, name in enumerate(("spend", "balance", "never", "constant")):
        assert found["fields"][name] == pytest.approx(wanted[field], rel=1e-5, abs=1e-9)
    for key in FIGURES:
        assert found[key] == pytest.approx(np.mean([entry[key] for entry in wanted]), rel=1e-5, abs=1e-9)
    assert found["relative_rms"] > 1e-3


@torch.no_grad()
def test_the_identity_measures_nothing_and_more_than_numbers_moves_more(sealed: dict[str, Sealed]) -> None:
    subject = with_encoder(subject_of(sealed["raw"]), ScalarLens)
    whole, identity = Frozen.of(subject), torch.arange(len(subject.values))
    for field in range(4):
        assert set(whole.measure(subject, field, identity).values()) == {0.0}
    order = within_bins(subject, 0)
    numbers = whole.measure(subject, 0, order)["relative_rms"]
    values, ids = subject.inputs
    other = values[order]
    other[:, 0] = values[:, 0]
    everything = subject.encoder(other, subject.category_tokens(ids[order]))[:, 0]
    own = whole.tokens[:, 0]
    assert numbers is not None
    assert float((everything - own).norm() / own.norm()) > numbers > 0


@pytest.mark.parametrize("name", ["local-only", "daes-gate", "deer", "categorical-context-only"])
def test_an_encoder_without_numerical_context_measures_exactly_zero(sealed: dict[str, Sealed], name: str) -> None:
    found = audit(with_encoder(subject_of(sealed["raw"]), encoders.encoders.get(name)), "context-permutation")
    assert found.passed is True
    assert all(found.figures[key] == 0 for key in FIGURES)


def test_rows_without_labels_have_no_auc(sealed: dict[str, Sealed]) -> None:
    found = audit(replace(subject_of(sealed["raw"]), labels=None), "context-permutation")
    assert found.figures["auc_drop"] is None is found.figures["log_loss_increase"]
    assert found.figures["relative_rms"] > 0
    assert found.warnings


def test_a_library_that_is_absent_is_named_and_not_compared(
    sealed: dict[str, Sealed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = audit(subject_of(sealed["raw"]), "scoring-parity")
    assert found.passed
    assert found.warnings == ("not compared: pandas is not installed", "not compared: polars is not installed")
    assert found.figures["compared"] == len(PATHS) - 3  # and a prepared folder is no file of raw rows


# the subject


@pytest.mark.parametrize("scale", ["raw", "zscore"])
def test_packed_rows_come_back_as_raw_rows(sealed: dict[str, Sealed], scale: str) -> None:
    trained = sealed[scale]
    folder = trained.table.folder
    packed, parquet = (open_subject(trained.load(), data) for data in (folder, folder.parent / "valid.parquet"))
    np.testing.assert_array_equal(packed.values, parquet.values)
    np.testing.assert_array_equal(packed.category_ids, parquet.category_ids)
    np.testing.assert_array_equal(packed.labels, parquet.labels)
    values, ids = packed.artifact.tensorizer.read(packed.rows)
    np.testing.assert_array_equal(values, packed.values)
    np.testing.assert_array_equal(ids, packed.category_ids)


def test_an_unseen_category_becomes_a_text_that_training_never_kept() -> None:
    schema = Schema((), (CategoricalColumn("a", missing=("unseen_",)),), label="y")
    statistics = TrainingStatistics.fit([(np.empty((3, 0)), [pa.array(["unseen", "b", None])])])
    tensorizer = Tensorizer(schema, statistics, "raw")
    ids = np.array([[0], [1], [2], [3]])
    rows = raw_rows(tensorizer, np.empty((4, 0)), ids)
    assert rows.column("a").to_pylist() == [None, "unseen__", "b", "unseen"]
    np.testing.assert_array_equal(tensorizer.read(rows)[1], ids)


def test_rows_are_spread_over_the_data(sealed: dict[str, Sealed]) -> None:
    artifact, folder = sealed["raw"].load(), sealed["raw"].table.folder
    for data in (folder, folder.parent / "valid.parquet"):
        whole, few = (open_subject(artifact, data, rows=rows) for rows in (1000, 5))
        places = [0, 25, 50, 74, 99]
        np.testing.assert_array_equal(few.values, whole.values[places])
        assert few.rows.to_pylist() == whole.rows.take(places).to_pylist()
        assert len(whole.values) == 100


def test_a_table_that_does_not_fit_is_refused(sealed: dict[str, Sealed]) -> None:
    artifact, folder = sealed["raw"].load(), sealed["raw"].table.folder
    with pytest.raises(DataError, match="other training rows"):
        open_subject(artifact, sealed["other"].table.folder)
    with pytest.raises(UsageError, match="at least 2"):
        open_subject(artifact, folder, rows=1)
    with pytest.raises(UsageError, match="unknown split"):
        open_subject(artifact, folder, "tset")


@pytest.mark.parametrize(
    ("found", "expected", "change"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, math.inf], [1.0, math.inf], 0.0),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.0, math.inf], [1.0, -math.inf], math.inf),
        ([1.0, 3.0], [1.5, 3.0], 0.5),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], math.inf),
    ],
)
def test_the_largest_change(found: list[float], expected: list[float], change: float) -> None:
    assert largest_change(torch.tensor(found), torch.tensor(expected)) == change


# the command


def typed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["audit", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_prints_a_verdict_per_audit(sealed: dict[str, Sealed], capsys: Any) -> None:
    trained = sealed["raw"]
    code, out, err = typed(capsys, trained.folder, trained.table.folder)
    assert (code, err) == (0, "")
    assert "encoder scalarlens, 100 rows" in out
    assert out.count("\npassed      ") == 7
    assert out.count("\nnot judged  ") == 2
    code, out, err = typed(capsys, trained.folder, trained.table.folder.parent / "valid.parquet", "--split", "test")
    assert code == 0
    assert "--split changes nothing" in err


def test_the_command_in_json(sealed: dict[str, Sealed], capsys: Any) -> None:
    trained = sealed["raw"]
    only = ("--only", "mesh-resolution", "--only", "batch-invariance", "--split", "train", "--rows", 40)
    code, out, _ = typed(capsys, trained.folder, trained.table.folder, "--json", *only)
    document = json.loads(out)
    assert code == 0
    assert (document["encoder"], document["rows"], document["passed"]) == ("scalarlens", 40, True)
    assert {entry["name"]: entry["passed"] for entry in document["audits"]} == {
        "mesh-resolution": None,
        "batch-invariance": True,
    }
    assert all(set(e) == {"name", "question", "passed", "reason", "figures", "warnings"} for e in document["audits"])


def test_a_failed_audit_ends_in_exit_code_1(sealed: dict[str, Sealed], capsys: Any, tmp_path: Path) -> None:
    collapsed_nodes(subject_of(sealed["raw"])).artifact.save(tmp_path / "artifact")
    data = sealed["raw"].table.folder
    code, out, err = typed(capsys, tmp_path / "artifact", data, "--json")
    assert code == 1
    assert json.loads(out)["passed"] is False
    assert "fails mesh-resolution" in err
    assert typed(capsys, tmp_path / "artifact", data, "--only", "column-order")[0] == 0
    code, out, _ = typed(capsys, tmp_path / "artifact", data)
    assert code == 1
    assert "FAILED      mesh-resolution" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--only", "colum-order"), 2, "did you mean 'column-order'"),
        (("--rows", "1"), 2, "at least 2"),
        (("--split", "tset"), 2, "unknown split"),
    ],
)
def test_wrong_usage(
    sealed: dict[str, Sealed], capsys: Any, arguments: tuple[str, ...], code: int, message: str
) -> None:
    found, _, err = typed(capsys, sealed["raw"].folder, sealed["raw"].table.folder, *arguments)
    assert found == code
    assert message in err


def test_a_report_has_no_nan_in_it() -> None:
    report = Report("name", "why?", Finding(None, figures={"a": math.nan, "b": {"c": [math.inf, 1.0]}}))
    assert report.to_tables()["figures"] == {"a": None, "b": {"c": [None, 1.0]}}
