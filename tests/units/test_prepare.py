"""Preparation: exact statistics, one shuffle, bounded pieces, and a stop at any moment that changes no byte."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalarlens.cli import main
from scalarlens.datasets import ingest, merge, pack, spool
from scalarlens.datasets import prepare as engine
from scalarlens.datasets.files import open_table
from scalarlens.datasets.parts import DROPPED, SPLITS, Part, deal_randomly
from scalarlens.datasets.prepare import parse_bytes, prepare
from scalarlens.datasets.prepared import PreparedTable
from scalarlens.errors import DataError, ScalarLensError, UsageError
from scalarlens.progress import StageReporter
from scalarlens.table.batches import Block, PackedSplit
from scalarlens.table.columns import schema_cells
from scalarlens.table.packed import FLOATS, INTEGERS
from scalarlens.table.schema import CategoricalColumn, NumericColumn, Schema
from scalarlens.table.statistics import QUANTILE_LEVELS, TrainingStatistics
from scalarlens.table.tensorizer import Tensorizer

SCHEMA = Schema(
    (NumericColumn("price"), NumericColumn("views"), NumericColumn("row")),
    (CategoricalColumn("city", min_count=2), CategoricalColumn("ad")),
    label="clicked",
    group="user",
)
CITIES = ["Berlin", "Ber", "Zürich", "東京", "a" * 40, "a" * 39 + "b", "\U0001f600", "ï", "z"]


def make_table(rows: int, seed: int = 0) -> pa.Table:
    """Numbers with repeats and gaps, texts with ties, and `row`, which tells every row apart."""
    rng = np.random.default_rng(seed)
    price = np.where(rng.random(rows) < 0.1, np.nan, np.round(rng.lognormal(2, 2, rows), 2))
    return pa.table(
        {
            "price": pa.array(price, from_pandas=True),
            "views": rng.integers(-3, 300, rows),
            "row": np.arange(rows),
            "city": pa.array(rng.choice([*CITIES, None], rows).tolist(), pa.string()),
            "ad": pa.array([f"ad{n}" for n in rng.zipf(1.3, rows) % 5000]),
            "clicked": rng.integers(0, 2, rows),
            "user": pa.array([f"u{n}" if n else None for n in rng.integers(0, 20, rows)]),
        }
    )


def saved(table: pa.Table, path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=97)
    else:
        pyarrow.csv.write_csv(table, path)
    return path


def run(path: Path, out: Path, *, seed: int = 1, shuffle: int | None = 1, **options: Any) -> PreparedTable:
    table = open_table(path)
    part = Part(table, deal_randomly(table.count_rows(), seed))
    return prepare(SCHEMA, [part], out, shuffle_seed=shuffle, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks, ranges and shards for few rows."""
    monkeypatch.setattr(ingest, "CHUNK_ROWS", 150)
    monkeypatch.setattr(merge, "SAMPLE_EVERY", 4)
    monkeypatch.setattr(merge, "PIECE", 16)
    monkeypatch.setattr(pack, "SHARD_BYTES", 4000)
    monkeypatch.setattr(engine, "LEAST_MEMORY", 1)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


TINY = engine.MERGE_SHARE * 4000  # so that a merge may take 4,000 bytes


# statistics


def training_values(path: Path, dealt: np.ndarray) -> tuple[np.ndarray, list[pa.Array]]:
    batch = pa.Table.from_batches(open_table(path).batches()).filter(pa.array(dealt == 0))
    return schema_cells(SCHEMA, batch)


