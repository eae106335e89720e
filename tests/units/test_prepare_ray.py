"""Preparation on Ray: the same bytes as here, whatever was done where, and whoever died on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from test_prepare import SCHEMA, contents, make_table, saved

from scalarlens.cli import main
from scalarlens.datasets import ingest
from scalarlens.datasets import prepare as engine
from scalarlens.datasets.files import Table, open_table
from scalarlens.datasets.parts import Part, deal_randomly
from scalarlens.datasets.prepare import prepare
from scalarlens.errors import DataError, UsageError

# Warnings of Ray itself are not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")
FILES = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.delenv("RAY_ADDRESS", raising=False)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
    patch.undo()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table in several Parquet files of different lengths, each of which is a piece."""
    monkeypatch.setattr(ingest, "PIECE_BYTES", 1)
    table = make_table(1000)
    (tmp_path / "log").mkdir()
    for number, (start, stop) in enumerate([(0, 100), (100, 450), (450, 451), (451, 1000)]):
        saved(table.slice(start, stop - start), tmp_path / "log" / f"part-{number}.parquet")
    return tmp_path / "log"


def parts_of(table: Table, way: str) -> list[Part]:
    return [Part(table, deal_randomly(table.count_rows(), 7) if way == "random" else "train")]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("way", ["random", "whole"])
@pytest.mark.parametrize("kind", ["folder", "csv"])
def test_the_engines_give_the_same_bytes(tmp_path: Path, folder: Path, kind: str, way: str) -> None:
    path = folder if kind == "folder" else saved(make_table(1000), tmp_path / "log.csv")
    seed = 3 if way == "random" else None

    def prepared(out: str, name: str, path: Path = path) -> dict[str, bytes]:
        parts = parts_of(open_table(path), way)
        return contents(prepare(SCHEMA, parts, tmp_path / out, shuffle_seed=seed, engine=name).folder)

    local = prepared("local", "local")
    assert prepared("ray", "ray") == local
    assert sorted(entry.name for entry in tmp_path.iterdir() if ".work" in entry.name) == []
    other = saved(make_table(1000, seed=1), tmp_path / "other.parquet")
    assert prepared("other", "ray", other) != local


