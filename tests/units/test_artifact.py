"""The sealed artifact: what it promises to whoever trained it, and what it refuses from whoever did not."""

from __future__ import annotations

import datetime
import getpass
import io
import json
import math
import os
import pickle
import re
import resource
import shutil
import socket
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors
from small_artifacts import SCHEMA, TEXTS, Sealed, arrow_table, raw_rows, seal_trained, write_csv

from scalarlens import artifact as artifact_module
from scalarlens import backbones, encoders
from scalarlens.artifact import (
    FILES,
    LARGEST_OPTION,
    MAKERS,
    MANIFEST,
    SCORING_BATCH,
    SLACK,
    Budget,
    ModelArtifact,
    follows,
    load,
    seal,
)
from scalarlens.backbones import Tower
from scalarlens.cli import main
from scalarlens.datasets.files import open_table
from scalarlens.errors import ArtifactError, DataError, UsageError
from scalarlens.model import CtrModel, ModelSpec
from scalarlens.scoring import predict_file
from scalarlens.storage import read_json, sha256_of_file, write_json
from scalarlens.table.columns import schema_cells
from scalarlens.table.statistics import TrainingStatistics
from scalarlens.table.stored import load_statistics, save_statistics
from scalarlens.table.tensorizer import CellCounts, Tensorizer

