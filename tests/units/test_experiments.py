"""Specs, records, stores and runners; every check rejects variants that are broken on purpose."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from scalarlens import encoders
from scalarlens.artifact import load
from scalarlens.cli import main
from scalarlens.datasets.click_log import SCHEMA, make_click_log
from scalarlens.datasets.files import open_table
from scalarlens.datasets.parts import Part
from scalarlens.datasets.prepare import prepare
from scalarlens.datasets.prepared import PreparedTable
from scalarlens.errors import ArtifactError, CheckFailed, DataError, MissingExtra, UsageError
from scalarlens.experiments import runners
from scalarlens.experiments import spec as spec_module
from scalarlens.experiments import store as store_module
from scalarlens.experiments.execute import Execution, SharedTables, execute
from scalarlens.experiments.runners import Event, Lost, run
from scalarlens.experiments.spec import ATTEMPTS, PROTOCOL, RunRecord, RunSpec
from scalarlens.experiments.store import REQUESTED_FILE, Requested, RunStore, merge
from scalarlens.job import Job, train
from scalarlens.job import evaluate as evaluate_model
from scalarlens.model import ModelSpec
from scalarlens.registry import options_of
from scalarlens.storage import sha256_of, to_json, write_json
from scalarlens.table.batches import PackedSplit
from scalarlens.training import Recipe, fit

Check = Callable[[], None]

#: the module, whose name the package gives to the function in it
execute_module = sys.modules[execute.__module__]
#: what a check raises when it rejects something
REJECTED = (AssertionError, pytest.fail.Exception)
ROWS = 600
CUTS = {"train": (0, 400), "valid": (400, 500), "test": (500, 600)}
QUICK = Recipe(hidden=(8,), embedding_dim=4, batch_size=64, max_epochs=2)
#: long enough to be killed in the middle
LONG = replace(QUICK, batch_size=16, max_epochs=40, patience=40)
#: a step of this length ends in a loss that is no number
DIVERGES = replace(QUICK, learning_rate=1e30)
HERE = Execution("cpu", threads=1)
SOME_DATA = "ab" * 32


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> PreparedTable:
    folder = tmp_path_factory.mktemp("clicks")
    log = make_click_log(ROWS, seed=3).table
    for name, (start, stop) in CUTS.items():
        pq.write_table(log.slice(start, stop - start), folder / f"{name}.parquet")
    return prepare(SCHEMA, [Part(open_table(folder / f"{name}.parquet"), name) for name in CUTS], folder / "data")


def spec_of(data: str | PreparedTable, encoder: str = "deer", **changes: Any) -> RunSpec:
    digest = data if isinstance(data, str) else data.digest
    fields = {"backbone": "dnn", "recipe": QUICK, "input_scale": "raw", "seed": 1, **changes}
    return RunSpec(digest, encoder, **fields)


def record_of(spec: RunSpec, **changes: Any) -> RunRecord:
    """A record as a run would leave it, without the run."""
    figures: dict[str, float | int | None] = {"auc": 0.75, "log_loss": 0.5, "gauc": None, "rows": 100}
    fields: dict[str, Any] = {
        "status": "done",
        "attempts": 1,
        "execution": asdict(HERE),
        "versions": {"torch": "0"},
        "machine": {"cores": 2},
        "timings": {"seconds": 1.5},
        "history": [{"epoch": 1, "valid_auc": 0.75}],
        "best_epoch": 1,
        "metrics": {"valid": figures, "test": {**figures, "auc": 0.5}},
        **changes,
    }
    return RunRecord(spec, **fields)


def failed(spec: RunSpec, attempts: int = 1) -> RunRecord:
    error = {"type": "TrainingDiverged", "message": "the loss is nan"}
    return record_of(spec, status="failed", attempts=attempts, metrics={}, best_epoch=0, error=error)


@contextmanager
def replaced(*parts: tuple[Any, str, Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, part in parts:
            patch.setattr(owner, name, part)
        yield


# the spec


def check_defaults_are_filled_in() -> None:
    short = spec_of(SOME_DATA, "scalarlens")
    written = {**options_of(encoders.encoders.get("scalarlens"))}
    assert short.digest == spec_of(SOME_DATA, "scalarlens", encoder_options=written).digest
    assert dict(short.encoder_options) == written
    assert short == spec_of(SOME_DATA, "scalarlens", encoder_options=written)
    listed = replace(QUICK, hidden=[8], learning_rate=1)  # type: ignore[arg-type]
    assert (
        spec_of(SOME_DATA, recipe=listed).digest == spec_of(SOME_DATA, recipe=replace(QUICK, learning_rate=1.0)).digest
    )


CHANGES: list[dict[str, Any]] = [
    {"encoder": "linear"},
    {"encoder": "linear-relu"},
    {"backbone": "dcnv2"},
    {"backbone": "deepfm"},
    {"backbone": "widedeep"},
    {"input_scale": "zscore"},
    {"seed": 2},
    {"limit_rows": 100},
    {"limit_rows": 101},
    {"encoder_options": {"intervals": 8}, "encoder": "scalarlens"},
    {"encoder": "scalarlens"},
    {"backbone": "dcnv2", "backbone_options": {"cross_layers": 2}},
    {"recipe": replace(QUICK, patience=3)},
    {"recipe": replace(QUICK, hidden=(8, 8))},
    {"recipe": replace(QUICK, category_std=0.5)},
]


def check_everything_that_decides_is_in_the_digest() -> None:
    specs = [spec_of(SOME_DATA), spec_of("cd" * 32), *(spec_of(SOME_DATA, **change) for change in CHANGES)]
    assert len({spec.digest for spec in specs}) == len(specs)
    assert not set(spec_of(SOME_DATA).to_tables()) & set(asdict(HERE))
    assert spec_of(SOME_DATA).to_tables()["protocol"] == PROTOCOL


def without(name: str) -> Any:
    """`to_tables` that forgets a field."""
    honest = RunSpec.to_tables

    def to_tables(spec: RunSpec) -> dict[str, Any]:
        return {key: value for key, value in honest(spec).items() if key != name}

    return replaced((RunSpec, "to_tables", to_tables))


SPEC_MUTANTS = [
    (check_defaults_are_filled_in, lambda: replaced((ModelSpec, "resolved", lambda model: model))),
    (check_defaults_are_filled_in, lambda: replaced((spec_module, "fit_option", lambda name, default, value: value))),
    *[
        (check_everything_that_decides_is_in_the_digest, lambda name=name: without(name))
        for name in RunSpec.__dataclass_fields__
    ],
]


@pytest.mark.parametrize("check", [check_defaults_are_filled_in, check_everything_that_decides_is_in_the_digest])
def test_identity(check: Check) -> None:
    check()


@pytest.mark.parametrize(("check", "mutant"), SPEC_MUTANTS)
def test_a_broken_identity_is_caught(check: Check, mutant: Callable[[], Any]) -> None:
    with mutant(), pytest.raises((*REJECTED, KeyError)):
        check()


def test_a_spec_is_frozen_and_travels() -> None:
    spec = spec_of(SOME_DATA, "scalarlens", limit_rows=7)
    with pytest.raises(TypeError):
        spec.encoder_options["rank"] = 1  # type: ignore[index]
    with pytest.raises(AttributeError):
        spec.seed = 2  # type: ignore[misc]
    for twin in (RunSpec.from_tables(spec.to_tables()), pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert (twin, twin.digest, hash(twin)) == (spec, spec.digest, hash(spec))
    assert RunSpec.from_tables(json.loads(json.dumps(spec.to_tables()))) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": "der"}, "did you mean 'deer'"),
        ({"encoder_options": {"rank": 2}}, "unknown option"),
        ({"input_scale": "log"}, "unknown input scale"),
        ({"seed": -1}, "a seed is"),
        ({"seed": True}, "a seed is"),
        ({"limit_rows": 0}, "a row limit is"),
        ({"protocol": PROTOCOL + 1}, "protocol 2"),
        ({"recipe": replace(QUICK, batch_size=0.5)}, "recipe.batch_size"),
        ({"recipe": replace(QUICK, embedding_dim=1 << 40)}, "beyond"),
    ],
)
def test_a_wrong_spec_is_refused_before_any_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec_of(SOME_DATA, **changes)


def test_data_without_a_digest_is_refused() -> None:
    with pytest.raises(UsageError, match="digest of a prepared table"):
        spec_of("data/census")


# shared tables


def check_limits_cut_train_alone(tables: SharedTables, table: PreparedTable) -> None:
    limited, whole = spec_of(table, limit_rows=50), spec_of(table)
    assert [tables.split(limited, name).rows for name in CUTS] == [50, 100, 100]
    first = tables.split(limited, "train").batch(slice(0, 50))
    ours = table.split("train").batch(slice(0, 50))
    assert torch.equal(first.values.nan_to_num(-9), ours.values.nan_to_num(-9))
    assert torch.equal(first.labels, ours.labels)
    assert tables.statistics(limited).digest() == tables.statistics(whole).digest() == table.statistics.digest()
    assert tables.split(spec_of(table, limit_rows=10_000), "train").rows == 400


def check_one_copy_for_all(tables: SharedTables, table: PreparedTable) -> None:
    opened: Counter[str] = Counter()
    standardized: Counter[str] = Counter()
    honest_split, honest_standard = PreparedTable.split, type(table.statistics).standardized

    def split(self: PreparedTable, name: str, scale: Any = None) -> PackedSplit:
        opened[name] += 1
        return honest_split(self, name, scale)

    def standard(self: Any) -> Any:
        standardized["times"] += 1
        return honest_standard(self)

    specs = [
        spec_of(table, input_scale=s, limit_rows=n, seed=k)
        for s in ("raw", "zscore")
        for n in (None, 9)
        for k in (1, 2)
    ]
    with replaced((PreparedTable, "split", split), (type(table.statistics), "standardized", standard)):
        addresses = {
            (name, tables.split(spec, name).labels.data_ptr())
            for spec in specs
            for name in CUTS
            if tables.statistics(spec)
        }
    assert opened == dict.fromkeys(CUTS, 1)
    assert len(addresses) == len(CUTS)
    assert standardized["times"] == 1


def check_scales_are_kept_apart(tables: SharedTables, table: PreparedTable) -> None:
    raw, scaled = (tables.split(spec_of(table, input_scale=s), "train").batch(slice(0, 400)) for s in ("raw", "zscore"))
    mean, std = table.statistics.mean, table.statistics.std
    np.testing.assert_allclose(scaled.values, (raw.values.numpy() - mean) / np.maximum(std, 1e-12), rtol=1e-12)
    assert (
        tables.statistics(spec_of(table)).digest() != tables.statistics(spec_of(table, input_scale="zscore")).digest()
    )


class LimitsAll(SharedTables):
    def split(self, spec: RunSpec, name: str) -> PackedSplit:
        cut = super().split(spec, name)
        blocks = [replace(block, rows=block.rows[: spec.limit_rows]) for block in cut.blocks]
        return PackedSplit(blocks, cut.n_values, cut.n_categories)


class TakesTheLast(SharedTables):
    def split(self, spec: RunSpec, name: str) -> PackedSplit:
        whole = super().split(replace(spec, limit_rows=None), name)
        start = -spec.limit_rows if spec.limit_rows and name == "train" else 0
        blocks = [replace(block, rows=block.rows[start:]) for block in whole.blocks]
        return PackedSplit(blocks, whole.n_values, whole.n_categories)


class Forgetful(SharedTables):
    def split(self, spec: RunSpec, name: str) -> PackedSplit:
        self._blocks.clear()
        return super().split(spec, name)


class Refits(SharedTables):
    def statistics(self, spec: RunSpec) -> Any:
        self._fitted.clear()
        return super().statistics(spec)


class Unscaled(SharedTables):
    def split(self, spec: RunSpec, name: str) -> PackedSplit:
        return super().split(replace(spec, input_scale="raw"), name)


TABLE_CHECKS = [check_limits_cut_train_alone, check_one_copy_for_all, check_scales_are_kept_apart]


@pytest.mark.parametrize("check", TABLE_CHECKS)
def test_shared_tables(check: Any, table: PreparedTable) -> None:
    check(SharedTables([table], "cpu"), table)


@pytest.mark.parametrize(
    ("check", "mutant"),
    [
        (check_limits_cut_train_alone, LimitsAll),
        (check_limits_cut_train_alone, TakesTheLast),
        (check_one_copy_for_all, Forgetful),
        (check_one_copy_for_all, Refits),
        (check_scales_are_kept_apart, Unscaled),
    ],
)
def test_broken_shared_tables_are_caught(check: Any, mutant: type[SharedTables], table: PreparedTable) -> None:
    with pytest.raises(REJECTED):
        check(mutant([table], "cpu"), table)


def test_a_table_without_test_rows_or_with_another_digest_is_refused(table: PreparedTable, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no table at hand has the digest abababab"):
        execute(spec_of(SOME_DATA), SharedTables([table], "cpu"), HERE)
    shutil.copytree(table.folder, tmp_path / "data")
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    del manifest["splits"]["test"]
    write_json(tmp_path / "data" / "manifest.json", manifest)
    with pytest.raises(DataError, match="no test split"):
        SharedTables([tmp_path / "data"], "cpu")


# one run


def check_results_are_those_of_a_training_job(table: PreparedTable, tmp_path: Path) -> None:
    """The job of `scalarlens train`, and its artifact on the test split, know nothing of experiments."""
    for scale in ("raw", "zscore"):
        spec = spec_of(table, "scalarlens", input_scale=scale, encoder_options={"intervals": 8}, seed=5)
        record = execute(spec, SharedTables([table], "cpu"), HERE)
        job = Job(table.folder, spec.model, spec.recipe, spec.input_scale, spec.seed)
        train(job, tmp_path / scale, device=torch.device("cpu"))
        artifact = load(tmp_path / scale / "artifact")
        test = table.split("test", artifact.tensorizer.scale)
        lines = (tmp_path / scale / "history.jsonl").read_text().splitlines()
        assert record.history == [json.loads(line) for line in lines]
        assert record.metrics["test"] == evaluate_model(artifact.model, test)
        assert record.metrics["valid"]["auc"] == artifact.metrics["valid_auc"]
        assert record.best_epoch == artifact.metrics["best_epoch"]


def check_test_is_opened_once_and_last(table: PreparedTable) -> None:
    events: list[str] = []

    class Watched(SharedTables):
        def split(self, spec: RunSpec, name: str) -> PackedSplit:
            events.append(name)
            return super().split(spec, name)

    way = execute_module.WAYS["eager"]

    def trained(*arguments: Any, **options: Any) -> Any:
        result = way(*arguments, **options)
        events.append("selected")
        return result

    with replaced((execute_module, "WAYS", {"eager": trained})):
        execute(spec_of(table), Watched([table], "cpu"), HERE)
    assert events[-2:] == ["selected", "test"]
    assert events.count("test") == 1


def check_threads_are_pinned(table: PreparedTable) -> None:
    before, inside = torch.get_num_threads(), []

    def trained(*arguments: Any, **options: Any) -> Any:
        inside.append(torch.get_num_threads())
        return fit(*arguments, **options)

    with replaced((execute_module, "WAYS", {"eager": trained})):
        for threads in (1, 2):
            record = execute(spec_of(table), SharedTables([table], "cpu"), replace(HERE, threads=threads))
            assert record.execution["threads"] == threads
    assert inside == [1, 2]
    assert torch.get_num_threads() == before


def check_undefined_figures_fail(table: PreparedTable) -> None:
    def no_auc(*arguments: Any) -> dict[str, Any]:
        return {**evaluate_model(*arguments), "auc": None}

    with replaced((execute_module, "evaluate", no_auc)):
        record = execute(spec_of(table), SharedTables([table], "cpu"), HERE)
    assert (record.status, record.metrics) == ("failed", {})
    assert record.error is not None
    assert "test auc" in record.error["message"]


def unseeded() -> Any:
    free = SimpleNamespace(**{**vars(torch), "manual_seed": lambda seed: None})
    return replaced((execute_module, "torch", free))


def scores_valid_twice() -> Any:
    honest = SharedTables.split
    return replaced(
        (SharedTables, "split", lambda self, spec, name: honest(self, spec, "valid" if name == "test" else name))
    )


def peeks() -> Any:
    """Opens all splits before it trains."""
    honest = SharedTables.split

    def split(self: SharedTables, spec: RunSpec, name: str) -> PackedSplit:
        if name == "train":
            self.split(spec, "test")
        return honest(self, spec, name)

    return replaced((SharedTables, "split", split))


@pytest.mark.parametrize(
    ("check", "mutant"),
    [
        (check_results_are_those_of_a_training_job, nullcontext),
        (check_results_are_those_of_a_training_job, unseeded),
        (check_results_are_those_of_a_training_job, scores_valid_twice),
        (check_test_is_opened_once_and_last, nullcontext),
        (check_test_is_opened_once_and_last, peeks),
        (check_threads_are_pinned, nullcontext),
        (check_threads_are_pinned, lambda: replaced((execute_module, "pinned_threads", lambda threads: nullcontext()))),
        (check_undefined_figures_fail, nullcontext),
        (
            check_undefined_figures_fail,
            lambda: replaced(
                (execute_module, "undefined_metrics", lambda _: []), (spec_module, "undefined_metrics", lambda _: [])
            ),
        ),
    ],
)
def test_execution(check: Any, mutant: Any, table: PreparedTable, tmp_path: Path) -> None:
    arguments = (table, tmp_path) if check is check_results_are_those_of_a_training_job else (table,)
    with mutant(), nullcontext() if mutant is nullcontext else pytest.raises(REJECTED):
        check(*arguments)


def test_a_record_says_what_was_run_and_where(table: PreparedTable) -> None:
    spec = spec_of(table, "linear", backbone="deepfm", limit_rows=90)
    record = execute(spec, SharedTables([table], "cpu"), replace(HERE, runner="pool", jobs=3), attempt=2)
    assert (record.status, record.attempts, record.error) == ("done", 2, None)
    assert record.execution == {"device": "cpu", "threads": 1, "runner": "pool", "jobs": 3, "way": "eager"}
    assert record.rows == {"train": 90, "valid": 100, "test": 100}
    fields, width = table.schema, QUICK.embedding_dim
    assert record.parameters["encoder"] == 3 * width * len(fields.numeric)  # slope, offset and missing token
    assert record.parameters["categories"] == (width + 1) * sum(table.statistics.vocabulary_sizes)
    assert record.parameters["total"] == sum(n for name, n in record.parameters.items() if name != "total")
    assert record.versions["torch"] == torch.__version__
    assert record.timings["seconds"] >= record.timings["train_seconds"] > 0
    assert RunRecord.from_document(record.to_document(), "here") == record


def test_a_diverging_run_is_recorded_as_failed_with_its_history(table: PreparedTable) -> None:
    record = execute(spec_of(table, "linear", recipe=DIVERGES), SharedTables([table], "cpu"), HERE)
    assert record.error is not None
    assert (record.status, record.error["type"], record.metrics) == ("failed", "TrainingDiverged", {})

    def breaks_late(*arguments: Any, **options: Any) -> Any:
        fit(*arguments, **options)
        raise MemoryError("out of memory\nat last")

    with replaced((execute_module, "WAYS", {"eager": breaks_late})):
        record = execute(spec_of(table), SharedTables([table], "cpu"), HERE)
    assert record.error == {"type": "MemoryError", "message": "out of memory at last"}
    assert len(record.history) == 2


def test_an_unknown_way_of_executing_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'eager'"):
        Execution("cpu", 1, way="eagre")
    with pytest.raises(UsageError, match="start at 1"):
        Execution("cpu", 0)


# the store


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], *, sealed: bool) -> None:
    """Edit a record; `sealed` also writes the digest that belongs to the new content."""
    document = json.loads(path.read_text())
    change(document)
    if sealed:
        body = {key: value for key, value in document.items() if key != "content_digest"}
        document["content_digest"] = sha256_of(to_json(body))
    path.write_text(to_json(document))


def edit(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for path, value in changes.items():
            *parents, name = path.split("__")
            target = document
            for parent in parents:
                target = target[parent]
            target[name] = value

    return change


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def damage(change: Callable[[dict[str, Any]], None], *, sealed: bool) -> Callable[[Path], None]:
    return lambda path: rewrite(path, change, sealed=sealed)


def forget(*names: str) -> Callable[[dict[str, Any]], None]:
    return lambda document: [document.pop(name) for name in names] and None


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "not a JSON object"),
    "empty": (lambda path: path.write_bytes(b""), "not a JSON object"),
    "edited": (damage(edit(metrics__test__auc=0.99), sealed=False), "another digest"),
    "partial": (damage(forget("history"), sealed=False), "another digest"),
    "without parts": (damage(forget("history"), sealed=True), "stale or foreign"),
    "other options": (damage(edit(spec__encoder_options={}), sealed=True), "options are not the ones"),
    "unknown options": (damage(edit(spec__encoder_options={"nodes": 2}), sealed=True), "stale or foreign"),
    "unknown encoder": (damage(edit(spec__encoder="gone"), sealed=True), "stale or foreign"),
    "other protocol": (damage(edit(spec__protocol=PROTOCOL + 1), sealed=True), "is of protocol"),
    "other digest": (damage(edit(digest="0" * 64), sealed=True), "options are not the ones"),
    "no test AUC": (damage(edit(metrics__test__auc=None), sealed=True), "stale or foreign"),
    "failed with metrics": (damage(edit(status="failed"), sealed=True), "stale or foreign"),
    "no such status": (damage(edit(status="better"), sealed=True), "stale or foreign"),
    "foreign": (lambda path: path.replace(path.with_name(f"{'1' * 64}.record.json")), "record of another run"),
}


def check_damage_is_refused(folder: Path, kind: str) -> None:
    store, spec = RunStore(folder), spec_of(SOME_DATA, "scalarlens")
    store.put(record_of(spec))
    store.put(record_of(spec_of(SOME_DATA, seed=8)))
    assert len(store.records()) == 2
    spoil, message = DAMAGES[kind]
    spoil(store.path(spec.digest))
    with pytest.raises(ArtifactError, match=message):
        store.records()
    if kind != "foreign":
        with pytest.raises(ArtifactError, match=message):
            store.missing([spec])


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_no_whole_record_of_ours_is_refused(kind: str, tmp_path: Path) -> None:
    check_damage_is_refused(tmp_path, kind)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_trusting_store_is_caught(kind: str, tmp_path: Path) -> None:
    """One that reads what is there, and asks nothing."""

    def trusting(path: Path) -> RunRecord:
        return record_of(spec_of(SOME_DATA))

    with replaced((store_module, "read_record", trusting)), pytest.raises(REJECTED):
        check_damage_is_refused(tmp_path, kind)


def test_remains_of_a_crash_are_no_records(tmp_path: Path) -> None:
    store, spec = RunStore(tmp_path / "new"), spec_of(SOME_DATA)
    assert (store.records(), store.missing([spec, spec])) == ([], [spec])
    store.put(record_of(spec_of(SOME_DATA, seed=2)))
    path = store.path(spec.digest)
    path.with_name(f".{path.name}.partial").write_text('{"spec"')
    assert len(store.records()) == 1
    assert store.standing([spec, spec_of(SOME_DATA, seed=2)]) == {"done": 1, "failed": 0, "missing": 1}
    store.put(record_of(spec))
    assert store.find(spec) == record_of(spec)
    assert sorted(p.name for p in store.folder.iterdir() if p.name.startswith(".")) == [".lock"]
    with pytest.raises(UsageError, match="is a file"):
        RunStore(path)


def check_what_stands(folder: Path) -> None:
    store, spec = RunStore(folder), spec_of(SOME_DATA)
    store.put(failed(spec))
    assert (store.missing([spec]), store.unfinished([spec])) == ([], [spec])
    store.put(failed(spec, 2))
    assert store.unfinished([spec]) == []
    store.put(failed(spec, 1))
    assert store.records() == [failed(spec, 2)]
    done, later = record_of(spec), record_of(spec, timings={"seconds": 9.0})
    assert store.put(done) == done
    assert store.put(later) == done
    assert store.put(failed(spec, 2)) == done
    assert store.records() == [done]


def check_many_writers(folder: Path) -> None:
    specs = [spec_of(SOME_DATA, seed=seed) for seed in range(12)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: RunStore(folder).put(record_of(specs[i // 8])), range(96)))
    assert RunStore(folder).standing(specs) == {"done": 12, "failed": 0, "missing": 0}


@pytest.mark.parametrize("check", [check_what_stands, check_many_writers])
def test_records_are_kept(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize(
    ("check", "mutant"),
    [
        (check_what_stands, lambda: replaced((store_module, "_supersedes", lambda record, standing: True))),
        (check_what_stands, lambda: replaced((store_module, "_supersedes", lambda record, standing: False))),
        (check_what_stands, lambda: replaced((store_module, "is_finished", lambda record: record is not None))),
        (check_what_stands, lambda: replaced((spec_module, "ATTEMPTS", 99))),
        (check_many_writers, lambda: replaced((RunStore, "_locked", lambda self: nullcontext()))),
    ],
)
def test_a_store_that_keeps_the_wrong_record_is_caught(check: Any, mutant: Any, tmp_path: Path) -> None:
    slow = store_module.write_json

    def slowly(path: Path, document: Any) -> None:
        time.sleep(0.001)
        slow(path, document)

    with mutant(), replaced((store_module, "write_json", slowly)), pytest.raises((*REJECTED, OSError)):
        check(tmp_path)


def test_requests_are_kept_beside_the_records(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    runs = [Requested(spec_of(SOME_DATA, seed=seed), {"dataset": "clicks", "encoder": "DEER"}) for seed in range(3)]
    assert (store.requests(), store.requested("matrix")) == ([], None)
    store.request("matrix", runs[:2], {"limit_rows": None, "seeds": (0, 1)})
    store.request("other", runs[:1], {})
    store.request("matrix", runs[1:], {"limit_rows": None, "seeds": (0, 1)})
    found = store.requested("matrix")
    assert found is not None
    assert list(found.runs) == runs
    assert found.options == {"limit_rows": None, "seeds": [0, 1]}
    assert [request.study for request in store.requests()] == ["matrix", "other"]
    with pytest.raises(UsageError, match="another limit_rows"):
        store.request("matrix", runs, {"limit_rows": 10, "seeds": (0, 1)})
    assert store.requested("matrix") == found
    document = json.loads((tmp_path / REQUESTED_FILE).read_text())
    document["studies"]["matrix"]["runs"][0]["spec"]["encoder"] = "gone"
    write_json(tmp_path / REQUESTED_FILE, document)
    with pytest.raises(ArtifactError, match="no list of requested runs"):
        store.requested("matrix")


# joining stores


def two_stores(folder: Path) -> tuple[RunStore, RunStore, list[RunSpec]]:
    specs = [spec_of(SOME_DATA, seed=seed) for seed in range(4)]
    one, other = RunStore(folder / "one"), RunStore(folder / "other")
    one.request("matrix", [Requested(spec) for spec in specs[:2]], {"limit_rows": None})
    other.request("matrix", [Requested(spec) for spec in specs[1:]], {"limit_rows": None})
    for record in (record_of(specs[0]), record_of(specs[1]), failed(specs[2], 2)):
        one.put(record)
    for record in (record_of(specs[1], timings={"seconds": 7.0}, machine={}), record_of(specs[2]), failed(specs[3])):
        other.put(record)
    return one, other, specs


def check_merge(folder: Path) -> None:
    one, other, specs = two_stores(folder)
    assert merge([one.folder, other.folder], folder / "all") == {"records": 4, "failed": 1}
    joined = RunStore(folder / "all")
    assert joined.standing(specs) == {"done": 3, "failed": 1, "missing": 0}
    assert joined.find(specs[1]) == record_of(specs[1])
    request = joined.requested("matrix")
    assert request is not None
    assert [found.spec for found in request.runs] == specs
    assert merge([other.folder], folder / "all") == {"records": 4, "failed": 1}


def check_conflicts(folder: Path) -> None:
    one, other, specs = two_stores(folder)
    figures = {"auc": 0.75, "log_loss": 0.5, "gauc": None, "rows": 100}
    clash = record_of(specs[0], metrics={"valid": figures, "test": {**figures, "auc": math.nextafter(0.5, 1)}})
    other.put(clash)
    with pytest.raises(ArtifactError, match=f"1 run ended with different results.*{specs[0].digest[:8]}"):
        merge([one.folder, other.folder], folder / "all")
    assert not (folder / "all").exists()
    other.path(specs[0].digest).unlink()
    merge([one.folder, other.folder], folder / "all")


MERGE_MUTANTS = [
    (check_merge, lambda: replaced((store_module, "_supersedes", lambda record, standing: False))),
    (check_merge, lambda: replaced((store_module, "_same_results", lambda one, other: one == other))),
    (check_merge, lambda: replaced((store_module, "_joined", lambda before, added, folder: added))),
    (check_conflicts, lambda: replaced((store_module, "_same_results", lambda one, other: True))),
    (
        check_conflicts,
        lambda: replaced(
            (
                store_module,
                "_same_results",
                lambda a, b: round(a.metrics["test"]["auc"], 9) == round(b.metrics["test"]["auc"], 9),
            )
        ),
    ),
]


@pytest.mark.parametrize("check", [check_merge, check_conflicts])
def test_merge(check: Callable[[Path], None], tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize(("check", "mutant"), MERGE_MUTANTS)
def test_a_broken_merge_is_caught(check: Callable[[Path], None], mutant: Any, tmp_path: Path) -> None:
    with mutant(), pytest.raises((*REJECTED, ArtifactError)):
        check(tmp_path)


def test_merge_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other, specs = two_stores(tmp_path)
    stores = ["runs", "merge", str(one.folder), str(other.folder), "--into"]
    assert main([*stores, str(tmp_path / "all"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"records": 4, "failed": 1}
    assert main([*stores, str(tmp_path / "all")]) == 0
    assert "4 records, 1 of them of failed runs" in capsys.readouterr().out
    assert main(["runs", "merge", str(tmp_path / "typo"), "--into", str(tmp_path / "all")]) == 2
    assert "holds no runs" in capsys.readouterr().err
    truncate(one.path(specs[0].digest))
    assert main([*stores, str(tmp_path / "all")]) == 4
    assert "not a JSON object" in capsys.readouterr().err


def test_stores_of_other_options_are_not_joined(tmp_path: Path) -> None:
    one, other, specs = two_stores(tmp_path)
    (other.folder / REQUESTED_FILE).unlink()
    other.request("matrix", [Requested(specs[0])], {"limit_rows": 9})
    with pytest.raises(UsageError, match="another limit_rows"):
        merge([one.folder, other.folder], tmp_path / "all")
    assert not (tmp_path / "all").exists()


# runners: this process


class Heard:
    """Keeps what a runner tells."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def count(self, state: str, spec: RunSpec | None = None) -> int:
        return sum(event.state == state and spec in (None, event.spec) for event in self.events)


