"""The guess of a schema: one table with a column of every kind, and what is said about each of them."""

from __future__ import annotations

import csv
import datetime
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from scalarlens.datasets import infer
from scalarlens.datasets.files import Table, open_table
from scalarlens.datasets.infer import InferredSchema, infer_schema
from scalarlens.errors import DataError, UsageError
from scalarlens.table.cells import numbers
from scalarlens.table.schema import Schema

few_examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)
ROWS = 4000
#: kind and doubt of each column of `columns`; a doubt is a part of its reason, "" is no doubt
WANTED = {
    "amount": ("numeric", ""),
    "amount_with_gaps": ("numeric", ""),
    "amount_with_marks": ("numeric", ""),
    "amount_with_a_word": ("numeric", "the text 'many' in 10 rows taken for missing"),
    "amount_with_words": ("left out", "mostly numbers, but also such as 'word"),
    "amount_with_too_many_marks": ("categorical", "mostly numbers, but also such as 'none at all'"),
    "amount_with_infinity": ("numeric", "1 infinite cells"),
    "count": ("numeric", ""),
    "code": ("numeric", "few distinct values"),
    "padded": ("categorical", "leading zeros"),
    "row_id": ("left out", "nearly one value per row"),
    "shuffled_id": ("left out", "nearly one value per row"),
    "hash": ("left out", "nearly one value per row"),
    "sparse_amount": ("numeric", "nearly one value per row"),
    "user_id": ("categorical", "above 2^24 and often repeated"),
    "patient_id": ("categorical", "above 2^24 and often repeated"),
    "name": ("left out", "a row identifier, or free text"),
    "city": ("categorical", ""),
    "flag": ("categorical", ""),
    "day": ("left out", "a date or a time"),
    "moment": ("left out", "a date or a time"),
    "one_number": ("numeric", "one value in every row"),
    "one_word": ("categorical", "one value in every row"),
    "nothing": ("numeric", "every cell is missing"),
    "marks_only": ("numeric", "every cell is missing"),
    "copy": ("numeric", "nearly copies the label"),
    "copy_upside_down": ("numeric", "nearly copies the label"),
    "copy_in_words": ("categorical", "nearly copies the label: its value alone guesses"),
    "copy_in_gaps": ("numeric", "nearly copies the label: its being missing alone guesses"),
    "good_number": ("numeric", ""),
    "good_word": ("categorical", ""),
}