def test_pieces_change_no_byte(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (1, 20_000, 1 << 27):
        monkeypatch.setattr(ingest, "PIECE_BYTES", size)
        parts = parts_of(open_table(folder), "random")
        pieces = len(ingest._cut_part(parts[0]))
        found.append((pieces, contents(prepare(SCHEMA, parts, tmp_path / str(size), shuffle_seed=3).folder)))
    assert found[0][0] == FILES > found[1][0] > found[2][0] == 1
    assert found[0][1] == found[1][1] == found[2][1]


def test_rows_dealt_to_another_piece_would_be_seen(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(prepare(SCHEMA, parts_of(open_table(folder), "random"), tmp_path / "a").folder)
    cut = ingest._cut_part

    def displaced(part: Part) -> list[Part]:
        return [replace(piece, dealt=np.roll(piece.dealt, 1)) for piece in cut(part)]

    monkeypatch.setattr(ingest, "_cut_part", displaced)
    assert contents(prepare(SCHEMA, parts_of(open_table(folder), "random"), tmp_path / "b").folder) != whole


class Stopped(BaseException):
    """What stands for a kill."""


def stop(*_: Any) -> None:
    raise Stopped


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("first", ["local", "ray"])
def test_what_one_engine_read_the_other_does_not_read_again(
    tmp_path: Path, folder: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(open_table(folder), "random")
    whole = contents(prepare(SCHEMA, parts, tmp_path / "whole").folder)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "layouts_of", stop)
        with pytest.raises(Stopped):
            prepare(SCHEMA, parts, tmp_path / "out", engine=first)
    work = tmp_path / ".out.work"
    assert len(list(work.glob("piece-*.json"))) == FILES
    kept = {path: path.stat().st_mtime_ns for path in work.glob("chunk-*")}
    lost = [*work.glob("chunk-000002-*"), work / "piece-000002.json"]
    for path in lost:
        path.unlink()
    read: list[int] = []

    def watched(pieces: Sequence[ingest.Piece], tell: Any) -> None:
        read.extend(piece.number for piece in pieces)
        chosen(pieces, tell)
        assert {path: path.stat().st_mtime_ns for path in kept if path not in lost} == {
            path: time for path, time in kept.items() if path not in lost
        }

    with engine._pool() as pool:
        chosen = engine._engine({"local": "ray", "ray": "local"}[first], pool)
        monkeypatch.setattr(engine, "_engine", lambda name, pool: watched)
        assert contents(prepare(SCHEMA, parts, tmp_path / "out").folder) == whole
    assert read == [2]


@pytest.mark.usefixtures("cluster")
def test_a_task_that_is_killed_is_done_by_another(tmp_path: Path, folder: Path) -> None:
    # Inside of the test, so that Ray carries the class to its workers.
    class DiesOnce:
        def __init__(self, file: Any, sign: Path) -> None:
            self.file, self.sign, self.path, self.columns = file, sign, file.path, file.columns

        def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
            if not self.sign.exists():
                self.sign.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield from self.file.batches(columns, batch_rows)

        def count_rows(self) -> int:
            return int(self.file.count_rows())

    table = open_table(folder)
    whole = contents(prepare(SCHEMA, parts_of(table, "random"), tmp_path / "a").folder)
    deadly = replace(table, files=tuple(DiesOnce(file, tmp_path / "sign") for file in table.files))
    found = contents(prepare(SCHEMA, parts_of(deadly, "random"), tmp_path / "b", engine="ray").folder)
    assert (tmp_path / "sign").exists()
    assert found == whole


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", ["local", "ray"])
def test_a_bad_row_is_named_in_its_file_and_nothing_is_left(tmp_path: Path, folder: Path, name: str) -> None:
    table = make_table(10).drop_columns("price").append_column("price", pa.array(["1"] * 6 + ["many"] + ["2"] * 3))
    saved(table, folder / "part-4.parquet")
    sentence = r"part-4\.parquet: column 'price', row 7: 'many' is not a number"
    with pytest.raises(DataError, match=sentence) as caught:
        prepare(SCHEMA, parts_of(open_table(folder), "random"), tmp_path / "out", engine=name)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["log"]


def test_a_bad_row_is_named_in_its_file_though_files_share_a_chunk(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    table = make_table(50).drop_columns("views")
    for number in range(3):
        views = np.where((np.arange(50) == 30) & (number == 1), np.inf, 1.0)
        saved(table.append_column("views", pa.array(views)), tmp_path / "log" / f"part-{number}.parquet")
    opened = open_table(tmp_path / "log")
    assert len(ingest._cut_part(Part(opened, "train"))) == 1
    assert len(list(ingest._cut(opened, SCHEMA.columns, 0))) == 1
    with pytest.raises(DataError, match=r"part-1\.parquet: column 'views', row 31: an infinite value"):
        prepare(SCHEMA, [Part(opened, "train")], tmp_path / "out")


def test_the_command_starts_ray_by_itself(tmp_path: Path, folder: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    (tmp_path / "schema.toml").write_text(SCHEMA.to_toml())
    source = ["--schema", str(tmp_path / "schema.toml"), "--train", str(folder), "--split", "random", "--seed", "1"]
    assert main(["prepare", *source, "--out", str(tmp_path / "local"), "--quiet"]) == 0
    script = "import sys; from scalarlens.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", script, "prepare", *source, "--out", str(tmp_path / "ray"), "--engine", "ray"],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ray: train 800 rows, valid 100 rows, test 100 rows\n")
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_preparing_here_needs_no_ray(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "schema.toml").write_text(SCHEMA.to_toml())
    source = ["--schema", str(tmp_path / "schema.toml"), "--train", str(folder), "--split", "random", "--seed", "1"]
    command = ["prepare", *source, "--out", str(tmp_path / "out"), "--quiet"]
    assert main([*command, "--engine", "ray"]) == UsageError.exit_code
    assert "pip install 'scalarlens[ray]'" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["log", "schema.toml"]
    assert main(command) == 0
    with pytest.raises(UsageError, match="unknown engine 'rya'; did you mean 'ray'"):
        prepare(SCHEMA, parts_of(open_table(folder), "whole"), tmp_path / "other", engine="rya")


def test_neither_the_package_nor_the_local_engine_imports_ray() -> None:
    script = "import sys, scalarlens, scalarlens.cli, scalarlens.datasets.prepare{}; sys.exit('ray' in sys.modules)"
    for more, found in (("", 0), (", ray", 1)):
        if more:
            pytest.importorskip("ray", reason="Ray is not installed")
        assert subprocess.run([sys.executable, "-c", script.format(more)], check=False).returncode == found