def disagreements(statistics: TrainingStatistics, values: np.ndarray) -> list[str]:
    """What float64 NumPy and exact sums say otherwise about numeric columns; None of it allows a tolerance but
    the interpolation of quantiles and the last bits of sums."""
    found = []
    for j, column in enumerate(values.T):
        present = np.sort(column[~np.isnan(column)])
        mean = math.fsum(present) / len(present)
        std = math.sqrt(math.fsum((present - mean) ** 2) / len(present))
        places = np.arange(QUANTILE_LEVELS + 1) * (len(present) - 1) / QUANTILE_LEVELS
        quantiles = np.interp(places, np.arange(len(present)), present)
        scale = np.abs(present).max() * 1e-14
        exact = {
            "missing": np.isnan(column).sum(),
            "low": present[0],
            "high": present[-1],
            "n_unique": min(len(np.unique(present)), 100_000),
        }
        found += [name for name, value in exact.items() if getattr(statistics, name)[j] != value]
        near = {"mean": mean, "std": std, "quantiles": quantiles}
        found += [name for name, value in near.items() if np.abs(getattr(statistics, name)[j] - value).max() > scale]
    return found


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_statistics_are_bit_equal_to_those_of_arrays_in_memory(tmp_path: Path, ending: str) -> None:
    path = saved(make_table(2000), tmp_path / f"log.{ending}")
    prepared = run(path, tmp_path / "out", memory_limit=TINY)
    values, texts = training_values(path, deal_randomly(2000, 1))
    expected = TrainingStatistics.fit([(values, texts)], [column.min_count for column in SCHEMA.categorical])
    assert prepared.statistics.digest() == expected.digest() == prepared.manifest["statistics_digest"]
    numbers = TrainingStatistics.from_arrays(values)
    for name, value in numbers.numbers.items():
        assert np.array_equal(getattr(prepared.statistics, name), value), name
    assert not disagreements(prepared.statistics, values)


def test_the_oracle_rejects_one_row_more_or_less(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(5000, 1))
    assert not disagreements(TrainingStatistics.from_arrays(values), values)
    extreme = int(values.argmax())
    for mutant in (
        np.delete(values, extreme, 0),
        np.delete(values, extreme - 1, 0),
        values[:4096],
        values * (1 + 1e-9),
    ):
        assert disagreements(TrainingStatistics.from_arrays(mutant), values)


def test_more_rows_than_two_to_the_twenty_are_exact(tmp_path: Path) -> None:
    rows = (1 << 20) + 50_001
    rng = np.random.default_rng(3)
    values = np.stack([rng.normal(size=rows), rng.integers(0, 1 << 30, rows).astype(float)], axis=1)
    schema = Schema((NumericColumn("a"), NumericColumn("b")), (), label="y")
    pq.write_table(pa.table({"a": values[:, 0], "b": values[:, 1], "y": np.arange(rows) % 2}), tmp_path / "t.parquet")
    prepared = prepare(schema, [Part(open_table(tmp_path / "t.parquet"), "train")], tmp_path / "out", shuffle_seed=5)
    assert prepared.statistics.digest() == TrainingStatistics.from_arrays(values).digest()
    assert not disagreements(prepared.statistics, values)
    found = prepared.split("train").batch(slice(0, rows)).values.numpy()
    assert not np.array_equal(found, values)
    assert np.array_equal(found[np.lexsort(found.T)], values[np.lexsort(values.T)])


def vocabulary_of(texts: list[str | None], min_count: int) -> list[tuple[str, int]]:
    counts = Counter(text for text in texts if text is not None)
    return sorted(((t, n) for t, n in counts.items() if n >= min_count), key=lambda entry: (-entry[1], entry[0]))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("limit", [TINY, 10 * TINY, engine.MEMORY_LIMIT])
def test_vocabularies_are_those_of_a_counter(tmp_path: Path, limit: int) -> None:
    table = make_table(3000, seed=4)
    prepared = run(saved(table, tmp_path / "t.parquet"), tmp_path / "out", memory_limit=limit)
    train = table.filter(pa.array(deal_randomly(3000, 1) == 0))
    for column, vocabulary in zip(SCHEMA.categorical, prepared.statistics.vocabularies, strict=True):
        texts = train[column.name].to_pylist()
        expected = vocabulary_of(texts, column.min_count)
        assert list(zip(vocabulary.texts, vocabulary.counts.tolist(), strict=True)) == expected
        assert vocabulary.missing == texts.count(None)
        assert vocabulary.rare == len(texts) - texts.count(None) - sum(count for _, count in expected)