SCALES = ("raw", "zscore")


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal bit for bit."""
    return found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# what is kept


@pytest.mark.parametrize("scale", SCALES)
def test_a_loaded_artifact_predicts_the_same_bits_and_saves_the_same_bytes(
    scale: str, sealed: dict[str, Sealed], tmp_path: Path
) -> None:
    original = sealed[scale]
    loaded = original.load()
    assert same(loaded.predict(original.rows), original.artifact.predict(original.rows))
    assert (loaded.spec, loaded.contract, loaded.metrics) == (
        original.artifact.spec,
        original.artifact.contract,
        original.artifact.metrics,
    )
    for again in (original.artifact, loaded, load(original.folder)):
        again.save(tmp_path / "again")
        assert contents(tmp_path / "again") == contents(original.folder)


def test_the_same_training_elsewhere_and_later_gives_the_same_bytes(sealed: dict[str, Sealed], tmp_path: Path) -> None:
    again = seal_trained(tmp_path / "elsewhere", "raw", seed=1)
    assert contents(again.folder) == contents(sealed["raw"].folder)
    assert contents(sealed["raw"].folder) != contents(sealed["other"].folder)


def test_no_file_tells_when_where_or_by_whom_it_was_made(sealed: dict[str, Sealed]) -> None:
    now = datetime.datetime.now(tz=datetime.UTC)
    telling = [str(sealed["raw"].folder.parents[2]), socket.gethostname(), os.sep + "home", f"{now:%Y-%m-%d}"]
    telling += [str(int(now.timestamp()))[:5] + "0", getpass.getuser() + "@"]
    for name, content in contents(sealed["raw"].folder).items():
        if name == "model.safetensors" or name.endswith(".arrow"):
            telling_here = [text for text in telling if len(text) > 8]
        else:
            telling_here = [text for text in telling if len(text) > 5]
        assert not [text for text in telling_here if text.encode() in content], name


def test_the_order_of_columns_is_kept(sealed: dict[str, Sealed]) -> None:
    for one in sealed.values():
        assert one.load().schema == one.table.schema
        names = [entry["name"] for entry in read_json(one.folder / "contract.json")["fields"]]
        assert names == ["spend", "balance", "never", "constant", "ville", "code"]
        assert names != sorted(names)
    # the mutant: documents whose columns are keys come back sorted
    tables = sealed["raw"].artifact.schema.to_tables()
    keyed = {**tables, "numeric": {c["name"]: {} for c in tables["numeric"]}}
    assert list(json.loads(json.dumps(keyed, sort_keys=True))["numeric"]) != names[:4]


@pytest.mark.parametrize("scale", SCALES)
def test_every_encoder_can_be_sealed_and_opened(scale: str, sealed: dict[str, Sealed], tmp_path: Path) -> None:
    one = sealed[scale]
    for name in encoders.encoders.names():
        check_round_trip(one, ModelSpec(name, "dnn", 4, Tower((8,)), 0.01), tmp_path / name)


def test_every_backbone_can_be_sealed_and_opened(sealed: dict[str, Sealed], tmp_path: Path) -> None:
    for name in backbones.backbones.names():
        for tower in (Tower((8, 4), dropout=0.1, batch_norm=True), Tower(())):
            check_round_trip(sealed["raw"], ModelSpec(name, "deer", 4, tower, 0.01), tmp_path / name, swap=True)


def check_round_trip(one: Sealed, spec: ModelSpec, folder: Path, swap: bool = False) -> None:
    """Seal an untrained model, open it, and compare predictions; `seal` fills in the options."""
    if swap:
        spec = replace(spec, encoder=spec.backbone, backbone=spec.encoder)
    tensorizer = one.artifact.tensorizer
    torch.manual_seed(3)
    with Budget({}) as meter:
        meter.tensors = meter.elements = 10**12
        model = CtrModel.build(spec.resolved(), tensorizer.encoder_statistics)
    stored = model.state_dict()
    assert 10**12 - meter.elements <= SLACK / 2 * sum(tensor.numel() for tensor in stored.values())
    assert 10**12 - meter.tensors <= SLACK / 2 * len(stored)
    training = {"seed": 3, "recipe": {}}
    original = seal(model, tensorizer, spec, training=training, metrics={"none": None}, training_digest="0")
    original.save(folder)
    loaded = load(folder)
    assert same(loaded.predict(one.rows[:20]), original.predict(one.rows[:20]))
    assert loaded.spec["model"]["encoder_options"].keys() == spec.resolved().encoder_options.keys()


def test_opening_leaves_the_random_numbers_alone(sealed: dict[str, Sealed]) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    sealed["raw"].load()
    assert torch.equal(torch.rand(3), wanted)


def test_saving_replaces_an_artifact_and_nothing_else(sealed: dict[str, Sealed], tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    sealed["other"].artifact.save(folder)
    sealed["raw"].artifact.save(folder)
    assert contents(folder) == contents(sealed["raw"].folder)
    (folder / "holiday.jpg").write_bytes(b"1")
    with pytest.raises(UsageError, match=r"holds no artifact, but 'holiday.jpg'; choose another"):
        sealed["raw"].artifact.save(folder)
    assert (folder / "holiday.jpg").read_bytes() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_a_model_that_could_not_be_opened_again_is_not_sealed(sealed: dict[str, Sealed]) -> None:
    one = sealed["raw"].artifact
    spec = ModelSpec("deer", "dnn", 4, Tower((8,)), 0.01, {"intervals": LARGEST_OPTION + 1})
    with pytest.raises(UsageError, match="beyond 16384"):
        seal(one.model, one.tensorizer, spec, training={}, metrics={}, training_digest="0")


# one row, one score, whatever it comes in


def tables_of(rows: list[dict[str, Any]], folder: Path) -> Iterator[tuple[str, Any]]:
    """The same rows in all the forms that can be scored; files as paths."""
    table = arrow_table(rows)
    yield "dicts", rows
    yield "a tuple of dicts", tuple(rows)
    yield "Arrow", table
    yield "Arrow in pieces", pa.concat_tables([table.slice(0, 7), table.slice(7, 1), table.slice(8)])
    yield "an Arrow batch", table.combine_chunks().to_batches()[0]
    yield "Arrow with dictionaries", table.set_column(4, "ville", table["ville"].dictionary_encode())
    yield "pandas", pd.DataFrame(rows)
    yield "pandas with another index", pd.DataFrame(rows, index=[f"row {i}" for i in range(len(rows))])
    yield "pandas with Arrow types", pd.DataFrame(rows).convert_dtypes(dtype_backend="pyarrow")
    yield "pandas with categories", pd.DataFrame(rows).astype({"ville": "category", "code": "category"})
    yield "polars", pl.DataFrame(rows, infer_schema_length=None)
    yield "polars with categories", pl.DataFrame(rows, infer_schema_length=None).cast({"ville": pl.Categorical})
    yield "columns in another order", table.select(sorted(table.column_names))
    pa.parquet.write_table(table, folder / "rows.parquet", row_group_size=33)
    with pa.ipc.new_file(folder / "rows.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    yield "CSV", write_csv(folder / "rows.csv", rows)
    yield "Parquet", folder / "rows.parquet"
    yield "an Arrow file", folder / "rows.arrow"


def scores(artifact: ModelArtifact, rows: Any, folder: Path) -> np.ndarray:
    if not isinstance(rows, Path):
        return artifact.predict(rows)
    predict_file(artifact, open_table(rows), folder / "scores.arrow")
    with pa.ipc.open_file(folder / "scores.arrow") as file:
        return file.read_all()["probability"].to_numpy()


@pytest.mark.parametrize("scale", SCALES)
def test_the_same_rows_score_alike_in_every_form(scale: str, sealed: dict[str, Sealed], tmp_path: Path) -> None:
    one = sealed[scale]
    rows = one.rows[:150] + raw_rows(seed=9, count=50)
    wanted = one.artifact.predict(rows)
    assert wanted.dtype == np.float64
    assert len(np.unique(wanted)) > 150
    loaded = one.load()
    for form, table in tables_of(rows, tmp_path):
        assert same(scores(loaded, table, tmp_path), wanted), form


def test_a_file_scores_alike_in_every_format_of_the_answer(sealed: dict[str, Sealed], tmp_path: Path) -> None:
    one = sealed["raw"]
    rows = write_csv(tmp_path / "rows.csv", one.rows)
    found = {}
    for suffix, read in (
        ("csv", pa.csv.read_csv),
        ("parquet", pa.parquet.read_table),
        ("arrow", lambda path: pa.ipc.open_file(path).read_all()),
    ):
        command = ["predict", "-q", str(one.folder), str(rows), "--device", "cpu", "--out"]
        assert main([*command, str(tmp_path / f"out.{suffix}")]) == 0
        found[suffix] = read(tmp_path / f"out.{suffix}")["probability"].to_numpy()
    for scored in found.values():
        assert same(scored, one.artifact.predict(one.rows))


@pytest.mark.parametrize("scale", SCALES)
def test_raw_training_rows_score_as_their_packed_split_does(scale: str, sealed: dict[str, Sealed]) -> None:
    one = sealed[scale]
    loaded = one.load()
    split = one.table.split("train", loaded.tensorizer.scale)
    assert same(loaded.logits(one.rows), loaded.model.score(split.batches(SCORING_BATCH)))
    # the mutant: numbers in the other scale
    other = {"raw": "zscore", "zscore": "raw"}[scale]
    wrong = one.table.split("train", sealed[other].artifact.tensorizer.scale)
    assert not np.allclose(loaded.logits(one.rows), loaded.model.score(wrong.batches(SCORING_BATCH)), atol=1e-3)


few_examples = settings(max_examples=25, deadline=None, derandomize=True, database=None)


@few_examples
@given(cuts=st.lists(st.integers(0, 300), max_size=6), scale=st.sampled_from(SCALES))
def test_scores_do_not_depend_on_how_rows_are_cut(sealed: dict[str, Sealed], cuts: list[int], scale: str) -> None:
    one = sealed[scale]
    ends = sorted({0, 300, *cuts})
    pieces = [one.artifact.predict(one.rows[a:b]) for a, b in pairwise(ends)]
    np.testing.assert_allclose(np.concatenate(pieces), one.artifact.predict(one.rows), rtol=0, atol=1e-6)


def test_a_file_longer_than_a_scoring_batch_scores_as_one_table(
    sealed: dict[str, Sealed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = sealed["raw"]
    monkeypatch.setattr("scalarlens.artifact.SCORING_BATCH", 64)
    monkeypatch.setattr("scalarlens.scoring.SCORING_BATCH", 64)
    wanted = one.artifact.predict(one.rows)
    for form, table in tables_of(one.rows, tmp_path):
        assert same(scores(one.artifact, table, tmp_path), wanted), form


def test_no_rows_have_no_scores(sealed: dict[str, Sealed]) -> None:
    one = sealed["raw"]
    for rows in ([], arrow_table(one.rows).slice(0, 0), pd.DataFrame(one.rows[:1])[:0]):
        assert one.artifact.predict(rows).shape == (0,)


# cells


def test_none_nan_empty_text_and_markers_are_all_missing(sealed: dict[str, Sealed]) -> None:
    artifact, row = sealed["raw"].artifact, sealed["raw"].rows[1]
    missing = {name: artifact.predict([{**row, name: None}]) for name in artifact.schema.features}
    for name in ("spend", "balance", "constant"):
        for nothing in (math.nan, "", "nan", np.float64("nan")):
            assert same(artifact.predict([{**row, name: nothing}]), missing[name])
    for marker in (-999.0, -999, "n/a"):
        assert same(artifact.predict([{**row, "balance": marker}]), missing["balance"])
    assert not same(artifact.predict([{**row, "spend": -999.0}]), missing["spend"])
    for name in ("ville", "code"):
        assert same(artifact.predict([{**row, name: ""}]), missing[name])
        assert same(artifact.predict([{**row, name: math.nan}]), missing[name])


@pytest.mark.parametrize("forms", [(7, 7.0, "7", np.int64(7), np.float32(7.0)), (True, "true"), (None, "")], ids=str)
def test_a_category_scores_alike_in_every_form(forms: tuple[Any, ...], sealed: dict[str, Sealed]) -> None:
    artifact, row = sealed["raw"].artifact, sealed["raw"].rows[1]
    column = "code" if 7 in forms and True not in forms else "ville"
    alone = [artifact.predict([{**row, column: form}]) for form in forms]
    assert all(same(score, alone[0]) for score in alone)
    together = artifact.predict([{**row, column: form} for form in (*forms, "another")])
    assert np.abs(together[:-1] - alone[0]).max() < 1e-6
    assert abs(together[-1] - alone[0][0]) > 1e-6


def test_every_odd_text_is_the_category_that_training_saw(sealed: dict[str, Sealed]) -> None:
    artifact, row = sealed["raw"].artifact, sealed["raw"].rows[1]
    kept = artifact.tensorizer.statistics.vocabularies[0].texts
    assert 4 < len(kept) < len(TEXTS)
    counts = CellCounts()
    artifact.predict([{**row, "ville": text} for text in TEXTS], counts)
    assert counts.unseen == {"ville": len(TEXTS) - len(kept)}
    assert set(kept) <= set(TEXTS)


def test_infinite_cells_clip_to_the_training_range(sealed: dict[str, Sealed]) -> None:
    for scale in SCALES:
        artifact, row = sealed[scale].artifact, sealed[scale].rows[1]
        for name, (low, high) in ranges(artifact).items():
            ends = artifact.predict([{**row, name: low}, {**row, name: high}])
            assert same(artifact.predict([{**row, name: -math.inf}, {**row, name: math.inf}]), ends)
            assert same(artifact.predict([{**row, name: "-inf"}, {**row, name: "Infinity"}]), ends)


def ranges(artifact: ModelArtifact) -> dict[str, list[float]]:
    fields = artifact.contract["fields"]
    return {f["name"]: f["training_range"] for f in fields if f["kind"] == "numeric" and f["training_range"]}


def test_what_is_odd_is_counted_by_column(sealed: dict[str, Sealed]) -> None:
    artifact, rows = sealed["raw"].artifact, [dict(row) for row in sealed["raw"].rows[:60]]
    low, high = ranges(artifact)["spend"]
    for i, value in enumerate([math.inf, -math.inf, high * 2, low / 2, high, low, None]):
        rows[i]["spend"] = value
    for i, text in enumerate(["Atlantis", "", None, "zürich"]):
        rows[i]["ville"] = text
    counts = CellCounts()
    artifact.predict(rows, counts)
    kept = set(artifact.tensorizer.statistics.vocabularies[0].texts)
    numeric = ("spend", "balance", "never", "constant")
    absent = {name: sum(row[name] in (None, -999.0) for row in rows) for name in numeric}
    absent["ville"] = sum(row["ville"] in (None, "") for row in rows)
    assert counts.rows == 60
    assert counts.missing == {name: count for name, count in absent.items() if count}
    assert counts.infinite == {"spend": 2}
    assert counts.out_of_range == {"spend": 4}  # what is infinite is out of range too
    assert counts.unseen == {"ville": sum(bool(row["ville"]) and row["ville"] not in kept for row in rows)}
    artifact.predict(rows[:1], counts)
    assert (counts.rows, counts.infinite) == (61, {"spend": 3})


def test_columns_outside_the_contract_are_ignored(sealed: dict[str, Sealed]) -> None:
    artifact, rows = sealed["raw"].artifact, sealed["raw"].rows
    wanted = artifact.predict(rows)
    assert same(artifact.predict([{**row, "more": object()} for row in rows]), wanted)
    assert same(artifact.predict(arrow_table(rows).append_column("more", pa.array([{"a": 1}] * len(rows)))), wanted)
    assert same(artifact.predict([{k: v for k, v in row.items() if k != "clicked"} for row in rows]), wanted)


def test_rows_that_break_the_contract_are_refused_by_name(sealed: dict[str, Sealed]) -> None:
    artifact, row = sealed["raw"].artifact, sealed["raw"].rows[1]
    short = {name: cell for name, cell in row.items() if name != "balance"}
    table = arrow_table(sealed["raw"].rows[:2])
    for rows, message in (
        ([row, short], r"row 2 has no column 'balance'; give None for a missing value"),
        ([row, [1, 2]], r"row 2 must be a dict of column to value; got list"),
        (table.drop_columns(["code"]), r"missing column 'code'"),
        (table.append_column("code", table["code"]), r"column 'code' occurs twice"),
        ([{**row, "spend": "much"}], r"column 'spend': 'much' is not a number at row 0"),
        ([{**row, "spend": {"a": 1}}], r"column 'spend' holds"),
        ([{**row, "ville": b"\xff\xfe"}], r"column 'ville' holds text that is not UTF-8"),
        ({"spend": [1.0]}, r"rows must be a list of dicts, an Arrow table"),
        (7, r"rows must be .*; got int"),
    ):
        with pytest.raises(DataError, match=message):
            artifact.predict(rows)


# what is refused

Tamper = Callable[[Path], object]
#: what any refusal may take, and the memory that it may need at once
SECONDS, BYTES = 2.0, 300 << 20


def reseal(folder: Path) -> None:
    """What an attacker does at the end: a manifest of the files as they are now."""
    lines = [f"{sha256_of_file(folder / name)}  {name}\n" for name in sorted(FILES)]
    (folder / MANIFEST).write_text("".join(lines), encoding="utf-8")


@pytest.fixture
def copy(sealed: dict[str, Sealed], tmp_path: Path) -> Path:
    """An artifact to tamper with."""
    return Path(shutil.copytree(sealed["raw"].folder, tmp_path / "copy"))


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> Callable[[Path], str]:
    """How `scalarlens verify` refuses an artifact: with its exit code, in one short line, soon, in little memory."""

    def refuse(folder: Path) -> str:
        capsys.readouterr()
        started, peak = time.process_time(), peak_bytes()
        with listening() as events:
            code = main(["verify", str(folder)])
        assert not events
        assert time.process_time() - started < SECONDS
        assert peak_bytes() - peak < BYTES
        printed = capsys.readouterr()
        assert (code, printed.out) == (ArtifactError.exit_code, "")
        line = printed.err.removesuffix("\n")
        assert line.startswith("scalarlens: ")
        assert line.isprintable()
        assert len(line) < 700
        assert not recwarn.list
        return line.removeprefix("scalarlens: ")

    return refuse


#: what opening an artifact must never do: unpickle, start a program, connect
FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "subprocess.Popen", "socket.connect")
heard: list[str] | None = None


def hear(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what the interpreter is asked to do while somebody listens: forbidden events, and writes."""
    if heard is None:
        return
    if event in FORBIDDEN:
        heard.append(event)
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        heard.append(f"{event} {arguments[0]} to write")