def check_resume_skips(table: PreparedTable, folder: Path) -> None:
    store, specs = RunStore(folder), [spec_of(table, encoder) for encoder in ("linear", "deer", "field")]
    first, second = Heard(), Heard()
    assert run(specs[:2], store, [table.folder], device="cpu", threads=1, tell=first)["done"] == 2
    before = {path: path.read_bytes() for path in folder.glob("*.json")}
    assert run([*specs, specs[0]], store, [table.folder], device="cpu", threads=1, tell=second) == {
        "done": 3,
        "failed": 0,
        "missing": 0,
    }
    assert [event.spec for event in second.events] == [specs[2]] * 2
    assert (second.events[-1].done, second.events[-1].total) == (1, 1)
    assert all(path.read_bytes() == content for path, content in before.items())


def check_failures_are_tried_twice(table: PreparedTable, folder: Path) -> None:
    bad, good = spec_of(table, "linear", recipe=DIVERGES), spec_of(table)
    store, heard = RunStore(folder), Heard()
    standing = run([bad, good], store, [table.folder], device="cpu", threads=1, tell=heard)
    assert standing == {"done": 1, "failed": 1, "missing": 0}
    assert [heard.count("started", spec) for spec in (bad, good)] == [2, 1]
    record = store.find(bad)
    assert record is not None
    assert (record.status, record.attempts, record.metrics) == ("failed", 2, {})
    run([bad, good], store, [table.folder], device="cpu", threads=1, tell=heard)
    assert heard.count("started", bad) == 2
    # An attempt that was the first of an earlier session is followed by one more.
    store.path(bad.digest).unlink()
    store.put(failed(bad, 1))
    run([bad], store, [table.folder], device="cpu", threads=1, tell=heard)
    assert heard.count("started", bad) == 3