def texts_in_order(tmp_path: Path, texts: list[str]) -> list[str]:
    schema = Schema((), (CategoricalColumn("text"),), label="y")
    pq.write_table(pa.table({"text": texts, "y": [0] * len(texts)}), tmp_path / "t.parquet")
    prepare(schema, [Part(open_table(tmp_path / "t.parquet"), "train")], tmp_path / "out")
    rows = pa.ipc.open_file(tmp_path / "out" / "vocabularies.arrow").read_all()
    return rows["text"].to_pylist()[2:]


@pytest.mark.usefixtures("small_pieces")
def test_ties_go_by_code_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["\uffee", "\U0001f600", "é", "z", "a", "A", "aa", "", "a" * 50, "a" * 49 + "b", "東京"] * 3 + ["last"] * 4
    expected = [text for text, _ in vocabulary_of([text or None for text in texts], 1)]
    assert texts_in_order(tmp_path, texts) == expected
    as_found = SimpleNamespace(**{**vars(pc), "sort_indices": lambda cells: pa.array(np.arange(len(cells)))})
    monkeypatch.setattr(merge, "pc", as_found)
    assert texts_in_order(tmp_path, texts) != expected


@pytest.mark.usefixtures("small_pieces")
def test_rows_are_those_that_the_tensorizer_reads(tmp_path: Path) -> None:
    path = saved(make_table(1000), tmp_path / "t.csv")
    prepared = run(path, tmp_path / "out", shuffle=None, memory_limit=TINY)
    tensorizer = Tensorizer(SCHEMA, prepared.statistics, "raw")
    table, dealt = pa.Table.from_batches(open_table(path).batches()), deal_randomly(1000, 1)
    for code, split in enumerate(SPLITS[:3]):
        rows = table.filter(pa.array(dealt == code))
        values, ids = tensorizer.read(rows)
        packed = prepared.split(split)
        batch = packed.batch(slice(0, packed.rows))
        assert np.array_equal(batch.values.numpy(), values, equal_nan=True)
        assert np.array_equal(batch.category_ids.numpy(), ids)
        assert batch.labels.tolist() == [float(label) for label in rows["clicked"].to_pylist()]
        assert packed.groups is not None
        users, codes = rows["user"].to_pylist(), packed.groups.tolist()
        assert len(set(zip(users, codes, strict=True))) == len(set(users)) == len(set(codes))


# what the result may depend on


@pytest.mark.usefixtures("small_pieces")
def test_pieces_memory_and_format_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table(1500)
    csv, parquet = saved(table, tmp_path / "t.csv"), saved(table, tmp_path / "t.parquet")
    first = contents(run(csv, tmp_path / "a", memory_limit=TINY).folder)
    assert contents(run(parquet, tmp_path / "b").folder) == first
    monkeypatch.setattr(ingest, "CHUNK_ROWS", 1 << 17)
    assert contents(run(csv, tmp_path / "c").folder) == first
    monkeypatch.setattr(ingest, "CHUNK_BYTES", 2000)
    assert contents(run(csv, tmp_path / "d", memory_limit=TINY * 3).folder) == first


@pytest.mark.usefixtures("small_pieces")
def test_a_shuffle_by_chunk_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(make_table(1500), tmp_path / "t.csv")
    dealt = pack.PackedLayout.shard_of
    monkeypatch.setattr(pack.PackedLayout, "shard_of", lambda self, start, stop: dealt(self, 0, stop - start))
    first = contents(run(path, tmp_path / "a").folder)
    monkeypatch.setattr(ingest, "CHUNK_ROWS", 200)
    assert contents(run(path, tmp_path / "b").folder) != first


def rows_of(prepared: PreparedTable, split: str) -> list[int]:
    return [int(row) for row in prepared.split(split).batch(slice(0, prepared.splits[split]["rows"])).values[:, 2]]