sys.addaudithook(hear)


@contextmanager
def listening() -> Iterator[list[str]]:
    global heard
    heard = events = []
    try:
        yield events
    finally:
        heard = None


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def edit(name: str, change: Callable[[Any], object]) -> Tamper:
    """Change a JSON document in place, or return another one."""

    def tamper(folder: Path) -> None:
        document = json.loads((folder / name).read_bytes())
        document = change(document) or document
        (folder / name).write_text(json.dumps(document), encoding="utf-8")

    return tamper


def put(*path: str | int, value: Any) -> Callable[[Any], None]:
    """A change that sets one entry."""

    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


def option(name: str, value: Any) -> Tamper:
    return edit("spec.json", put("model", "encoder_options", name, value=value))


def model(name: str, value: Any) -> Tamper:
    return edit("spec.json", put("model", name, value=value))


def tower(name: str, value: Any) -> Tamper:
    return edit("spec.json", put("model", "tower", name, value=value))


def field(index: int, key: str, value: Any) -> Tamper:
    return edit("contract.json", put("fields", index, key, value=value))


def content(name: str, change: Callable[[bytes], bytes]) -> Tamper:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def swap_columns(columns: list[Any]) -> None:
    columns[0], columns[1] = columns[1], columns[0]


JSON_CASES: dict[str, tuple[Tamper, str]] = {
    "a future format": (edit("spec.json", put("format", value=2)), "has format 2; this version"),
    "a format of text": (edit("spec.json", put("format", value="1")), "has format '1'; this version"),
    "no format": (edit("spec.json", lambda d: d.pop("format") and None), "has format None"),
    "a future contract": (edit("contract.json", put("format", value=9)), "contract.json has format 9"),
    "a list for a specification": (content("spec.json", lambda c: b"[" + c + b"]"), "holds a list"),
    "NaN in JSON": (content("spec.json", lambda c: c.replace(b'"dropout": 0.0', b'"dropout": NaN')), "it holds NaN"),
    "1e999 in JSON": (content("spec.json", lambda c: c.replace(b'"dropout": 0.0', b'"dropout": 1e999')), "no float64"),
    "NaN in metrics": (content("metrics.json", lambda c: b'{"valid_auc": NaN}'), "it holds NaN"),
    "text in metrics": (edit("metrics.json", put("valid_auc", value="1.0")), "'valid_auc' must be a number or null"),
    "other metrics": (edit("metrics.json", put("valid_auc", value=1.0)), "MODEL_CARD.md does not say"),
    "a key twice": (content("contract.json", lambda c: b'{"format": 1,' + c[1:]), "a key occurs twice"),
    "deep nesting": (content("metrics.json", lambda c: b'{"a": ' + b"[" * 10**6 + b"]" * 10**6 + b"}"), "recursion"),
    "UTF-16": (content("spec.json", lambda c: c.decode().encode("utf-16")), "utf-8"),
    "an empty document": (content("contract.json", lambda c: b"{}"), "contract.json has format None"),
    "no model": (edit("spec.json", lambda d: d.pop("model") and None), "spec.json must hold .*; odd: 'model'"),
    "an unknown key": (edit("spec.json", put("\x1bcode", value=1)), r"spec.json must hold .*; odd: '\\x1bcode'"),
    "a model of text": (edit("spec.json", put("model", value="dnn")), "TypeError"),
    "no training": (edit("spec.json", lambda d: d.pop("training") and None), "spec.json must hold .*; odd: 'training'"),
    "other training": (edit("spec.json", put("training", "seed", value=7)), "MODEL_CARD.md does not say"),
    "an unknown encoder": (model("encoder", "scalarlense"), "did you mean 'scalarlens'"),
    "an unknown backbone": (model("backbone", "../dnn"), "unknown backbone"),
    "an encoder of another type": (model("encoder", ["scalarlens"]), "TypeError"),
    "an encoder with hostile name": (model("encoder", "\x1b[2J\n" + "x" * 10**5), "unknown encoder"),
    "another encoder": (model("encoder", "local-only"), "MODEL_CARD.md does not say"),
    "another encoder of other tensors": (model("encoder", "deer-norm"), "unknown option of encoder"),
    "another backbone": (model("backbone", "widedeep"), "holds other tensors than this model"),
    "an unknown option": (option("stepz", 3), "did you mean 'steps'"),
    "an option of text": (option("steps", "3"), "encoder.steps must be a whole number from 1; got '3'"),
    "an option of a fraction": (option("rank", 16.0), "encoder.rank must be a whole number"),
    "an option of true": (option("rank", True), "encoder.rank must be a whole number"),
    "an option of null": (option("rank", None), "encoder.rank must be a whole number"),
    "an option below its range": (option("intervals", 0), "encoder.intervals must be a whole number from 1"),
    "an option of another size": (option("intervals", 9), r"is torch.float32 \(4, 9, 4\), expected .* \(4, 10, 4\)"),
    "an option that bends the mesh": (option("width_floor", -0.5), "a mesh needs width_floor and temperature above 0"),
    "an option that breaks the mesh": (option("temperature", 0.0), "a mesh needs width_floor and temperature above 0"),
    "an option without effect on shapes": (option("temperature", 2.0), "contract.json does not describe this model"),
    "an unknown key in the model": (model("code", "import os"), "unexpected keyword argument 'code'"),
    "an embedding of text": (model("embedding_dim", "4"), "embedding_dim must be a whole number"),
    "an embedding of a negative size": (model("embedding_dim", -4), "embedding_dim must be a whole number from 1"),
    "an embedding of no size": (model("embedding_dim", 0), "embedding_dim must be a whole number from 1"),
    "a spread of text": (model("category_std", "0.01"), "category_std must be a finite number"),
    "a tower of text": (tower("hidden", "88"), "tower.hidden must be a list of whole numbers"),
    "a tower of fractions": (tower("hidden", [8.5]), "tower.hidden must be a list of whole numbers"),
    "a tower of negative width": (tower("hidden", [-8]), "tower.hidden must be a list of whole numbers"),
    "a norm of text": (tower("batch_norm", "yes"), "tower.batch_norm must be true or false"),
    "a norm": (tower("batch_norm", True), "holds other tensors than this model"),
    "dropout above one": (tower("dropout", 1.5), "dropout probability"),
    "an unknown key in the tower": (tower("code", 1), "unexpected keyword argument 'code'"),
    "an unknown scale": (edit("spec.json", put("input_scale", value="log")), "unknown input scale 'log'"),
    "a scale of null": (edit("spec.json", put("input_scale", value=None)), "TypeError"),
    "the other scale": (edit("spec.json", put("input_scale", value="zscore")), "is not what follows from"),
    "columns in another order": (
        edit("contract.json", lambda d: swap_columns(d["schema"]["numeric"])),
        "contract.json does not describe this model",
    ),
    "categories in another order": (
        edit("contract.json", lambda d: swap_columns(d["schema"]["categorical"])),
        "contract.json does not describe this model",
    ),
    "fields in another order": (
        edit("contract.json", lambda d: swap_columns(d["fields"])),
        "contract.json does not describe this model",
    ),
    "columns as a sorted table": (
        edit("contract.json", lambda d: d["schema"].update(numeric={c["name"]: {} for c in d["schema"]["numeric"]})),
        "contract.json does not describe this model",
    ),
    "a column twice": (
        edit("contract.json", put("schema", "numeric", 0, "name", value="balance")),
        "each column has one role",
    ),
    "a column more": (
        edit("contract.json", lambda d: d["schema"]["numeric"].append({"name": "more"})),
        "disagree on the number of columns",
    ),
    "a field less": (edit("contract.json", lambda d: d["fields"].pop() and None), "disagree on the number of columns"),
    "10^6 columns": (
        edit("contract.json", lambda d: d["schema"].update(numeric=[f"c{i}" for i in range(10**6)])),
        "disagree on the number of columns",
    ),
    "a column with a hostile name": (
        edit("contract.json", put("schema", "numeric", 0, value={"name": "\x1b]0;\n", "code": 1})),
        "unknown option of column",
    ),
    "another unit": (field(0, "unit", "USD"), "contract.json does not describe this model"),
    "another range": (field(0, "training_range", [0.0, 1.0]), "contract.json does not describe this model"),
    "another missing rate": (field(0, "missing_rate", 0.0), "contract.json does not describe this model"),
    "another policy": (field(0, "policies", {}), "contract.json does not describe this model"),
    "edges that do not increase": (
        edit("contract.json", lambda d: d["fields"][0]["mesh_edges"].reverse()),
        "contract.json does not describe this model",
    ),
    "edges of text": (field(0, "mesh_edges", ["a"] * 9), "ValueError"),
    "no edges": (edit("contract.json", lambda d: d["fields"][0].pop("mesh_edges") and None), "does not describe"),
    "a field that is none": (edit("contract.json", put("fields", 0, value=7)), "AttributeError"),
    "an unknown key in the contract": (edit("contract.json", put("code", value=1)), "does not describe this model"),
    "no training rows": (edit("contract.json", put("training_rows", value=0)), "training_rows from 1; got 0"),
    "true training rows": (edit("contract.json", put("training_rows", value=True)), "training_rows from 1; got True"),
    "other training rows": (edit("contract.json", put("training_rows", value=301)), "cells in 301 training rows"),
    "endless training rows": (
        edit("contract.json", put("training_rows", value=10**4000)),
        "training_rows from 1; got 10000",
    ),
    "another digest": (
        edit("contract.json", put("statistics_digest", value="0" * 64)),
        "the statistics are not those that the contract was written for",
    ),
    "another card": (content("MODEL_CARD.md", lambda c: c.replace(b"raw", b"zscore")), "MODEL_CARD.md does not say"),
}