def again(record: RunRecord | None) -> bool:
    return record is not None and record.status == "done"


LOCAL_MUTANTS = [
    (
        check_resume_skips,
        lambda: replaced(
            (RunStore, "unfinished", lambda self, specs: list(specs)), (runners, "is_finished", lambda _: False)
        ),
    ),
    (check_failures_are_tried_twice, lambda: replaced((RunRecord, "finished", property(lambda record: True)))),
    (
        check_failures_are_tried_twice,
        lambda: replaced((store_module, "is_finished", again), (runners, "is_finished", again)),
    ),
]


@pytest.mark.parametrize("check", [check_resume_skips, check_failures_are_tried_twice])
def test_the_local_runner(check: Any, table: PreparedTable, tmp_path: Path) -> None:
    check(table, tmp_path)


@pytest.mark.parametrize(("check", "mutant"), LOCAL_MUTANTS)
def test_a_broken_runner_is_caught(check: Any, mutant: Any, table: PreparedTable, tmp_path: Path) -> None:
    with mutant(), pytest.raises((*REJECTED, UsageError)):
        check(table, tmp_path)


def test_wrong_orders_are_refused_before_a_worker_starts(table: PreparedTable, tmp_path: Path) -> None:
    store, specs = RunStore(tmp_path), [spec_of(table)]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"runner": "pol"}, "did you mean 'pool'"),
        ({"jobs": 2}, "the local runner has one job"),
        ({"runner": "pool", "jobs": 0}, "start at 1"),
        ({"threads": 0}, "start at 1"),
        ({"way": "fast"}, "unknown way of executing"),
    ]
    for options, message in cases:
        with pytest.raises(UsageError, match=message):
            run(specs, store, [table.folder], device="cpu", **options)
    with pytest.raises(UsageError, match="no table at hand"):
        run([spec_of(SOME_DATA)], store, [table.folder], device="cpu", runner="pool")
    assert not list(tmp_path.iterdir())