def columns() -> dict[str, list[Any]]:
    """A column of every kind as Python objects, and a label that is 1 in a tenth of the rows."""
    rng = np.random.default_rng(11)
    label = rng.random(ROWS) < 0.1
    amounts = [float(f"{amount:.3f}") for amount in rng.normal(size=ROWS) * 50]
    few = rng.integers(0, 3, ROWS).tolist()
    start = datetime.datetime(2024, 1, 31, 12)
    flipped = label ^ (np.arange(ROWS) % 400 == 0)
    return {
        "label": label.astype(int).tolist(),
        "amount": amounts,
        "amount_with_gaps": [None if row % 3 else amount for row, amount in enumerate(amounts)],
        "amount_with_marks": ["?" if row % 3 else "NA" if row % 2 else str(a) for row, a in enumerate(amounts)],
        "amount_with_a_word": ["many" if row % 400 == 7 else str(a) for row, a in enumerate(amounts)],
        "amount_with_words": [f"word {row}" if row % 400 == 7 else str(a) for row, a in enumerate(amounts)],
        "amount_with_too_many_marks": [str(a) if row % 9 else "none at all" for row, a in enumerate(amounts)],
        "amount_with_infinity": ["inf", *map(str, amounts[1:])],
        "count": rng.integers(0, 200, ROWS).tolist(),
        "code": few,
        "padded": [f"{number:05d}" for number in rng.integers(0, 99999, ROWS)],
        "row_id": list(range(ROWS)),
        "shuffled_id": rng.permutation(ROWS).tolist(),
        "hash": rng.integers(-(2**62), 2**62, ROWS).tolist(),
        "sparse_amount": rng.integers(0, 2**23, ROWS).tolist(),
        "user_id": (2**53 + rng.integers(0, 300, ROWS)).tolist(),
        "patient_id": rng.choice(2**28, ROWS * 2 // 3)[rng.integers(0, ROWS * 2 // 3, ROWS)].tolist(),
        "name": [f"visitor {row}" for row in range(ROWS)],
        "city": [["Rome", "Oslo", "Lima"][number] for number in few],
        "flag": [bool(number) for number in few],
        "day": [(start + datetime.timedelta(days=row % 500)).date() for row in range(ROWS)],
        "moment": [None if row % 4 == 0 else start + datetime.timedelta(minutes=row % 900) for row in range(ROWS)],
        "one_number": [5] * ROWS,
        "one_word": ["x"] * ROWS,
        "nothing": [None] * ROWS,
        "marks_only": ["?"] * ROWS,
        "copy": (label * 40 + rng.integers(0, 40, ROWS)).tolist(),
        "copy_upside_down": [a / 1000 - 3.5 * one for one, a in zip(label.tolist(), amounts, strict=True)],
        "copy_in_words": [f"yes {row % 3}" if one else f"no {row % 7}" for row, one in enumerate(flipped)],
        "copy_in_gaps": [amount if one else None for one, amount in zip(flipped, amounts, strict=True)],
        "good_number": [one + a / 25 for one, a in zip(label.tolist(), amounts, strict=True)],
        "good_word": ["a" if one or row % 5 == 0 else "b" for row, one in enumerate(label.tolist())],
    }


def write(path: Path, table: dict[str, list[Any]]) -> Table:
    """As typed Parquet, or as CSV where every cell is text and a missing one is empty."""
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.table(table), path)
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(table), *zip(*table.values(), strict=True)])
    return open_table(path)


@pytest.fixture(scope="module", params=["t.csv", "t.parquet"])
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Table:
    return write(tmp_path_factory.mktemp("infer") / request.param, columns())


def kind_of(inferred: InferredSchema, name: str) -> str:
    schema = inferred.schema
    kinds = {column.name: "numeric" for column in schema.numeric}
    return (kinds | {column.name: "categorical" for column in schema.categorical}).get(name, "left out")


def check_verdicts(inferred: InferredSchema) -> None:
    assert list(inferred.reasons) == ["label", *WANTED]
    for name, (kind, doubt) in WANTED.items():
        reason = inferred.reasons[name]
        assert (name, kind_of(inferred, name)) == (name, kind)
        assert (name in inferred.doubtful) == bool(doubt), (name, reason)
        assert doubt in reason


def test_every_kind_of_column(table: Table) -> None:
    inferred = infer_schema(table, "label")
    check_verdicts(inferred)
    assert inferred.left_out == tuple(name for name, (kind, _) in WANTED.items() if kind == "left out")
    markers = {column.name: set(column.missing) for column in inferred.schema.numeric if column.missing}
    assert markers == {
        "amount_with_marks": {"?", "NA"},
        "amount_with_a_word": {"many"},
        "marks_only": {"?"},
    }


@pytest.mark.parametrize(
    ("constant", "wrong"),
    [
        ("NUMBER_SHARE", 0.5),
        ("NUMBER_SHARE", 0.999),
        ("MOST_MARKERS", 0),
        ("MOST_MARKERS", 20),
        ("MARKERS", ("?",)),
        ("FEW_VALUES", 1),
        ("FEW_VALUES", 1000),
        ("HUGE", 2**60),
        ("HUGE", 100),
        ("UNIQUE_SHARE", 1.1),
        ("UNIQUE_SHARE", 0.0),
        ("COPY_AUC", 1.1),
        ("COPY_AUC", 0.6),
        ("COPY_ACCURACY", 1.1),
        ("_DATE", "never"),
    ],
)
def test_wrong_thresholds_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constant: str, wrong: Any
) -> None:
    monkeypatch.setattr(infer, constant, wrong)
    with pytest.raises(AssertionError):
        check_verdicts(infer_schema(write(tmp_path / "t.csv", columns()), "label"))