@pytest.mark.usefixtures("small_pieces")
def test_splits_are_disjoint_exhaustive_and_shuffled_by_the_seed(tmp_path: Path) -> None:
    path = saved(make_table(1500), tmp_path / "t.parquet")
    prepared, dealt = run(path, tmp_path / "a", memory_limit=TINY), deal_randomly(1500, 1)
    for code, split in enumerate(SPLITS[:3]):
        expected = np.flatnonzero(dealt == code).tolist()
        found = rows_of(prepared, split)
        assert sorted(found) == expected
        assert found != expected
        # Far from sorted: neighbours in the table are not neighbours here.
        assert np.abs(np.diff(found)).mean() > 300
    assert run(path, tmp_path / "b").digest == prepared.digest
    other = run(path, tmp_path / "c", shuffle=2)
    assert other.digest != prepared.digest
    assert sorted(rows_of(other, "train")) == sorted(rows_of(prepared, "train"))


@pytest.mark.usefixtures("small_pieces")
def test_rows_that_are_dropped_leave_no_trace(tmp_path: Path) -> None:
    table = make_table(800)
    dealt = deal_randomly(800, 1)
    dropped = np.where(np.arange(800) % 3 == 0, DROPPED, dealt).astype(np.uint8)
    kept = saved(table.filter(pa.array(dropped != DROPPED)), tmp_path / "kept.parquet")
    whole = saved(table, tmp_path / "whole.parquet")
    parts = [Part(open_table(whole), dropped)], [Part(open_table(kept), dropped[dropped != DROPPED])]
    first, second = (prepare(SCHEMA, part, tmp_path / f"out{n}", shuffle_seed=1) for n, part in enumerate(parts))
    assert contents(first.folder) == contents(second.folder)


@pytest.mark.usefixtures("small_pieces")
def test_other_rows_for_validation_and_test_leave_training_alone(tmp_path: Path) -> None:
    def prepared(name: str, **seeds: int) -> PreparedTable:
        paths = {s: saved(make_table(500, seed), tmp_path / f"{name}-{s}.parquet") for s, seed in seeds.items()}
        parts = [Part(open_table(path), split) for split, path in paths.items()]
        return prepare(SCHEMA, parts, tmp_path / name, shuffle_seed=3)

    first = prepared("a", train=1, valid=2, test=3)
    second = prepared("b", train=1, valid=8, test=9)
    mutant = prepared("c", train=7, valid=2, test=3)
    assert second.statistics.digest() == first.statistics.digest()
    assert second.splits["train"] == first.splits["train"]
    assert second.training_digest == first.training_digest
    assert second.digest != first.digest
    assert mutant.training_digest != first.training_digest
    assert prepared("d", train=1).training_digest == first.training_digest


# stops


class Stopped(BaseException):
    """What stands for a kill: nothing catches it."""


@contextmanager
def stopping_at(moment: int) -> Iterator[list[int]]:
    """Stop at one of the moments before which a file is flushed or takes its name; the count of those that passed."""
    passed = [0]
    patch = pytest.MonkeyPatch()

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            passed[0] += 1
            if passed[0] >= moment:
                raise Stopped
            return original(*arguments)

        return call

    patch.setattr(Path, "replace", counted(Path.replace))
    patch.setattr(os, "fsync", counted(lambda descriptor: None))
    try:
        yield passed
    finally:
        patch.undo()