def test_ray_is_an_extra(table: PreparedTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'scalarlens\[ray\]'"):
        run([spec_of(table)], RunStore(tmp_path), [table.folder], device="cpu", runner="ray")


# runners: the loop, with workers that follow a script


class Script:
    """A crew whose workers end as told: per seed, the outcomes of its attempts."""

    def __init__(self, outcomes: dict[int, list[str]]) -> None:
        self.outcomes = {seed: list(ends) for seed, ends in outcomes.items()}
        self.given: dict[int, tuple[RunSpec, int]] = {}
        self.hired: list[int] = []
        self.dismissed: list[int] = []
        self.attempts: list[tuple[int, int]] = []
        self.closed = False

    def hire(self) -> int:
        self.hired.append(len(self.hired))
        return self.hired[-1]

    def assign(self, worker: int, spec: RunSpec, attempt: int) -> int:
        assert worker not in self.dismissed
        assert worker not in self.given
        self.given[worker] = spec, attempt
        self.attempts.append((spec.seed, attempt))
        return worker

    def wait(self, busy: Collection[int]) -> tuple[int, RunRecord | Lost]:
        worker = min(busy)
        spec, attempt = self.given.pop(worker)
        end = self.outcomes[spec.seed].pop(0)
        if end in ("lost", "unborn"):
            return worker, Lost(began=end == "lost")
        return worker, record_of(spec) if end == "done" else failed(spec, attempt)

    def dismiss(self, worker: int) -> None:
        self.dismissed.append(worker)

    def close(self) -> None:
        self.closed = True


def played(
    folder: Path, table: PreparedTable, outcomes: dict[int, list[str]], tell: Any = None
) -> tuple[Script, RunStore]:
    script, store = Script(outcomes), RunStore(folder)
    specs = [spec_of(table, seed=seed) for seed in outcomes]
    with replaced((runners, "CREWS", {"script": lambda folders, execution: script})):
        run(specs, store, [table.folder], device="cpu", runner="script", jobs=2, tell=tell)
    assert script.closed
    return script, store


def check_a_lost_run_is_tried_again(table: PreparedTable, folder: Path) -> None:
    heard = Heard()
    outcomes = {
        1: ["done"],
        2: ["lost", "done"],
        3: ["lost", "lost"],
        4: ["unborn", "unborn", "done"],
        5: ["failed", "done"],
    }
    script, store = played(folder, table, outcomes, heard)
    records = {record.spec.seed: record for record in store.records()}
    assert {seed: record.status for seed, record in records.items()} == {
        1: "done",
        2: "done",
        3: "failed",
        4: "done",
        5: "done",
    }
    assert records[3].error is not None
    assert (records[3].error["type"], records[3].attempts) == ("WorkerDied", ATTEMPTS)
    assert not any(script.outcomes.values())
    assert heard.count("lost") == 5
    assert Counter(attempt for seed, attempt in script.attempts if seed == 5) == {1: 1, 2: 1}
    assert len(script.dismissed) == 6  # each worker that died, and the one whose run failed
    assert max(script.hired) < 8
    assert heard.events[-1].done == heard.events[-1].total == 5


def loses_for_good(shift: Any, worker: Any, outcome: Any, waiting: Any, idle: Any) -> None:
    shift.busy.pop(worker)
    if not isinstance(outcome, Lost):
        shift.store.put(outcome)


class Blamed(Lost):
    """Says of every worker that it had begun."""

    def __init__(self, began: bool) -> None:
        super().__init__(True)


def test_the_loop_over_workers(table: PreparedTable, tmp_path: Path) -> None:
    check_a_lost_run_is_tried_again(table, tmp_path)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda: replaced((runners._Shift, "_finish", loses_for_good)),
        lambda: replaced((runners, "ATTEMPTS", 3)),
        lambda: replaced((runners, "ATTEMPTS", 1)),
        lambda: replaced((Script, "dismiss", lambda script, worker: None)),
        lambda: replaced((sys.modules[__name__], "Lost", Blamed)),
    ],
)
def test_a_broken_loop_is_caught(mutant: Any, table: PreparedTable, tmp_path: Path) -> None:
    with mutant(), pytest.raises((*REJECTED, IndexError, TypeError, UsageError)):
        check_a_lost_run_is_tried_again(table, tmp_path)


