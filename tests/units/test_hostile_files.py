"""Hostile files given to `scalarlens prepare`: one sentence, the right exit code, and nothing to train on."""

from __future__ import annotations

import bz2
import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalarlens.cli import main
from scalarlens.datasets import files, prepare, spool
from scalarlens.errors import DataError, ScalarLensError, UsageError

SCHEMA = 'label = "y"\n\n[numeric]\nprice = {}\n\n[categorical]\ncity = {}\n'
ROWS = 60
CRITEO_ROW = ["0", *["1"] * 13, *["68fd1e64"] * 26]


def lines(rows: int = ROWS) -> list[bytes]:
    return [b"price,city,y", *(b"%d,c%d,%d" % (row, row % 7, row % 2) for row in range(rows))]


def joined(rows: list[bytes]) -> bytes:
    return b"\n".join(rows) + b"\n"


def changed(row: int, line: bytes) -> bytes:
    """A good table but for one line; row 1 is the first below the header."""
    rows = lines()
    rows[row] = line
    return joined(rows)


def zstd(raw: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return bytes(sink.getvalue().to_pybytes())


def noisy() -> bytes:
    """A table that compression does not make tiny."""
    drawn = np.random.default_rng(0).integers(0, 10**9, (2000, 2)).tolist()
    return joined([b"price,city,y", *(b"%d,%d,0" % tuple(row) for row in drawn)])


def parquet(price: Any = None, rows: int = ROWS) -> bytes:
    sink = pa.BufferOutputStream()
    price = pa.array(np.arange(rows, dtype=float)) if price is None else price
    pq.write_table(pa.table({"price": price, "city": ["a"] * rows, "y": [0] * rows}), sink)
    return bytes(sink.getvalue().to_pybytes())


def one(name: str, content: Callable[[], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content())
        return folder / name

    return make


def several(**contents: Callable[[], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "log").mkdir()
        for name, content in contents.items():
            (folder / "log" / name.replace("__", ".")).write_bytes(content())
        return folder / "log"

    return make


def linked(target: str) -> Callable[[Path], Path]:
    """A folder with one good file and a link beside it."""

    def make(folder: Path) -> Path:
        path = several(a__csv=lambda: joined(lines()))(folder)
        (folder / "elsewhere.csv").write_bytes(joined(lines()))
        (path / "b.csv").symlink_to(target)
        return path

    return make


def doubled(folder: Path) -> Path:
    table = pa.table([[1.0] * ROWS, [2.0] * ROWS, ["a"] * ROWS, [0] * ROWS], names=["price", "price", "city", "y"])
    pq.write_table(table, folder / "t.parquet")
    return folder / "t.parquet"


HOSTILE: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "too few cells": (one("t.csv", lambda: changed(41, b"1,a")), ["t.csv", "row 41 has 2 cells"]),
    "too many cells": (one("t.csv", lambda: changed(41, b"1,a,0,0")), ["t.csv", "row 41 has 4 cells"]),
    "ragged in the second file": (
        several(a__csv=lambda: joined(lines()), b__csv=lambda: changed(5, b"1")),
        ["b.csv", "row 5 has 1 cell"],
    ),
    "ragged inside of gzip": (one("t.csv.gz", lambda: gzip.compress(changed(7, b"1"))), ["t.csv.gz", "row 7"]),
    "NUL in a cell": (one("t.csv", lambda: changed(12, b"1,a\0b,0")), ["t.csv", "row 12", "'city'", "NUL"]),
    "NUL in the names": (one("t.csv", lambda: changed(0, b"price,city,y\0")), ["t.csv", "names of its columns", "NUL"]),
    "NUL bytes alone": (one("t.csv", lambda: bytes(5000)), ["t.csv", "NUL"]),
    "Latin-1": (one("t.csv", lambda: changed(33, b"1,Z\xfcrich,0")), ["t.csv", "row 33 is not UTF-8"]),
    "UTF-16": (one("t.csv", lambda: joined(lines()).decode().encode("utf-16")), ["t.csv", "UTF-8"]),
    "an open quote": (one("t.csv", lambda: changed(50, b'1,"a,0')), ["t.csv", "row 50", "quote"]),
    "no header": (one("t.csv", lambda: joined(lines()[3:])), ["t.csv", "missing column", "'price'"]),
    "duplicate columns": (one("t.csv", lambda: changed(0, b"price,price,y")), ["t.csv", "more than one", "'price'"]),
    "duplicate columns of parquet": (doubled, ["t.parquet", "more than one", "'price'"]),
    "text among numbers": (one("t.csv", lambda: changed(29, b"many,a,0")), ["t.csv", "'price'", "row 29", "'many'"]),
    "a label that is none": (one("t.csv", lambda: changed(29, b"1,a,2")), ["t.csv", "'y'", "row 29", "'2'"]),
    "types that disagree": (
        several(a__parquet=parquet, b__parquet=lambda: parquet(pa.array(["1"] * 20 + ["?!"] + ["2"] * 39))),
        ["b.parquet", "'price'", "row 21", "'?!'"],
    ),
    "a date among numbers": (
        several(a__parquet=parquet, b__parquet=lambda: parquet(pa.array([0] * ROWS, pa.date32()))),
        ["b.parquet", "'price'", "date32"],
    ),
    "truncated gzip": (one("t.csv.gz", lambda: gzip.compress(noisy())[:-700]), ["t.csv.gz", "cut short"]),
    "truncated zst": (one("t.csv.zst", lambda: zstd(noisy())[:-700]), ["t.csv.zst", "cut short"]),
    "truncated bz2": (one("t.csv.bz2", lambda: bz2.compress(noisy())[:-700]), ["t.csv.bz2", "cut short"]),
    "text that is called gzip": (one("t.csv.gz", lambda: joined(lines())), ["t.csv.gz"]),
    "truncated parquet": (one("t.parquet", lambda: parquet()[:-50]), ["t.parquet", "Parquet"]),
    "truncated parquet in a folder": (
        several(a__parquet=parquet, b__parquet=lambda: parquet()[:400]),
        ["b.parquet", "Parquet"],
    ),
    "a link that leads outside": (linked("../elsewhere.csv"), ["b.csv", "leads out of its folder"]),
    "a link that leads nowhere": (linked("nothing.csv"), ["b.csv", "nothing.csv, which does not exist"]),
    "a device": (linked("/dev/zero"), ["b.csv", "leads out of its folder"]),
    "an empty file": (one("t.csv", lambda: b""), ["t.csv", "empty"]),
    "a header alone": (one("t.csv", lambda: joined(lines()[:1])), ["t.csv", "no row"]),
}


def command(folder: Path, table: Path, *more: str) -> list[str]:
    (folder / "schema.toml").write_text(SCHEMA)
    return ["prepare", "--schema", str(folder / "schema.toml"), "--train", str(table), *more,
            "--out", str(folder / "out"), "--quiet"]  # fmt: skip


RANDOM = ("--split", "random", "--seed", "1")


def sentence_after(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says on stderr, which must be one line, with the code that it ends in."""
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    said = [line for line in captured.err.splitlines() if "ignoring" not in line]
    assert len(said) == 1, captured.err
    assert said[0].startswith("scalarlens: ")
    return said[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def nothing_to_train_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether `train` refuses every folder that a preparation could have left."""
    left = [path for path in (folder / "out", *folder.glob(".out*"), *folder.glob(".out*/*")) if path.is_dir()]
    options = ["--encoder", "linear", "--backbone", "dnn", "--input-scale", "raw", "--seed", "1"]
    codes = [main(["train", str(path), *options, "--out", str(folder / "run"), "--quiet"]) for path in left]
    capsys.readouterr()
    return all(code != 0 for code in codes) and not (folder / "out" / "manifest.json").exists()


@pytest.mark.parametrize("whole", [False, True], ids=["dealt", "whole"])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_end_in_a_sentence(
    tmp_path: Path, case: str, whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    make, fragments = HOSTILE[case]
    table = make(tmp_path)
    (tmp_path / "valid.csv").write_bytes(joined(lines()))
    split = ("--valid", str(tmp_path / "valid.csv")) if whole else RANDOM
    before = sorted(tmp_path.iterdir())
    said = sentence_after(command(tmp_path, table, *split), DataError.exit_code, capsys)
    for fragment in fragments:
        assert fragment in said
    assert str(tmp_path) in said
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "schema.toml"])


@pytest.mark.parametrize("split", [RANDOM, ("--valid", "valid.csv")], ids=["dealt", "whole"])
def test_a_good_file_is_prepared(
    tmp_path: Path, split: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the other tests accept as refused is refused for its fault."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "valid.csv").write_bytes(joined(lines()))
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "a.csv").write_bytes(joined(lines()))
    (tmp_path / "log" / "b.csv").symlink_to("a.csv")
    assert main(command(tmp_path, tmp_path / "log", *split)) == 0
    assert (tmp_path / "out" / "manifest.json").exists()
    assert not nothing_to_train_on(tmp_path, capsys)


@pytest.mark.parametrize("place", ["header", "row", "quoted"])
def test_one_endless_line(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Longer than the largest block; a line of a gigabyte takes the same way."""
    start = {"header": b"", "row": b"price,city,y\n1,a,0\n", "quoted": b'price,city,y\n1,a,0\n1,"'}[place]
    with gzip.open(tmp_path / "t.csv.gz", "wb", compresslevel=1) as file:
        file.write(start)
        for _ in range(9):
            file.write(b"x" * (1 << 23))
    said = sentence_after(command(tmp_path, tmp_path / "t.csv.gz", *RANDOM), DataError.exit_code, capsys)
    assert "t.csv.gz" in said
    assert ("header" if place == "header" else "row 2") in said
    assert f"{files.BLOCK_BYTES[-1]:,} characters or more" in said or "field larger" in said
    assert len(said) < 300
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


CRITEO = {
    "a header": (["label"] + [f"I{n}" for n in range(1, 14)] + [f"C{n}" for n in range(1, 27)], 0, "has a header"),
    "ragged": (CRITEO_ROW[:-1], 17, "row 18 has 39 cells"),
    "text among numbers": ([*CRITEO_ROW[:3], "many", *CRITEO_ROW[4:]], 17, "column 'I3', row 18: 'many'"),
    "NUL": ([*CRITEO_ROW[:-1], "a\0b"], 17, "row 18, column 'C26', holds a NUL byte"),
}


@pytest.mark.parametrize("case", CRITEO)
def test_hostile_files_of_a_source(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    bad, place, fragment = CRITEO[case]
    rows = ["\t".join(CRITEO_ROW)] * 40
    rows[place] = "\t".join(bad)
    (tmp_path / "train.txt").write_text("\n".join(rows) + "\n")
    arguments = ["prepare", "--source", "criteo", "--from", str(tmp_path), *RANDOM, "--out", str(tmp_path / "out")]
    said = sentence_after([*arguments, "--quiet"], DataError.exit_code, capsys)
    assert str(tmp_path / "train.txt") in said
    assert fragment in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.txt"]


@pytest.mark.parametrize("name", ["train.txt", "day_0.tsv"])
def test_a_link_out_of_the_folder_of_a_source(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere.txt").write_text("\t".join(CRITEO_ROW) + "\n")
    (tmp_path / "data" / name).symlink_to("../elsewhere.txt")
    source = ["prepare", "--source", "criteo", "--from", str(tmp_path / "data"), *RANDOM]
    said = sentence_after([*source, "--out", str(tmp_path / "out")], DataError.exit_code, capsys)
    assert f"{name} is a link that leads out of its folder" in said


# --out


def test_links_at_the_place_of_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_bytes(joined(lines()))
    arguments = command(tmp_path, tmp_path / "t.csv", *RANDOM)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    (tmp_path / "out").symlink_to("precious")
    assert "is not empty and holds no prepared table" in sentence_after(arguments, UsageError.exit_code, capsys)
    (tmp_path / "out").unlink()
    (tmp_path / "out").symlink_to("nothing")
    assert "is a link to nothing, which does not exist" in sentence_after(arguments, UsageError.exit_code, capsys)
    (tmp_path / "out").unlink()
    (tmp_path / ".out.work").symlink_to("precious")
    assert ".out.work is in the way" in sentence_after(arguments, UsageError.exit_code, capsys)
    (tmp_path / ".out.work").unlink()
    assert not (tmp_path / "nothing").exists()
    # Inside of a work folder that somebody prepared, links are taken away and not followed.
    (tmp_path / ".out.work").mkdir()
    (tmp_path / ".out.work" / "table").symlink_to(tmp_path / "precious")
    assert main(arguments) == 0
    assert [entry.name for entry in (tmp_path / "precious").iterdir()] == ["thesis.tex"]
    assert (tmp_path / "out" / "manifest.json").exists()


def test_a_full_disk_leaves_nothing_to_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full at every file in turn; the same command then continues."""
    (tmp_path / "t.csv").write_bytes(joined(lines()))
    arguments = command(tmp_path, tmp_path / "t.csv", *RANDOM)
    whole = tmp_path / "whole"
    assert main([*arguments[:-2], str(whole), "--quiet"]) == 0
    capsys.readouterr()
    stages = 0
    for moment in range(1, 1000):
        calls = 0

        def full(descriptor: int, moment: int = moment) -> None:
            nonlocal calls
            calls += 1
            if calls == moment:
                raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(prepare, "_threads", lambda: 1)
            patched.setattr(os, "fsync", full)
            code = main(arguments)
        captured = capsys.readouterr()
        if code == 0:
            break
        stages += 1
        assert code == ScalarLensError.exit_code
        assert captured.err.count("\n") == 1
        assert "is full; make room and give the same command again" in captured.err
        # Where only the notice of the last renaming could not be flushed, the table is whole.
        assert nothing_to_train_on(tmp_path, capsys) or contents(tmp_path / "out") == contents(whole)
    assert stages > 20
    assert contents(tmp_path / "out") == contents(whole)
    assert not nothing_to_train_on(tmp_path, capsys)


# two at a time


def test_a_second_preparation_of_the_same_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_bytes(joined(lines()))
    arguments = command(tmp_path, tmp_path / "t.csv", *RANDOM)
    with spool.Work(tmp_path / "out"):
        said = sentence_after(arguments, UsageError.exit_code, capsys)
        assert f"another process prepares {tmp_path / 'out'}; wait until it has ended" in said
        other = [*arguments[:-2], str(tmp_path / "other"), "--quiet"]
        assert main(other) == 0
    capsys.readouterr()
    assert main(arguments) == 0
    assert not list(tmp_path.glob(".*"))


def test_a_process_that_dies_gives_the_folder_free(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from scalarlens.datasets.spool import Work;"
        "work = Work(Path(sys.argv[1])).__enter__(); print('here', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "out")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    with pytest.raises(UsageError, match="another process prepares"):
        spool.Work(tmp_path / "out").__enter__()
    process.kill()
    process.communicate()
    with spool.Work(tmp_path / "out"):
        pass


def test_a_folder_that_was_removed_meanwhile_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process ended between the moment this one opened the folder and the moment it locked it."""
    lock, calls = spool.fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / ".out.work").rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(spool.fcntl, "flock", late)
    with spool.Work(tmp_path / "out") as work:
        assert work.folder.is_dir()
        with pytest.raises(UsageError, match="another process prepares"):
            spool.Work(tmp_path / "out").__enter__()
    assert len(calls) == 3