def test_numbers_are_readable_with_the_schema(table: Table) -> None:
    schema = infer_schema(table, "label").schema
    for batch in table.batches(schema.columns):
        for column in schema.numeric:
            values = numbers(batch.column(column.name), column.name, column.missing)
            assert np.isfinite(values).any() == (column.name not in ("nothing", "marks_only"))


# the schema file


def check_toml(inferred: InferredSchema) -> None:
    text = inferred.to_toml()
    assert Schema.from_toml(text) == inferred.schema
    for name, reason in inferred.reasons.items():
        if name != inferred.schema.label and name not in (inferred.schema.group, inferred.schema.time):
            assert any(repr(name)[1:-1] in line and reason in line for line in text.splitlines()), name
    for name in inferred.doubtful:
        assert repr(name) in text.splitlines()[0]


def test_the_file_is_a_schema_with_every_reason_in_a_comment(table: Table) -> None:
    check_toml(infer_schema(table, "label"))


def test_a_file_without_its_reasons_is_caught(table: Table) -> None:
    inferred = infer_schema(table, "label")

    class Silent(InferredSchema):
        def to_toml(self) -> str:
            return self.schema.to_toml()

    with pytest.raises(AssertionError):
        check_toml(Silent(inferred.schema, inferred.reasons, inferred.doubtful))


hostile_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8)


@few_examples
@given(st.lists(hostile_text, min_size=2, max_size=3, unique=True), hostile_text, st.booleans())
def test_any_name_and_any_cell_give_valid_toml(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], cell: str, mostly: bool
) -> None:
    cells = [cell if (row % 300 == 9) == mostly else "1.5" for row in range(600)]
    label, *others = names
    table = {label: [0, 1] * 300, **dict.fromkeys(others, cells), "a number": [0.5, 1.5, 2.5] * 200}
    inferred = infer_schema(write(tmp_path_factory.mktemp("toml") / "t.parquet", table), label)
    assert Schema.from_toml(inferred.to_toml()) == inferred.schema


def test_a_table_without_doubts_has_no_comment_on_top(tmp_path: Path) -> None:
    inferred = infer_schema(write(tmp_path / "t.csv", {"a": [0.5, 1.5], "y": [0, 1]}), "y")
    assert inferred.doubtful == ()
    assert inferred.to_toml() == 'label = "y"\n\n[numeric]\n"a" = {}  # numbers from 0.5 to 1.5\n\n[categorical]\n'
    assert tomllib.loads(inferred.to_toml())["label"] == "y"


# roles and labels


def test_label_group_and_time_are_no_features(table: Table) -> None:
    inferred = infer_schema(table, "label", group="user_id", time="moment")
    assert (inferred.schema.group, inferred.schema.time) == ("user_id", "moment")
    assert not {"label", "user_id", "moment"} & set(inferred.schema.features)
    assert not {"label", "user_id", "moment"} & {*inferred.left_out, *inferred.doubtful}
    assert "group" in inferred.reasons["user_id"]
    assert "time" in inferred.reasons["moment"]