def test_a_run_that_another_process_finished_is_not_repeated(table: PreparedTable, tmp_path: Path) -> None:
    def beside(event: Event) -> None:
        if event.state == "started" and event.spec.seed == 1:
            RunStore(tmp_path).put(record_of(spec_of(table, seed=3)))

    script, store = played(tmp_path, table, {1: ["done"], 2: ["done"], 3: []}, beside)
    assert [seed for seed, _ in script.attempts] == [1, 2]
    assert len(store.records()) == 3


def test_workers_that_cannot_begin_end_the_work() -> None:
    stillborn = runners._Stillborn()
    for began in (False, True, False, False):
        assert stillborn.died(began, "exit code 1") == Lost(began)
    with pytest.raises(CheckFailed, match=r"3 workers in a row.*exit code 1"):
        stillborn.died(False, "exit code 1")
    stillborn.born()
    assert stillborn.died(False, "") == Lost(False)


def test_a_process_that_died_idle_is_no_fault_of_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process(SimpleNamespace):
        pid, exitcode = 7, -9

        def join(self, seconds: float) -> None:
            """It has ended."""

    class Worker:
        def __init__(self, folders: Any, execution: Execution) -> None:
            self.pipe, self.far = multiprocessing.Pipe()
            self.process, self.ready = Process(), False

    monkeypatch.setattr(runners, "_PoolWorker", Worker)
    pool, spec = runners._Pool([], HERE), spec_of(SOME_DATA)
    idle, working, answering = (pool.hire() for _ in range(3))
    for worker in (working, answering):
        worker.far.send(None)
        assert pool.assign(worker, spec, 1) == 7
    answering.far.send(record_of(spec).to_document())
    assert pool.wait([answering]) == (answering, record_of(spec))
    idle.ready = True
    idle.far.close()
    assert pool.assign(idle, spec, 1) == 7
    assert pool.wait([idle]) == (idle, Lost(began=False))
    assert working.far.recv() == (spec.to_tables(), 1)
    working.far.close()
    assert pool.wait([working]) == (working, Lost(began=True))
    for worker in (idle, working, answering):
        worker.pipe.close()
        worker.far.close()