#: sizes that no file of this size can hold
LARGE_CASES: dict[str, tuple[Tamper, str]] = {
    "an embedding of 10^9": (model("embedding_dim", 10**9), "an option of 1000000000 is beyond 16384"),
    "a tower of 10^9": (tower("hidden", [10**9]), "an option of 1000000000 is beyond 16384"),
    "10^9 intervals": (option("intervals", 10**9), "an option of 1000000000 is beyond 16384"),
    "-10^9 steps": (option("steps", -(10**9)), "an option of -1000000000 is beyond 16384"),
    "10^400 steps": (option("steps", 10**400), "an option of 100000000.* is beyond 16384"),
    "10^5 layers": (tower("hidden", [1] * 10**5), "an option of 100000 entries is beyond 256"),
    "a wide tower": (tower("hidden", [LARGEST_OPTION] * 8), "a larger model than the weights are of"),
    "a wide embedding": (model("embedding_dim", LARGEST_OPTION), "a larger model than the weights are of"),
    "a fine mesh": (option("intervals", LARGEST_OPTION // 2), "a larger model than the weights are of"),
    "a wide state": (option("state_dim", LARGEST_OPTION), "a larger model than the weights are of"),
    "a high rank": (option("rank", LARGEST_OPTION), "a larger model than the weights are of"),
    "a wide readout": (option("hidden_dim", LARGEST_OPTION), "a larger model than the weights are of"),
    "many steps": (option("steps", LARGEST_OPTION), "a larger model than the weights are of"),
    "many layers of attention": (
        edit(
            "spec.json", lambda d: d["model"].update(backbone="autoint", backbone_options={"attention_layers": 16384})
        ),
        "a larger model than the weights are of",
    ),
    "everything": (
        edit(
            "spec.json",
            lambda d: d["model"].update(
                embedding_dim=LARGEST_OPTION,
                tower={"hidden": [LARGEST_OPTION] * 256, "dropout": 0.0, "batch_norm": False},
            ),
        ),
        "a larger model than the weights are of",
    ),
}


@pytest.mark.parametrize(
    ("tamper", "reason"), [*JSON_CASES.values(), *LARGE_CASES.values()], ids=[*JSON_CASES, *LARGE_CASES]
)
def test_a_document_that_lies_is_refused(
    tamper: Tamper, reason: str, copy: Path, refusal: Callable[[Path], str]
) -> None:
    check_refused(tamper, reason, copy, refusal)


# the weights

STATISTICS, VOCABULARIES, WEIGHTS = "statistics.arrow", "vocabularies.arrow", "model.safetensors"


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Tamper:
    """Change the tensors in place."""

    def tamper(folder: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
        change(tensors)
        (folder / WEIGHTS).write_bytes(save_tensors(tensors))

    return tamper


def header(change: Callable[[bytes], bytes], length: int | None = None) -> Tamper:
    """Change the JSON header of the weights, and perhaps lie about its length."""

    def tamper(folder: Path) -> None:
        stored = (folder / WEIGHTS).read_bytes()
        end = 8 + struct.unpack_from("<Q", stored)[0]
        changed = change(stored[8:end])
        size = len(changed) if length is None else length
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + changed + stored[end:])

    return tamper


def entry(name: str, **values: Any) -> Tamper:
    """Change what the header says of one tensor."""

    def change(text: bytes) -> bytes:
        document = json.loads(text)
        document[name] = {**document[name], **values}
        return json.dumps(document).encode()

    return header(change)


def shift(first: int, last: int) -> Tamper:
    """Move the ends of the first tensor in the header."""

    def change(text: bytes) -> bytes:
        document = json.loads(text)
        start, stop = document["encoder.mesh.low"]["data_offsets"]
        document["encoder.mesh.low"]["data_offsets"] = [start + first, stop + last]
        return json.dumps(document).encode()

    return header(change)


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(pickle.dumps(Payload(folder.parent / "marker")))


def torch_saved(folder: Path) -> None:
    torch.save({"a": Payload(folder.parent / "marker")}, folder / WEIGHTS)


def zipped_behind(folder: Path) -> None:
    """A file that is safetensors from its start and a TorchScript archive from its end."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Payload(folder.parent / "marker")))
        file.writestr("archive/constants.pkl", b"")
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + archive.getvalue())


def one_value(name: str, value: float) -> Tamper:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[0] = value

    return weights(change)


def swap_ends(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.mesh.low"], tensors["encoder.mesh.high"] = (
        tensors["encoder.mesh.high"],
        tensors["encoder.mesh.low"],
    )


def recast(name: str, kind: torch.dtype) -> Tamper:
    return weights(lambda tensors: tensors.update({name: tensors[name].to(kind)}))


NODES, WIDTHS = "encoder.mesh.nodes", "encoder.mesh.width_logits"
NOT_INTACT = "is not an intact safetensors file"

WEIGHT_CASES: dict[str, tuple[Tamper, str]] = {
    "a pickle": (pickled, NOT_INTACT),
    "a PyTorch archive": (torch_saved, NOT_INTACT),
    "a polyglot": (zipped_behind, NOT_INTACT),
    "nothing": (content(WEIGHTS, lambda c: b""), NOT_INTACT),
    "a header of no length": (header(lambda h: h, 0), NOT_INTACT),
    "a header of 2^64 - 1 bytes": (header(lambda h: h, 2**64 - 1), NOT_INTACT),
    "a header beyond the file": (header(lambda h: h, 10**6), NOT_INTACT),
    "a header cut short": (header(lambda h: h[:-9], None), NOT_INTACT),
    "a deep header": (header(lambda h: b'{"a":' + b"[" * 10**6), NOT_INTACT),
    "a header with a tensor twice": (
        header(lambda h: b'{"encoder.mesh.low": {"dtype":"F32","shape":[0],"data_offsets":[0,0]},' + h.strip()[1:]),
        "a key occurs twice",
    ),
    "a header with remarks": (header(lambda h: b'{"__metadata__":{"a":"b"},' + h.strip()[1:]), "KeyError: 'shape'"),
    "overlapping tensors": (shift(-8, -8), NOT_INTACT),
    "a gap between tensors": (shift(0, -8), NOT_INTACT),
    "bytes behind the tensors": (content(WEIGHTS, lambda c: c + b"\0"), NOT_INTACT),
    "a shape of other bytes": (entry(NODES, shape=[4, 9, 5]), NOT_INTACT),
    "a shape beyond 2^64": (entry(NODES, shape=[2**40, 2**40, 4]), NOT_INTACT),
    "a negative shape": (entry(NODES, shape=[-4, -9, 4]), NOT_INTACT),
    "a shape of the same bytes": (entry(NODES, shape=[9, 4, 4]), r"is torch.float32 \(9, 4, 4\), expected"),
    "a flat shape": (entry(NODES, shape=[144]), r"is torch.float32 \(144,\), expected"),
    "integers for floats": (entry(NODES, dtype="I32"), "is torch.int32 .* expected torch.float32"),
    "an unknown type": (entry(NODES, dtype="OBJ"), NOT_INTACT),
    "half floats": (recast(NODES, torch.float16), "is torch.float16 .* expected torch.float32"),
    "double floats": (recast(NODES, torch.float64), "is torch.float64 .* expected torch.float32"),
    "eight-bit floats": (recast(NODES, torch.float8_e4m3fn), "is torch.float8_e4m3fn .* expected torch.float32"),
    "complex numbers": (recast(NODES, torch.complex64), "is torch.complex64 .* expected torch.float32"),
    "a tensor more": (weights(lambda t: t.update({"\x1b\n" + "x" * 9999: torch.zeros(1)})), "holds other tensors"),
    "a tensor less": (weights(lambda t: t.pop(NODES)), "holds other tensors than this model: 'encoder.mesh.nodes'"),
    "a tensor of another name": (weights(lambda t: t.update({"nodes": t.pop(NODES)})), "holds other tensors"),
    "20,000 tensors": (
        weights(lambda t: t.update({f"t{i}": torch.zeros(0) for i in range(20_000)})),
        "holds other tensors than this model: 't0', .* and 19995 more",
    ),
    "a weight that is NaN": (one_value("backbone.mlp.0.weight", math.nan), "holds a value that is not finite"),
    "a weight that is infinite": (one_value("categories.weight", -math.inf), "holds a value that is not finite"),
    "a node that is NaN": (one_value(NODES, math.nan), "encoder.mesh.nodes holds a value that is not finite"),
    "a range turned round": (weights(swap_ends), "encoder.mesh.(low|high) is not what follows from"),
    "a range that is NaN": (
        one_value("encoder.mesh.low", math.nan),
        "is not what follows from the training statistics",
    ),
    "a range that is infinite": (one_value("encoder.mesh.high", math.inf), "is not what follows from"),
    "a range of another width": (one_value("encoder.mesh.high", 11.0), "is not what follows from"),
    "widths that move an edge": (one_value(WIDTHS, 2.0), "contract.json does not describe this model"),
}


@pytest.mark.parametrize(("tamper", "reason"), WEIGHT_CASES.values(), ids=WEIGHT_CASES)
def test_weights_that_are_not_those_of_the_model_are_refused(
    tamper: Tamper, reason: str, copy: Path, refusal: Callable[[Path], str]
) -> None:
    check_refused(tamper, reason, copy, refusal)
    assert not (copy.parent / "marker").exists()


def check_refused(tamper: Tamper, reason: str, copy: Path, refusal: Callable[[Path], str]) -> None:
    """Refused by its digest, and with a new manifest for the given reason."""
    before = contents(copy)
    tamper(copy)
    assert contents(copy) != before
    assert "was changed: SHA-256 is" in refusal(copy)
    reseal(copy)
    line = refusal(copy)
    assert "was changed: SHA-256 is" not in line
    assert re.search(reason, line), line


def test_the_payloads_are_live(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for plant in (pickled, torch_saved):
        plant(folder)
        with (folder / WEIGHTS).open("rb") as file, listening() as events:
            if plant is pickled:
                pickle.load(file)
            else:
                torch.load(file, weights_only=False)
        assert "pickle.find_class" in events
        (tmp_path / "marker").unlink()
    with listening() as events:
        (tmp_path / "marker").touch()
    assert events == [f"open {tmp_path / 'marker'} to write"]


@few_examples
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6), st.sampled_from([1e-13, 1e-5]), st.booleans())
def test_what_an_encoder_derives_may_differ_by_rounding_and_no_more(
    numbers: list[float], change: float, per_field: bool
) -> None:
    derived = torch.tensor([*numbers, 7.0, math.inf], dtype=torch.float64)
    derived = derived[None] if per_field else derived
    stored = derived.clone()
    flat = stored.view(-1)
    for i in range(len(numbers) + 1):
        size = derived[derived.isfinite()].abs().max() if per_field else derived.view(-1)[i].abs()
        flat[i] += change * size
    assert follows(stored, derived) == (change < 1e-9)
    assert follows(derived, derived)
    for other in (math.nan, math.inf, 1e300):
        flat[0] = other
        assert not follows(stored, derived)
    counts = torch.tensor([[3, 2**60]])
    assert follows(counts.clone(), counts)
    assert not follows(counts + 1, counts)
    assert not follows(torch.tensor([True, False]), torch.tensor([True, True]))
    assert follows(torch.empty(3, 0), torch.empty(3, 0))


# statistics and vocabularies


def statistics(**changes: Callable[[np.ndarray], object]) -> Tamper:
    """Change arrays of the statistics in place, or return others, and tell the contract their digest."""

    def tamper(folder: Path) -> None:
        contract = read_json(folder / "contract.json")
        stored = load_statistics(folder, contract["training_rows"])
        changed = {name: getattr(stored, name).copy() for name in changes}
        for name, change in changes.items():
            returned = change(changed[name])
            changed[name] = changed[name] if returned is None else returned
        stored = replace(stored, **changed)
        save_statistics(stored, folder)
        write_json(folder / "contract.json", {**contract, "statistics_digest": stored.digest()})

    return tamper


def at(index: Any, value: Any) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[index] = value

    return change


def arrow(name: str, change: Callable[[pa.Table], pa.Table], **options: Any) -> Tamper:
    """Change a table, and perhaps how it is written."""

    def tamper(folder: Path) -> None:
        table = change(pa.ipc.open_file(pa.BufferReader((folder / name).read_bytes())).read_all())
        with pa.ipc.new_file(folder / name, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(table)

    return tamper


def words(change: Callable[[list[int], list[str | None], list[int]], object]) -> Tamper:
    """Change the rows of the vocabularies in place: fields, texts and counts."""

    def rows(table: pa.Table) -> pa.Table:
        columns = [column.to_pylist() for column in table.columns]
        change(*columns)
        return pa.table(columns, schema=table.schema)

    return arrow(VOCABULARIES, rows)


def vocabulary(change: Callable[[list[str], list[int]], object]) -> Tamper:
    """Change texts and counts of the first categorical field in place, and tell the contract the digest."""

    def tamper(folder: Path) -> None:
        contract = read_json(folder / "contract.json")
        stored = load_statistics(folder, contract["training_rows"])
        first, *others = stored.vocabularies
        texts, counts = list(first.texts), first.counts.tolist()
        change(texts, counts)
        first = replace(first, texts=tuple(texts), counts=np.array(counts))
        stored = replace(stored, vocabularies=(first, *others))
        save_statistics(stored, folder)
        write_json(folder / "contract.json", {**contract, "statistics_digest": stored.digest()})

    return tamper


def swap_first(texts: list[str], counts: list[int]) -> None:
    swap_columns(texts)
    swap_columns(counts)


def no_column(table: pa.Table) -> pa.Table:
    return table.drop_columns([table.column_names[-1]])


def half(table: pa.Table) -> pa.Table:
    column = table.schema.get_field_index("quantiles")
    short = [row[:-1] for row in table["quantiles"].to_pylist()]
    return table.set_column(column, "quantiles", pa.array(short, table.schema.field("quantiles").type))


def not_utf8(column: pa.ChunkedArray) -> pa.Array:
    texts = column.combine_chunks()
    _, ends, letters = texts.buffers()
    broken = bytes(letters).replace(b"true", b"\xff\xfe\xc0\xc1")
    assert broken != bytes(letters)
    return pa.StringArray.from_buffers(len(texts), ends, pa.py_buffer(broken), texts.buffers()[0], texts.null_count)


def empty_cell(table: pa.Table) -> pa.Table:
    return table.set_column(1, "low", pa.array([None, 0.0, 0.0, 0.0], pa.float64()))


TABLE_CASES: dict[str, tuple[Tamper, str]] = {
    "a range turned round": (
        statistics(low=at(0, 5.0), high=at(0, 1.0), quantiles=at(0, np.linspace(5.0, 1.0, 4097))),
        "a range or quantiles that are not in order",
    ),
    "a range that is NaN": (statistics(low=at(0, math.nan)), "a number that is not finite"),
    "a range that is infinite": (statistics(high=at(0, math.inf)), "a number that is not finite"),
    "a mean that is NaN": (statistics(mean=at(0, math.nan)), "a number that is not finite"),
    "a negative spread": (statistics(std=at(1, -1.0)), "a range or quantiles that are not in order"),
    "falling quantiles": (statistics(quantiles=at((0, 7), 1e6)), "a range or quantiles that are not in order"),
    "quantiles beyond the range": (statistics(low=at(1, -1.0)), "do not span the range"),
    "another range": (
        statistics(high=at(0, 5e4), quantiles=at((0, -1), 5e4)),
        "encoder.mesh.high is not what follows from the training statistics",
    ),
    "a full range of float64": (
        statistics(low=at(0, -1.7e308), high=at(0, 1.7e308), quantiles=at((0, [0, -1]), [-1.7e308, 1.7e308])),
        "is not what follows from the training statistics",
    ),
    "missing cells below none": (statistics(missing=at(0, -1)), "a count of missing that is not from 0 to 300"),
    "missing cells beyond all": (statistics(missing=at(0, 301)), "a count of missing that is not from 0 to 300"),
    "distinct values below none": (statistics(n_unique=at(0, -1)), "a count of n_unique that is not from 0"),
    "10^18 decimals": (statistics(decimals=at(0, 10**18)), "a count of decimals that is not from 0 to 4"),
    "-10^18 decimals": (statistics(decimals_standardized=at(0, -(10**18))), "decimals_standardized that is not from"),
    "an empty cell": (arrow(STATISTICS, empty_cell), "statistics.arrow has an empty cell"),
    "a quantile less": (arrow(STATISTICS, half), "each field needs 4097 quantiles"),
    "a field less": (arrow(STATISTICS, lambda table: table.slice(0, 3)), "the statistics are not those"),
    "no field": (arrow(STATISTICS, lambda table: table.slice(0, 0)), "the statistics are not those"),
    "a column less": (arrow(STATISTICS, no_column), "holds other columns than missing, low, high"),
    "columns of another order": (
        arrow(STATISTICS, lambda table: table.select(table.column_names[::-1])),
        "holds other columns than missing, low, high",
    ),
    "another type": (
        arrow(STATISTICS, lambda table: table.set_column(0, "missing", table["missing"].cast(pa.int32()))),
        "holds other columns than missing, low, high",
    ),
    "compressed statistics": (arrow(STATISTICS, lambda table: table, compression="zstd"), "it is compressed"),
    "compressed vocabularies": (arrow(VOCABULARIES, lambda table: table, compression="lz4"), "it is compressed"),
    "no Arrow file": (content(STATISTICS, lambda c: b"PAR1" + c[4:]), "statistics.arrow is not an intact Arrow file"),
    "invalid UTF-8": (
        arrow(
            VOCABULARIES,
            lambda table: pa.table([table["field"], not_utf8(table["text"]), table["count"]], table.schema),
        ),
        "vocabularies.arrow is not an intact Arrow file: .*UTF8",
    ),
    "a category twice": (vocabulary(lambda texts, counts: at(1, texts[0])(texts)), "field 0 is not a list of distinct"),
    "categories in another order": (vocabulary(swap_first), "field 0 does not list the most frequent category first"),
    "texts in another order": (vocabulary(lambda texts, counts: texts.reverse()), "."),
    "a category more": (
        vocabulary(lambda texts, counts: (texts.append("~"), counts.append(0))),
        r"categories.weight is torch.float32 \(\d+, 4\), expected",
    ),
    "counts below none": (words(lambda fields, texts, counts: at(3, -1)(counts)), "with counts from 0"),
    "counts beyond all": (
        words(lambda fields, texts, counts: at(2, 2**62)(counts)),
        "field 0 counts .* in 300 training",
    ),
    "counts that wrap round": (
        words(lambda fields, texts, counts: at(slice(0, 4), [2**62] * 4)(counts)),
        "field 0 counts .* cells in 300 training rows",
    ),
    "a category that is null": (words(lambda fields, texts, counts: at(3, None)(texts)), "is not a list of distinct"),
    "a reserved row that is not": (words(lambda fields, texts, counts: at(0, "a")(texts)), "is not a list of distinct"),
    "fields in another order": (
        words(lambda fields, texts, counts: fields.reverse()),
        "fields must be numbered from 0",
    ),
    "a field without rows": (
        words(lambda fields, texts, counts: at(slice(None), [2 * f for f in fields])(fields)),
        "fields must be numbered from 0",
    ),
    "rows before the first field": (
        words(lambda fields, texts, counts: (fields.insert(0, -1), texts.insert(0, None), counts.insert(0, 0))),
        "fields must be numbered from 0",
    ),
    "a row without field": (
        words(lambda fields, texts, counts: at(-1, None)(fields)),
        "vocabularies.arrow has an empty",
    ),
    "no vocabularies": (arrow(VOCABULARIES, lambda table: table.slice(0, 0)), "the statistics are not those"),
    "10^5 fields": (
        arrow(
            VOCABULARIES,
            lambda table: pa.table(
                [np.repeat(np.arange(10**5, dtype=np.int32), 2), pa.nulls(2 * 10**5, pa.string()), [300, 0] * 10**5],
                schema=table.schema,
            ),
        ),
        "the statistics are not those",
    ),
}


@pytest.mark.parametrize(("tamper", "reason"), TABLE_CASES.values(), ids=TABLE_CASES)
def test_tables_that_no_training_leaves_are_refused(
    tamper: Tamper, reason: str, copy: Path, refusal: Callable[[Path], str]
) -> None:
    check_refused(tamper, reason, copy, refusal)


# the folder


def link_file(folder: Path) -> None:
    """A link to the right content."""
    (folder / WEIGHTS).rename(folder.parent / "elsewhere")
    (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere")


def link_device(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("/dev/zero")


def broken_link(folder: Path) -> None:
    (folder / "spec.json").unlink()
    (folder / "spec.json").symlink_to("nowhere")


def pipe(folder: Path) -> None:
    (folder / "spec.json").unlink()
    os.mkfifo(folder / "spec.json")


def socket_file(folder: Path) -> None:
    (folder / "spec.json").unlink()
    listener = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(folder)  # the path of a socket is short
    listener.bind("spec.json")
    os.chdir(here)
    listener.close()


def folder_for_file(folder: Path) -> None:
    (folder / "spec.json").unlink()
    (folder / "spec.json").mkdir()


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def file_for_folder(folder: Path) -> None:
    weights_ = (folder / WEIGHTS).read_bytes()
    shutil.rmtree(folder)
    folder.write_bytes(weights_)


def linked_content(folder: Path) -> None:
    """A folder of links to an intact artifact."""
    folder.rename(folder.parent / "elsewhere")
    folder.mkdir()
    for path in (folder.parent / "elsewhere").iterdir():
        (folder / path.name).symlink_to(path)


def manifest(change: Callable[[list[str]], list[str]]) -> Tamper:
    def tamper(folder: Path) -> None:
        lines = (folder / MANIFEST).read_text(encoding="utf-8").splitlines()
        (folder / MANIFEST).write_text("".join(f"{line}\n" for line in change(lines)), encoding="utf-8")

    return tamper


def renamed(old: str, new: str) -> Tamper:
    return manifest(lambda lines: [line.replace(f"  {old}", f"  {new}") for line in lines])


LIST_ONCE = "MANIFEST.sha256 must list each file once"
FOLDER_CASES: dict[str, tuple[Tamper, str]] = {
    "an empty folder": (emptied, "absent or foreign: 'MANIFEST.sha256', 'MODEL_CARD.md', .* and 3 more"),
    "no folder": (lambda folder: shutil.rmtree(folder), "no artifact at .*copy; `scalarlens train` writes one"),
    "a file for the folder": (file_for_folder, "no artifact at"),
    "a file less": (lambda folder: (folder / "metrics.json").unlink(), "absent or foreign: 'metrics.json'"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "absent or foreign: 'MANIFEST.sha256'"),
    "a file more": (lambda folder: (folder / "code.py").write_text(""), "absent or foreign: 'code.py'"),
    "a hidden file more": (lambda folder: (folder / ".env").write_text(""), "absent or foreign: '.env'"),
    "a folder more": (lambda folder: (folder / "__pycache__").mkdir(), "absent or foreign: '__pycache__'"),
    "a file with a hostile name": (
        lambda folder: (folder / "\x1b[2J\na").write_text(""),
        r"absent or foreign: '\\x1b\[2J\\na'",
    ),
    "a file with a name that is no text": (
        lambda folder: Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe")).write_text(""),
        r"absent or foreign: '\\udcff\\udcfe'",
    ),
    "names that differ in case": (
        lambda folder: (folder / "SPEC.json").write_bytes((folder / "spec.json").read_bytes()),
        "absent or foreign: 'SPEC.json'",
    ),
    "another case": (lambda folder: (folder / "spec.json").rename(folder / "Spec.json"), "foreign: 'Spec.json', 'spec"),
    "a linked file": (link_file, "model.safetensors is not a regular file"),
    "a link to a device": (link_device, "model.safetensors is not a regular file"),
    "a broken link": (broken_link, "spec.json is not a regular file"),
    "a folder of links": (linked_content, "MANIFEST.sha256 is not a regular file"),
    "a pipe": (pipe, "spec.json is not a regular file"),
    "a socket": (socket_file, "spec.json is not a regular file"),
    "a folder for a file": (folder_for_file, "spec.json is not a regular file"),
    "a manifest that climbs": (renamed("spec.json", "../copy/spec.json"), LIST_ONCE),
    "a manifest of absolute names": (renamed("spec.json", "/etc/passwd"), LIST_ONCE),
    "a manifest of another case": (renamed("spec.json", "SPEC.json"), LIST_ONCE),
    "a manifest with a line twice": (manifest(lambda lines: [*lines, lines[0]]), LIST_ONCE),
    "a manifest with one line for another": (manifest(lambda lines: [lines[1], *lines[1:]]), LIST_ONCE),
    "a manifest with a line less": (manifest(lambda lines: lines[1:]), LIST_ONCE),
    "a manifest with a line more": (manifest(lambda lines: [*lines, f"{'0' * 64}  more"]), LIST_ONCE),
    "a manifest of itself": (manifest(lambda lines: [*lines, f"{'0' * 64}  {MANIFEST}"]), LIST_ONCE),
    "an empty manifest": (manifest(lambda lines: []), LIST_ONCE),
    "a manifest that is not text": (content(MANIFEST, lambda c: b"\xff\0" * 99), LIST_ONCE),
    "a manifest of a megabyte": (content(MANIFEST, lambda c: c * 2000), "larger than a manifest can be"),
    "another digest": (manifest(lambda lines: [f"{'0' * 64}{line[64:]}" for line in lines]), "was changed: SHA-256 is"),
    "no digest": (manifest(lambda lines: [line[64:] for line in lines]), "was changed: .* the manifest says ''"),
    "a hostile digest": (
        manifest(lambda lines: [f"\x1b[2J{line}" for line in lines]),
        r"was changed: SHA-256 is [0-9a-f]{64}, the manifest says '\\x1b\[2J",
    ),
}


@pytest.mark.parametrize(("tamper", "reason"), FOLDER_CASES.values(), ids=FOLDER_CASES)
def test_a_folder_that_is_not_as_it_was_sealed_is_refused(
    tamper: Tamper, reason: str, copy: Path, refusal: Callable[[Path], str]
) -> None:
    tamper(copy)
    line = refusal(copy)
    assert re.search(reason, line), line


def test_a_file_that_may_not_be_read_is_a_refusal(
    copy: Path, refusal: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("iterdir", "open", "read_bytes"):
        with monkeypatch.context() as patch:

            def forbidden(path: Path, *_: Any, **__: Any) -> None:
                raise PermissionError(13, "Permission denied", str(path))

            patch.setattr(Path, name, forbidden)
            assert "Permission denied" in refusal(copy)


def test_an_artifact_may_be_reached_through_a_link(copy: Path) -> None:
    (copy.parent / "current").symlink_to(copy)
    assert main(["verify", str(copy.parent / "current")]) == 0


def test_a_file_cut_at_any_kibibyte_is_refused(copy: Path) -> None:
    reasons = set()
    for name in (*FILES, MANIFEST):
        whole, sealed_manifest = (copy / name).read_bytes(), (copy / MANIFEST).read_bytes()
        for length in range(0, len(whole) - 1, 1024):
            (copy / name).write_bytes(whole[:length])
            with pytest.raises(ArtifactError, match=r"was changed|must list each file once"):
                load(copy)
            if name != MANIFEST:
                reseal(copy)
                with pytest.raises(ArtifactError) as caught:
                    load(copy)
                assert "was changed: SHA-256" not in str(caught.value)
                assert Path(str(caught.value).split()[0].rstrip(":")).name == name
                reasons.add(str(caught.value).partition(name)[2][:25])
                (copy / MANIFEST).write_bytes(sealed_manifest)
        (copy / name).write_bytes(whole)
    assert len(reasons) == 4  # JSON, Arrow, safetensors, and the card
    load(copy)


def test_files_of_two_artifacts_do_not_mix(
    sealed: dict[str, Sealed], copy: Path, refusal: Callable[[Path], str]
) -> None:
    mine, others = contents(copy), contents(sealed["other"].folder)
    for name in FILES:
        for foreign in ({name}, set(FILES) - {name}):
            for path in FILES:
                (copy / path).write_bytes(others[path] if path in foreign else mine[path])
            (copy / MANIFEST).write_bytes(mine[MANIFEST])
            assert "was changed: SHA-256 is" in refusal(copy)
            reseal(copy)
            assert "was changed: SHA-256 is" not in refusal(copy)
    for path in FILES:
        (copy / path).write_bytes(others[path])
    reseal(copy)
    assert contents(copy) == others
    load(copy)


def test_a_good_artifact_is_accepted_with_and_without_a_new_manifest(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["verify", "--json", str(copy)]) == 0
        assert json.loads(capsys.readouterr().out)["intact"] is True
        reseal(copy)


# a table may have columns of one kind only


@pytest.mark.parametrize("kind", ["numeric", "categorical"])
def test_a_table_of_one_kind_of_column_can_be_sealed_and_opened(kind: str, tmp_path: Path) -> None:
    rows = raw_rows(seed=4, count=60)
    other = {"numeric": "categorical", "categorical": "numeric"}[kind]
    schema = replace(SCHEMA, **{other: ()})
    statistics_ = TrainingStatistics.fit([schema_cells(schema, arrow_table(rows))])
    for scale in SCALES:
        tensorizer = Tensorizer(schema, statistics_, scale)  # type: ignore[arg-type]
        spec = ModelSpec("scalarlens", "dnn", 4, Tower((8,)), 0.01)
        model_ = CtrModel.build(spec, tensorizer.encoder_statistics)
        training = {"seed": 4, "recipe": {}}
        original = seal(model_, tensorizer, spec, training=training, metrics={}, training_digest="0")
        original.save(tmp_path / scale)
        assert same(load(tmp_path / scale).predict(rows), original.predict(rows))
        assert len(original.contract["fields"]) == len(getattr(SCHEMA, kind))


# each line of defence holds what no other one does


MUTANTS: dict[str, tuple[str, Any, Tamper, str, str | None]] = {
    "digests": ("check_digests", None, content("metrics.json", lambda c: c.replace(b"{", b"{ ")), "was changed", None),
    "contract": ("describes", True, field(0, "policies", {}), "does not describe this model", None),
    "format": ("_check_spec", None, edit("spec.json", put("format", value=2)), "has format 2", None),
    "budget": ("Budget", nullcontext(), tower("hidden", [4096, 4096]), "a larger model", "holds other tensors"),
}


@pytest.mark.parametrize(("name", "answer", "tamper", "reason", "instead"), MUTANTS.values(), ids=MUTANTS)
def test_without_one_check_what_it_holds_would_pass(
    name: str,
    answer: Any,
    tamper: Tamper,
    reason: str,
    instead: str | None,
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tamper(copy)
    if name != "check_digests":
        reseal(copy)
    with pytest.raises(ArtifactError, match=reason):
        load(copy)
    monkeypatch.setattr(artifact_module, name, lambda *arguments: answer)
    with nullcontext() if instead is None else pytest.raises(ArtifactError, match=instead):
        load(copy)


# the budget


def test_a_budget_is_spent_on_every_tensor_before_it_is_made() -> None:
    for make in MAKERS:
        size = {torch.randperm: (10**9,), torch.arange: (10**9,), torch.linspace: (0, 1, 10**9), torch.eye: (10**5,)}
        size |= {torch.tril_indices: (10**5, 10**5), torch.triu_indices: (10**5, 10**5), torch.full: ((10**9,), 0.0)}
        size |= {torch.randint: (9, (10**9,)), torch.tensor: ([0.0] * 70_000,)}
        with pytest.raises(ArtifactError, match="a larger model than the weights"), Budget({}):
            make(*size.get(make, (10**9,)))
    with Budget({"a": [100, 100]}) as budget:
        left = budget.elements
        torch.empty(30, 5), torch.zeros(7), torch.rand(2).mul(3)
        assert left - budget.elements == 30 * 5 + 7 + 2
        torch.ones(SLACK * 100 * 100)
    with pytest.raises(ArtifactError, match="a larger model"), Budget({}):
        _ = [torch.empty(0) for _ in range(10**6)]


def test_every_function_by_which_parts_make_tensors_of_a_size_is_measured() -> None:
    package = Path(artifact_module.__file__).parent
    called = set()
    for path in (*package.glob("encoders/*.py"), *package.glob("backbones/*.py"), package / "model.py"):
        called |= set(re.findall(r"torch\.(\w+)\(", path.read_text(encoding="utf-8")))
    makers = {name for name in called if "device=None" in (getattr(torch, name).__doc__ or "")}
    makers = {name for name in makers if not name.endswith("_like")}
    assert makers >= {"empty", "randn", "zeros", "arange", "tensor"}
    assert {getattr(torch, name) for name in makers} <= MAKERS