@pytest.fixture
def stoppable(tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(engine, "_threads", lambda: 1)
    monkeypatch.setattr(ingest, "CHUNK_ROWS", 120)
    return saved(make_table(300), tmp_path / "t.parquet")


def test_a_stop_at_any_moment_changes_no_byte(tmp_path: Path, stoppable: Path) -> None:
    with stopping_at(1 << 30) as moments:
        whole = contents(run(stoppable, tmp_path / "whole").folder)
    assert moments[0] > 60
    out = tmp_path / "out"
    for moment in range(1, moments[0] + 1):
        with pytest.raises(Stopped), stopping_at(moment):
            run(stoppable, out)
        assert not (out / "manifest.json").exists() or contents(out) == whole
        run(stoppable, out)
        assert contents(out) == whole, moment
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "t.parquet", "whole"], moment
        for path in sorted(out.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        out.rmdir()


def test_work_that_exists_is_not_done_again(tmp_path: Path, stoppable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = contents(run(stoppable, tmp_path / "whole").folder)

    def stop(*arguments: Any) -> None:
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(engine, "write_manifest", stop)
        with pytest.raises(Stopped):
            run(stoppable, tmp_path / "out")
    monkeypatch.setattr(ingest, "_read", None)
    monkeypatch.setattr(merge, "describe", None)
    monkeypatch.setattr(merge.TextColumn, "_unite", None)
    monkeypatch.setattr(pack.Packer, "_column", None)
    monkeypatch.setattr(pack, "_append", None)
    assert contents(run(stoppable, tmp_path / "out").folder) == whole


def test_rows_behind_the_last_whole_shard_are_cut_off(
    tmp_path: Path, stoppable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(run(stoppable, tmp_path / "whole").folder)
    monkeypatch.setattr(pack, "_cut_back", lambda *arguments: None)
    written = pack.write_json

    def stop(path: Path, document: Any) -> None:
        if path.name == pack.JOURNAL_FILE and len(document) == 2:
            raise Stopped
        written(path, document)

    monkeypatch.setattr(pack, "write_json", stop)
    with pytest.raises(Stopped):
        run(stoppable, tmp_path / "out")
    monkeypatch.setattr(pack, "write_json", written)
    assert contents(run(stoppable, tmp_path / "out").folder) != whole


@pytest.mark.parametrize("other", ["schema", "rows", "split", "seed"])
def test_another_command_starts_anew(tmp_path: Path, stoppable: Path, other: str) -> None:
    rows = open_table(stoppable).count_rows()

    def prepared(out: Path, changed: str = "") -> PreparedTable:
        path = saved(make_table(300, 9), tmp_path / "other.parquet") if changed == "rows" else stoppable
        schema = Schema(SCHEMA.numeric, SCHEMA.categorical[:1], "clicked") if changed == "schema" else SCHEMA
        part = Part(open_table(path), deal_randomly(rows, 2 if changed == "split" else 1))
        return prepare(schema, [part], out, shuffle_seed=2 if changed == "seed" else 1)

    with stopping_at(1 << 30) as moments:
        prepared(tmp_path / "probe")
    with pytest.raises(Stopped), stopping_at(moments[0] // 2):
        prepared(tmp_path / "out")
    expected = contents(prepared(tmp_path / "expected", other).folder)
    assert contents(prepared(tmp_path / "out", other).folder) == expected
    assert expected != contents(tmp_path / "probe")


def test_killed_processes_continue(tmp_path: Path) -> None:
    path = saved(make_table(60_000), tmp_path / "t.csv")
    (tmp_path / "schema.toml").write_text(SCHEMA.to_toml())

    def command(out: str) -> list[str]:
        source = ["--schema", str(tmp_path / "schema.toml"), "--train", str(path)]
        return ["prepare", *source, "--split", "random", "--seed", "1", "--out", str(tmp_path / out), "--quiet"]

    assert main(command("whole")) == 0
    script = (
        "import sys; from scalarlens.datasets import ingest, pack; from scalarlens.cli import main;"
        "ingest.CHUNK_ROWS = 2000; sys.exit(main(sys.argv[1:]))"
    )
    work = tmp_path / ".out.work"
    for sign in ("chunk-000000-000003", "packed-000010"):
        process = subprocess.Popen([sys.executable, "-c", script, *command("out")], stderr=subprocess.PIPE)
        while process.poll() is None and not (work / sign).exists():
            time.sleep(1e-3)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
    done = subprocess.run([sys.executable, "-c", script, *command("out")], capture_output=True, check=True)
    assert not done.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not work.exists()


# tables that are refused, and odd ones that are not


def prepare_columns(tmp_path: Path, **columns: Any) -> PreparedTable:
    schema = Schema((NumericColumn("number"),), (CategoricalColumn("text"),), label="y")
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    return prepare(schema, [Part(open_table(tmp_path / "t.parquet"), "train")], tmp_path / "out")


def test_missing_and_constant_columns(tmp_path: Path) -> None:
    nothing = pa.nulls(4, pa.float64()), pa.nulls(4, pa.string())
    prepared = prepare_columns(tmp_path, number=nothing[0], text=nothing[1], y=[0, 1, 0, 1])
    statistics = prepared.statistics
    assert (statistics.missing[0], statistics.low[0], statistics.high[0], statistics.n_unique[0]) == (4, 0, 0, 0)
    assert statistics.vocabularies[0].size == 2
    assert prepared.split("train").batch(slice(0, 4)).category_ids.tolist() == [[0]] * 4
    constant = prepare_columns(tmp_path, number=[7.5] * 4, text=["a"] * 4, y=[0, 1, 0, 1]).statistics
    assert (constant.low[0], constant.high[0], constant.mean[0], constant.std[0]) == (7.5, 7.5, 7.5, 0)


GOOD = {"number": [1.0, 2.0, 3.0], "text": ["a", "b", "a"], "y": [0, 1, 0]}
BAD = {
    "infinite": ({"number": [1.0, 2.0, math.inf]}, r"t\.parquet: column 'number', row 3: an infinite value"),
    "label": ({"y": [0, 2, 1]}, r"t\.parquet: column 'y', row 2: the label '2' is neither 0 nor 1"),
    "no label": ({"y": [None, 1, 1]}, r"t\.parquet: column 'y', row 1: the label is missing"),
    "text": ({"number": ["1", "many", "2"]}, r"t\.parquet: column 'number', row 2: 'many' is not a number"),
    "no rows": ({"number": [], "text": [], "y": []}, r"t\.parquet has no rows"),
    "no column": ({"text": None}, r"missing column 'text'"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_tables_end_in_a_sentence_and_leave_nothing(tmp_path: Path, bad: str) -> None:
    change, sentence = BAD[bad]
    columns = {name: cells for name, cells in {**GOOD, **change}.items() if cells is not None}
    with pytest.raises(DataError, match=sentence):
        prepare_columns(tmp_path, **columns)
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


@pytest.mark.usefixtures("small_pieces")
def test_a_bad_row_is_counted_over_chunks_and_the_old_table_stays(tmp_path: Path) -> None:
    path = saved(make_table(500), tmp_path / "t.csv")
    before = contents(run(path, tmp_path / "out").folder)
    lines = path.read_text().splitlines()
    lines[433] = lines[433].replace(",", ",x", 1)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"t\.csv: column 'views', row 433: "):
        run(path, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert not (tmp_path / ".out.work").exists()


def test_a_table_that_changes_its_length_is_refused(tmp_path: Path) -> None:
    path = saved(make_table(100), tmp_path / "t.parquet")
    for rows in (99, 101):
        with pytest.raises(DataError, match="dealt to splits"):
            prepare(SCHEMA, [Part(open_table(path), deal_randomly(rows, 1))], tmp_path / "out")


def test_a_table_without_training_rows_is_refused(tmp_path: Path) -> None:
    path = saved(make_table(10), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="train split"):
        prepare(SCHEMA, [Part(open_table(path), "test")], tmp_path / "out")


def test_files_of_a_folder_may_differ_in_their_types(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    table = make_table(60)
    saved(table.slice(0, 30), folder / "a.parquet")
    later = table.slice(30).set_column(1, "views", table["views"].slice(30).cast(pa.float64()))
    saved(later, folder / "b.parquet")
    whole = prepare(SCHEMA, [Part(open_table(saved(table, tmp_path / "t.parquet")), "train")], tmp_path / "a")
    assert prepare(SCHEMA, [Part(open_table(folder), "train")], tmp_path / "b").digest == whole.digest


@pytest.mark.parametrize("writer", ["write_arrays", "write_json", "append"])
def test_a_full_disk_ends_in_a_sentence(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(make_table(300), tmp_path / "t.csv")
    (tmp_path / "schema.toml").write_text(SCHEMA.to_toml())
    source = ["--schema", str(tmp_path / "schema.toml"), "--train", str(path), "--split", "random", "--seed", "1"]
    command = ["prepare", *source, "--out", str(tmp_path / "out"), "--quiet", "--json"]

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    place = {"write_arrays": (spool, "write_arrays"), "write_json": (ingest, "write_json"), "append": (pack, "_append")}
    with monkeypatch.context() as patched:
        patched.setattr(*place[writer], full)
        assert main(command) == ScalarLensError.exit_code == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "is full; make room and give the same command again" in captured.err
    assert not (tmp_path / "out").exists()
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == {"train": 240, "valid": 30, "test": 30}


@pytest.mark.parametrize("text", ["", "2 apples", "-1GB", "GB", "1e9"])
def test_a_size_must_be_a_size(text: str) -> None:
    with pytest.raises(UsageError, match="--memory-limit is a number of bytes such as 2GB"):
        parse_bytes(text, "--memory-limit")


def test_a_limit_that_nothing_fits_in_is_refused(tmp_path: Path) -> None:
    path = saved(make_table(10), tmp_path / "t.parquet")
    with pytest.raises(UsageError, match="needs a memory limit of"):
        run(path, tmp_path / "out", memory_limit=parse_bytes("100MB"))


def test_preparing_loads_no_pytorch() -> None:
    script = "import sys, scalarlens.datasets.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert (
        subprocess.run([sys.executable, "-c", script.replace("prepare", "prepare, torch")], check=False).returncode == 1
    )


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_progress_is_shown_on_a_terminal_alone(
    tmp_path: Path, terminal: bool, quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(make_table(300), tmp_path / "t.csv")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(StageReporter, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(ingest, "CHUNK_ROWS", 100)
    with StageReporter(quiet) as reporter:
        run(path, tmp_path / "out", progress=reporter.progress)
    shown = capsys.readouterr().err
    assert bool(shown) == (terminal and not quiet)
    if shown:
        assert "reading rows: 200 of 300, " in shown
        assert " per second, 0 s left" in shown
        for stage in ("merging columns", "packing rows", "writing rows"):
            assert stage in shown


# the loader


@st.composite
def splits(draw: st.DrawFn) -> tuple[PackedSplit, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    rows = draw(st.integers(1, 30))
    values = draw(st.lists(st.sampled_from([*INTEGERS[:3], *FLOATS]), max_size=6))
    ids = draw(st.lists(st.sampled_from(INTEGERS), max_size=6))
    blocks, wide = [], {}
    for role, types, kind in (("values", values, np.float64), ("category_ids", ids, np.int64)):
        wide[role] = rng.integers(0, 200, (rows, len(types))).astype(kind)
        for storage in dict.fromkeys(types):
            columns = tuple(place for place, other in enumerate(types) if other == storage)
            blocks.append(Block(role, columns, torch.from_numpy(wide[role][:, columns].astype(storage))))
    labels = rng.integers(0, 2, (rows, 1)).astype(np.uint8)
    blocks.append(Block("labels", (0,), torch.from_numpy(labels)))
    return PackedSplit(blocks, len(values), len(ids)), wide["values"], wide["category_ids"]


def shows(batch: Any, values: np.ndarray, ids: np.ndarray) -> bool:
    kinds = batch.values.dtype == torch.float64 and batch.category_ids.dtype == torch.int64
    return kinds and np.array_equal(batch.values.numpy(), values) and np.array_equal(batch.category_ids.numpy(), ids)


@settings(max_examples=40, deadline=None)
@given(splits(), st.data())
def test_batches_hold_the_rows_asked_for_in_their_order(
    made: tuple[PackedSplit, np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    split, values, ids = made
    index = np.array(data.draw(st.lists(st.integers(0, split.rows - 1), min_size=1, max_size=20)), dtype=np.int64)
    assert shows(split.batch(torch.from_numpy(index)), values[index], ids[index])
    start = data.draw(st.integers(0, split.rows - 1))
    assert shows(split.batch(slice(start, split.rows)), values[start:], ids[start:])
    # A loader that swapped two different rows would be seen.
    swapped = index[::-1]
    if not (np.array_equal(values[index], values[swapped]) and np.array_equal(ids[index], ids[swapped])):
        assert not shows(split.batch(torch.from_numpy(swapped.copy())), values[index], ids[index])