@pytest.mark.parametrize("before", [None, "7"])
def test_a_variable_for_a_new_process_is_taken_back(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if before is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", before)
    with runners._environment("OMP_NUM_THREADS", "3"):
        assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ.get("OMP_NUM_THREADS") == before


# runners that start processes


class Killer(Heard):
    """Kills a worker in the middle of the long run, once, after it has proved to be alive."""

    def __init__(self, victim: RunSpec) -> None:
        super().__init__()
        self.victim, self.killed = victim, 0

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if event.state == "started" and event.spec == self.victim and not self.killed:
            alive = {heard.pid for heard in self.events if heard.state == "done"}
            assert event.pid in alive
            assert event.pid not in (None, os.getpid())
            time.sleep(0.25)
            self.killed += 1
            os.kill(event.pid or 0, signal.SIGKILL)


@pytest.fixture(scope="module")
def planned(table: PreparedTable) -> tuple[list[RunSpec], RunSpec]:
    """Quick runs, and a long one that starts when the workers have done one each."""
    quick = [spec_of(table, e, input_scale=s) for e in ("linear", "deer", "field") for s in ("raw", "zscore")]
    victim = spec_of(table, "scalarlens", recipe=LONG)
    return [*quick[:3], victim, *quick[3:]], victim


@pytest.fixture(scope="module")
def in_this_process(
    table: PreparedTable, planned: tuple[list[RunSpec], RunSpec], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    store = RunStore(tmp_path_factory.mktemp("local"))
    run(planned[0], store, [table.folder], device="cpu", threads=1)
    return {record.spec.digest: record.results for record in store.records()}


@pytest.mark.parametrize(
    "runner",
    [
        "pool",
        # Warnings of Ray itself are not ours to mend.
        pytest.param("ray", marks=pytest.mark.filterwarnings("default")),
    ],
)
def test_other_runners_end_in_the_same_bits_though_a_worker_is_killed(
    runner: str,
    table: PreparedTable,
    planned: tuple[list[RunSpec], RunSpec],
    in_this_process: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if runner == "ray":
        pytest.importorskip("ray")
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    specs, victim = planned
    store, killer = RunStore(tmp_path), Killer(victim)
    standing = run(specs, store, [table.folder], device="cpu", runner=runner, jobs=2, threads=1, tell=killer)
    assert standing == {"done": len(specs), "failed": 0, "missing": 0}
    assert killer.killed == 1
    assert [event.spec for event in killer.events if event.state == "lost"] == [victim]
    assert Counter(event.spec for event in killer.events if event.state == "started") == {
        spec: 1 + (spec == victim) for spec in specs
    }
    records = store.records()
    assert {record.spec.digest: record.results for record in records} == in_this_process
    assert {record.execution["runner"] for record in records} == {runner}
    assert {record.execution["threads"] for record in records} == {1}
