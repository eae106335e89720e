"""The command line as people type it, with good tables and bad ones."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import scalarlens
from scalarlens.artifact import SCORING_BATCH
from scalarlens.cli import main
from scalarlens.datasets.click_log import make_click_log
from scalarlens.datasets.prepared import PreparedTable

ROWS = 900
QUICK = ("--option", "recipe.max_epochs=2", "--option", "recipe.batch_size=128")
COMMON = ("--backbone", "dcnv2", "--input-scale", "raw", "--seed", "2026", *QUICK)


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command; returns exit code, stdout and stderr, and insists that there is no traceback."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def clicks() -> pa.Table:
    return make_click_log(ROWS, seed=5).table


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, clicks: pa.Table) -> Path:
    """A folder in which every command up to `train` has run."""
    folder = tmp_path_factory.mktemp("clicks")
    pq.write_table(clicks, folder / "train.parquet")
    schema = folder / "schema.toml"
    text = '[numeric]\n"price" = {unit = "EUR"}\n"views_7d" = {}\n"balance_change" = {}\n"discount" = {}\n'
    categories = '[categorical]\n"placement" = {}\n"advertiser" = {}\n'
    schema.write_text(f'label = "clicked"\ngroup = "country"\n{text}{categories}')
    prepare = (
        "prepare",
        "--schema",
        schema,
        "--train",
        folder / "train.parquet",
        "--split",
        "random",
        "--seed",
        "2026",
    )
    assert main([str(a) for a in (*prepare, "--out", folder / "data")]) == 0
    train = ("train", folder / "data", "--encoder", "scalarlens", *COMMON, "--out", folder / "run")
    assert main([str(a) for a in train]) == 0
    return folder


def test_schema_infer_writes_nothing_but_toml(typed: Any, trained: Path) -> None:
    code, out, err = typed("schema", "infer", trained / "train.parquet", "--label", "clicked")
    assert (code, err) == (0, "")
    tables = tomllib.loads(out)
    assert list(tables["numeric"]) == ["price", "views_7d", "seconds_since_visit", "balance_change", "discount"]
    assert list(tables["categorical"]) == ["placement", "country", "advertiser"]
    assert out.count("#") >= 8  # every column has its reason


def test_schema_check_lists_problems(typed: Any, trained: Path, tmp_path: Path, clicks: pa.Table) -> None:
    schema = trained / "schema.toml"
    assert typed("schema", "check", schema, trained / "train.parquet")[0] == 0
    pq.write_table(clicks.drop_columns(["price"]), tmp_path / "bad.parquet")
    code, out, _ = typed("schema", "check", schema, tmp_path / "bad.parquet", "--json")
    assert code == 3
    problems = json.loads(out)["problems"]
    assert any(problem["column"] == "price" and problem["severity"] == "error" for problem in problems)


def test_the_random_split_is_80_10_10(trained: Path) -> None:
    splits = PreparedTable(trained / "data").splits
    assert {name: split["rows"] for name, split in splits.items()} == {"train": 720, "valid": 90, "test": 90}


def test_evaluate_prints_one_json_object(typed: Any, trained: Path) -> None:
    code, out, _ = typed("evaluate", trained / "run" / "artifact", trained / "data", "--split", "test", "--json")
    assert code == 0
    found = json.loads(out)
    assert list(found) == ["auc", "log_loss", "gauc", "ece", "calibration_slope", "rows"]
    assert found["rows"] == 90
    assert 0.0 < found["auc"] < 1.0
    assert found["gauc"] is not None


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "arrow"])
def test_predict_keeps_the_order_and_names_what_it_ignores(
    typed: Any, trained: Path, tmp_path: Path, clicks: pa.Table, ending: str
) -> None:
    rows, scores = tmp_path / f"rows.{ending}", tmp_path / "scores.parquet"
    write(clicks, rows)
    code, _, err = typed("predict", trained / "run" / "artifact", rows, "--out", scores, "--device", "cpu")
    assert code == 0
    assert "clicked" in err
    table = pq.read_table(scores)
    assert table.column_names == ["probability"]
    expected = scalarlens.load(trained / "run" / "artifact").predict(clicks)
    np.testing.assert_array_equal(table["probability"].to_numpy(), expected)


def test_predict_equals_the_training_path(typed: Any, trained: Path, tmp_path: Path, clicks: pa.Table) -> None:
    """Bit for bit at the same batch size, row order and device; within 1e-6 otherwise."""
    prepare = ("prepare", "--schema", trained / "schema.toml", "--train", trained / "train.parquet")
    assert typed(*prepare, "--valid", trained / "train.parquet", "--out", tmp_path / "data")[0] == 0
    train = ("train", tmp_path / "data", "--encoder", "scalarlens", *COMMON, "--out", tmp_path / "run")
    assert typed(*train)[0] == 0
    artifact = scalarlens.load(tmp_path / "run" / "artifact")
    split = PreparedTable(tmp_path / "data").split("train", artifact.tensorizer.scale)
    through_training = artifact.model.score(split.batches(SCORING_BATCH))
    np.testing.assert_array_equal(artifact.logits(clicks), through_training)
    other_batches = artifact.model.score(split.batches(77))
    assert np.abs(other_batches - through_training).max() < 1e-6
    shifted = artifact.logits(clicks.set_column(0, "price", pa.array(clicks["price"].to_numpy() + 1.0)))
    assert np.abs(shifted - through_training).max() > 1e-6  # the comparison can fail


def test_predict_scores_and_counts_what_is_odd(typed: Any, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(
        "price,views_7d,balance_change,discount,placement,advertiser\n,1,2,3,search,ad-0\n1e30,-5,inf,,nowhere,\n"
    )
    code, _, err = typed("predict", trained / "run" / "artifact", tmp_path / "rows.csv", "--out", tmp_path / "s.csv")
    assert code == 0
    for sentence in (
        "price: 1 of 2 cells missing",
        "price: 1 of 2 cells out of range",
        "balance_change: 1 of 2 cells infinite",
        "placement: 1 of 2 cells unseen",
        "advertiser: 1 of 2 cells missing",
    ):
        assert sentence in err
    probabilities = pa.csv.read_csv(tmp_path / "s.csv")["probability"].to_numpy()
    assert np.isfinite(probabilities).all()


def test_contract_verify_and_list(typed: Any, trained: Path) -> None:
    artifact = trained / "run" / "artifact"
    contract = json.loads(typed("contract", "show", artifact, "--json")[1])
    price = contract["fields"][0]
    assert (price["name"], price["unit"], len(price["mesh_edges"])) == ("price", "EUR", 17)
    assert "price" in typed("contract", "show", artifact)[1]
    assert json.loads(typed("verify", artifact, "--json")[1])["intact"] is True
    for kind in ("encoders", "backbones", "datasets"):
        assert json.loads(typed("list", kind, "--json")[1])
    entry = json.loads(typed("list", "encoders", "--json")[1])["scalarlens"]
    assert entry["parameters"] == 51_600 + 13 * 16
    assert {"source", "uses_context", "fitted_statistics", "confidence"} <= set(entry)


def test_a_changed_artifact_is_refused(typed: Any, trained: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(trained / "run" / "artifact", tmp_path / "artifact")
    weights = tmp_path / "artifact" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    code, out, err = typed("verify", tmp_path / "artifact")
    assert (code, out) == (4, "")
    assert err.count("\n") == 1


WRONG_USAGE = {
    "unknown encoder": (("--encoder", "scalarlense", *COMMON), "did you mean 'scalarlens'"),
    "unknown option": (("--encoder", "deer", *COMMON, "--option", "encoder.interval=3"), "did you mean 'intervals'"),
    "option of a wrong type": (("--encoder", "deer", *COMMON, "--option", "encoder.intervals=x"), "whole number"),
    "option without a part": (("--encoder", "deer", *COMMON, "--option", "rank=3"), "PART.NAME=VALUE"),
    "unknown recipe": (("--encoder", "deer", *COMMON, "--recipe", "barss"), "did you mean 'bars'"),
    "recipe out of bounds": (("--encoder", "deer", *COMMON, "--option", "recipe.averaging=1.5"), "averaging"),
    "no seed": (("--encoder", "deer", "--backbone", "dnn", "--input-scale", "raw"), "--seed"),
    "mesh start": (("--encoder", "deer", *COMMON, "--option", "encoder.mesh_start=quantil"), "did you mean 'quantile'"),
}


@pytest.mark.parametrize("case", WRONG_USAGE)
def test_wrong_usage_is_one_sentence_and_exit_code_2(typed: Any, trained: Path, tmp_path: Path, case: str) -> None:
    arguments, hint = WRONG_USAGE[case]
    code, out, err = typed("train", trained / "data", *arguments, "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    assert hint in err


def test_cuda_without_a_gpu_is_wrong_usage(typed: Any, trained: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, _, err = typed("train", trained / "data", "--encoder", "deer", *COMMON, "--out", tmp_path, "--device", "cuda")
    assert code == 2
    assert "--device cpu" in err


def test_a_split_needs_a_seed_and_a_seed_a_split(typed: Any, trained: Path, tmp_path: Path) -> None:
    prepare = ("prepare", "--schema", trained / "schema.toml", "--train", trained / "train.parquet", "--out", tmp_path)
    assert typed(*prepare, "--split", "random")[0] == 2
    assert typed(*prepare, "--seed", "3")[0] == 2
    assert typed(*prepare)[0] == 2


def test_evaluate_refuses_a_table_of_other_training_rows(typed: Any, trained: Path, tmp_path: Path) -> None:
    prepare = ("prepare", "--schema", trained / "schema.toml", "--train", trained / "train.parquet")
    assert typed(*prepare, "--split", "random", "--seed", "7", "--out", tmp_path / "other")[0] == 0
    code, _, err = typed("evaluate", trained / "run" / "artifact", tmp_path / "other")
    assert code == 3
    assert "scalarlens predict" in err


# bad tables


def good_columns(rows: int = 240, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "price": rng.lognormal(2, 2, rows),
        "count": rng.integers(0, 50, rows),
        "city": rng.choice(["a", "b", "c"], rows),
        "label": rng.integers(0, 2, rows),
    }


def changed(**columns: Any) -> dict[str, Any]:
    return good_columns() | columns


N = 240
FINITE: dict[str, dict[str, Any]] = {
    "an all-missing column": changed(price=pa.nulls(N, pa.float64())),
    "a constant": changed(count=np.full(N, 7)),
    "1e30": changed(price=np.where(np.arange(N) == 3, 1e30, good_columns()["price"])),
    "the largest numbers": changed(price=np.where(np.arange(N) % 2, 1.7e308, -1.7e308)),
    "ids above 2^24": changed(city=2**24 + np.arange(N) % 5 - 1),
    "a category seen once": changed(city=np.array(["once", *good_columns()["city"][1:]])),
    "an extra column": changed(extra=np.arange(N)),
    "a boolean label": changed(label=good_columns()["label"].astype(bool)),
    "a label in text": changed(label=good_columns()["label"].astype(str)),
}
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "infinity": (changed(price=np.where(np.arange(N) == 41, np.inf, 1.0)), ("price", "row 42", "infinite")),
    "a date string": (changed(price=np.full(N, "2024-01-31")), ("price", "2024-01-31", "not a number", "row 1")),
    "a label of 2": (changed(label=np.arange(N) % 3), ("label", "row 3")),
    "a missing label": (changed(label=pa.array([None, *[0, 1] * 119, 1])), ("label", "row 1")),
    "a missing column": ({k: v for k, v in good_columns().items() if k != "count"}, ("missing column", "count")),
    "no rows": ({k: v[:0] for k, v in good_columns().items()}, ("no rows",)),
}
SCHEMA = 'label = "label"\n[numeric]\nprice = {}\ncount = {}\n[categorical]\ncity = {}\n'


def write(table: pa.Table, path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        options = pa.csv.WriteOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
        pa.csv.write_csv(table, path, options)


def prepared_from(typed: Any, folder: Path, columns: dict[str, Any], ending: str) -> tuple[int, str, str]:
    (folder / "schema.toml").write_text(SCHEMA)
    write(pa.table(columns), folder / f"train.{ending}")
    write(pa.table(good_columns(seed=1)), folder / "valid.parquet")
    given = ("--train", folder / f"train.{ending}", "--valid", folder / "valid.parquet")
    return typed("prepare", "--schema", folder / "schema.toml", *given, "--out", folder / "data")


@pytest.mark.parametrize("ending", ["parquet", "csv"])
@pytest.mark.parametrize("case", FINITE)
def test_an_odd_table_gives_a_finite_model(typed: Any, tmp_path: Path, case: str, ending: str) -> None:
    code, _, err = prepared_from(typed, tmp_path, FINITE[case], ending)
    assert code == 0, err
    train = ("train", tmp_path / "data", "--encoder", "scalarlens", *COMMON, "--out", tmp_path / "run")
    code, _, err = typed(*train)
    assert code == 0, err
    probabilities = scalarlens.load(tmp_path / "run" / "artifact").predict(pa.table(FINITE[case]))
    assert np.isfinite(probabilities).all()
    if case == "an extra column":
        assert "extra" in prepared_from(typed, tmp_path, FINITE[case], ending)[2]
    if case == "ids above 2^24":
        texts = PreparedTable(tmp_path / "data").statistics.vocabularies[0].texts
        assert set(texts) == {str(2**24 + i) for i in range(-1, 4)}


@pytest.mark.parametrize("ending", ["parquet", "csv"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_table_is_one_sentence_and_exit_code_3(typed: Any, tmp_path: Path, case: str, ending: str) -> None:
    columns, words = REFUSED[case]
    code, out, err = prepared_from(typed, tmp_path, columns, ending)
    assert (code, out) == (3, "")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert not (tmp_path / "data").exists()


def test_missing_only_in_validation_is_scored(typed: Any, tmp_path: Path) -> None:
    columns = good_columns(seed=1)
    columns["price"][::3] = np.nan
    (tmp_path / "schema.toml").write_text(SCHEMA)
    write(pa.table(good_columns()), tmp_path / "train.parquet")
    write(pa.table(columns), tmp_path / "valid.parquet")
    given = ("--train", tmp_path / "train.parquet", "--valid", tmp_path / "valid.parquet", "--out", tmp_path / "data")
    assert typed("prepare", "--schema", tmp_path / "schema.toml", *given)[0] == 0
    assert typed("train", tmp_path / "data", "--encoder", "scalarlens", *COMMON, "--out", tmp_path / "run")[0] == 0
    code, out, _ = typed("evaluate", tmp_path / "run" / "artifact", tmp_path / "data", "--split", "valid", "--json")
    assert code == 0
    assert np.isfinite(json.loads(out)["log_loss"])


@pytest.mark.parametrize("cut", [0, 10, 1000])
def test_a_truncated_parquet_is_refused(typed: Any, tmp_path: Path, cut: int) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    write(pa.table(good_columns()), tmp_path / "train.parquet")
    whole = (tmp_path / "train.parquet").read_bytes()
    (tmp_path / "train.parquet").write_bytes(whole[:cut])
    given = ("--train", tmp_path / "train.parquet", "--split", "random", "--seed", "1", "--out", tmp_path / "data")
    code, out, err = typed("prepare", "--schema", tmp_path / "schema.toml", *given)
    assert (code, out) == (3, "")
    assert "train.parquet" in err
    assert err.count("\n") == 1