@pytest.mark.parametrize("roles", [{"label": "labels"}, {"group": "user"}, {"time": "moments"}])
def test_unknown_columns_are_refused_with_the_nearest(table: Table, roles: dict[str, str]) -> None:
    near = {"labels": "label", "user": "user_id", "moments": "moment"}[next(iter(roles.values()))]
    with pytest.raises(UsageError, match=f"did you mean '{near}'"):
        infer_schema(table, **{"label": "label", **roles})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (["yes", "no", "no"], r"row 1: the label 'yes' is neither 0 nor 1; the column holds 'yes', 'no'; make it 0/1"),
        (["0", "1", "2"], r"row 3: the label '2' is neither 0 nor 1; the column holds '0', '1', '2'; make it 0/1"),
        (["0", "", "1"], r"row 2: the label is missing; the column holds '0', '1'; make it 0/1"),
        (["", "", ""], r"row 1: the label is missing; the column holds nothing; make it 0/1"),
        (["1", "1", "1"], r"the label 'y' is 1 in all 3 rows; a model needs rows of both 0 and 1"),
        ([], r"has no rows"),
    ],
)
def test_labels_must_be_zero_and_one(tmp_path: Path, labels: list[str], sentence: str) -> None:
    table = write(tmp_path / "t.csv", {"a": list(range(len(labels))), "y": list(labels)})
    with pytest.raises(DataError, match=sentence):
        infer_schema(table, "y")


def test_a_table_without_features_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no column that can be a feature$"):
        infer_schema(write(tmp_path / "t.csv", {"y": [0, 1]}), "y")
    dates = {"y": [0, 1], "day": ["2024-01-31", "2024-02-01"]}
    with pytest.raises(DataError, match="has no column that can be a feature; 'day': a date"):
        infer_schema(write(tmp_path / "t.csv", dates), "y")


# types that only typed files have


def test_nested_and_binary_columns_are_left_out_without_doubt(tmp_path: Path) -> None:
    table = {"a": [0.5, 1.5], "y": [0, 1], "tags": [["x"], []], "raw": [b"x", b"y"], "pair": [{"p": 1}, {"p": 2}]}
    inferred = infer_schema(write(tmp_path / "t.parquet", table), "y")
    assert inferred.left_out == ("tags", "raw", "pair")
    assert inferred.doubtful == ()
    assert "list" in inferred.reasons["tags"]
    assert "binary" in inferred.reasons["raw"]


def test_ids_that_a_gap_made_floats_are_doubtful(tmp_path: Path) -> None:
    table = {"id": [None, *(2.0**28 + row % 9 for row in range(99))], "y": [0, 1] * 50}
    inferred = infer_schema(write(tmp_path / "t.parquet", table), "y")
    assert kind_of(inferred, "id") == "numeric"
    assert "above 2^24 and often repeated: ids?" in inferred.reasons["id"]


def test_types_may_differ_between_the_files_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", {"a": [1, 2], "b": [1, 2], "y": [0, 1]})
    write(tmp_path / "2.parquet", {"a": [0.5, None], "b": ["x", "?"], "y": [0, 1]})
    inferred = infer_schema(open_table(tmp_path), "y")
    assert kind_of(inferred, "a") == "numeric"
    assert kind_of(inferred, "b") == "categorical"


# dates


@pytest.mark.parametrize(
    ("cell", "is_date"),
    [
        ("2024-01-31", True),
        ("2024/1/31", True),
        ("2024-01-31T12:30:00Z", True),
        ("2024-01-31 12:30:00.123+02:00", True),
        ("2024-01-31 12:30", True),
        ("31.01.2024", True),
        ("01/31/2024", True),
        ("20240131", False),
        ("2024-01", False),
        ("2024-01-31-7", False),
        ("12:30", False),
        ("1.5.2", False),
    ],
)
def test_what_looks_like_a_date(tmp_path: Path, cell: str, is_date: bool) -> None:
    many = [cell, *(cell.replace("3", str(digit)) for digit in range(1, 9)), "", "NULL"] * 20
    for cells in ([cell] * 220, many):
        table = write(tmp_path / "t.csv", {"a": [0.5] * 220, "when": cells, "y": [0, 1] * 110})
        assert ("when" in infer_schema(table, "y").left_out) == is_date


# copies of the label


@few_examples
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=40, max_size=80))
def test_the_auc_is_that_of_scikit_learn(rows: list[tuple[int, bool]]) -> None:
    scores, positive = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    wanted = roc_auc_score(positive, scores) if min(positive.sum(), (~positive).sum()) >= 10 else 0.5
    assert infer._auc(scores, positive) == pytest.approx(wanted, abs=1e-12)


@few_examples
@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=30),
    st.floats(0.25, 4.0),
    st.floats(0.25, 4.0),
)
def test_rows_are_guessed_by_the_other_rows_of_their_group(
    rows: list[tuple[int, bool]], weight_of_zero: float, weight_of_one: float
) -> None:
    groups, positive = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    weights = np.where(positive, weight_of_one, weight_of_zero)
    share = weights[positive].sum() / weights.sum()
    right = 0.0
    for row in range(len(rows)):
        others = (groups == groups[row]) & (np.arange(len(rows)) != row)
        ones, zeros = weights[others & positive].sum(), weights[others & ~positive].sum()
        guess = share > 0.5 if abs(ones - zeros) <= 1e-9 * weights.sum() else ones > zeros
        right += weights[row] * (guess == positive[row])
    accuracy, base = infer._accuracy_of_others(groups, positive, weights)
    assert accuracy == pytest.approx(right / weights.sum(), abs=1e-9)
    assert base == pytest.approx(max(share, 1 - share), abs=1e-12)


def test_rare_labels_are_judged_by_the_errors_that_a_constant_makes(tmp_path: Path) -> None:
    """A constant is right in 99.8 % of the rows; only a column far better than that copies the label."""
    rng = np.random.default_rng(3)
    label = (np.arange(10_000) % 500 == 0).astype(int)
    table = {
        "y": label.tolist(),
        "noise": rng.choice(["a", "b"], 10_000).tolist(),
        "copy": [f"yes {row % 2}" if one else "no" for row, one in enumerate(label)],
        "half": ["yes" if one and row % 1000 == 0 else "no" for row, one in enumerate(label)],
    }
    assert infer_schema(write(tmp_path / "t.csv", table), "y").doubtful == ("copy",)


def test_few_rows_prove_no_copy(tmp_path: Path) -> None:
    label = [0, 1] * 9
    assert infer_schema(write(tmp_path / "t.csv", {"y": label, "x": [a + 0.5 for a in label]}), "y").doubtful == ()


# bounds


def test_a_sample_of_the_rows_sees_the_same_copies(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "SAMPLE_ROWS", 200)
    check_verdicts(infer_schema(table, "label"))


def test_the_sample_is_bounded_even_and_weighted_by_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "SAMPLE_ROWS", 1000)
    sample = infer._Sample(["place"])
    for start in range(0, 100_000, 1000):
        batch = pa.record_batch({"place": np.arange(start, start + 1000)})
        sample.add(batch, np.arange(start, start + 1000) % 2 == 0)
    places = np.array(sample.table.column("place").to_pylist(), dtype=np.int64)
    assert sample.rows == 50_000
    assert 500 < len(places) <= 1000
    assert (places % 2 == 0).all()
    tenths = np.bincount(places // 10_000, minlength=10) / len(places)
    assert np.abs(tenths - 0.1).max() < 0.05


def test_distinct_cells_are_counted_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "DISTINCT_LIMIT", 100)
    table = {
        "y": [0, 0, 1] * 700,
        "many": [f"c{row % 700}" for row in range(2100)],
        "few": [f"c{row % 100}" for row in range(2100)],
    }
    reasons = infer_schema(write(tmp_path / "t.csv", table), "y").reasons
    assert reasons["many"] == "text, more than 100 distinct (counted up to there)"
    assert reasons["few"] == "text, 100 distinct"


@few_examples
@given(st.lists(st.lists(st.integers(-5, 5) | st.sampled_from([2**62, -(2**62)]), max_size=20), max_size=6))
def test_distinct_cells_are_counted_exactly_below_the_limit(batches: list[list[int]]) -> None:
    distinct = infer._Distinct()
    for batch in batches:
        distinct.add(pa.array(batch, pa.int64()))
    assert distinct.count == len({number for batch in batches for number in batch})
