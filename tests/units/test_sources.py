"""Sources: each format from small made-up files, made logs against their formulas, and the real files where present.

A check states what must hold; beside it stands what is broken on purpose, and the check must reject that.
"""

from __future__ import annotations

import gzip
import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalarlens import metrics
from scalarlens.cli import main
from scalarlens.datasets import (
    automl3,
    bank_marketing,
    census_income,
    click_log,
    controlled,
    criteo,
    diabetes130,
)
from scalarlens.datasets.files import Table, open_text
from scalarlens.datasets.parts import DROPPED, Part, deal_in_order, deal_randomly
from scalarlens.datasets.prepare import prepare
from scalarlens.datasets.prepared import PreparedTable
from scalarlens.datasets.source import ChangedFile, Opened, build, relabelled, sources
from scalarlens.errors import DataError, UsageError
from scalarlens.table.schema import CategoricalColumn, NumericColumn

NAMES = ["automl3", "bank-marketing", "census-income", "click-log", "controlled", "criteo", "diabetes130"]
few_examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)
Rows = list[dict[str, Any]]
Check = Callable[[Path], None]


def rows_of(opened: Opened) -> dict[str, Rows]:
    """The rows of each split, with the columns of the schema."""
    found: dict[str, Rows] = {}
    for part in opened.parts:
        done = 0
        for batch in part.table.batches(opened.schema.columns):
            rows = batch.to_pylist()
            for split, mask in part.members(done, done + len(rows)):
                found.setdefault(split, []).extend(row for row, keep in zip(rows, mask, strict=True) if keep)
            done += len(rows)
        assert done == part.table.count_rows()
    return found


def sizes_of(opened: Opened) -> dict[str, int]:
    return {split: len(rows) for split, rows in rows_of(opened).items()}


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(DataError) as caught:
        action()
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def names_of(columns: tuple[NumericColumn, ...] | tuple[CategoricalColumn, ...]) -> list[str]:
    return [column.name for column in columns]


# What holds for every source


def test_the_sources_are_those_that_are_documented() -> None:
    assert sources.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_source_states_its_facts(name: str) -> None:
    part = sources.get(name)
    assert part.licence
    assert part.obtain
    assert part.splits
    assert len({rule.name for rule in part.splits}) == len(part.splits)
    assert {rule.name for rule in part.splits} <= {"random", "time", "official"}
    assert part.paper_split in (None, *(rule.name for rule in part.splits))
    summary = (part.__doc__ or "").strip().split("\n")[0]
    assert summary.endswith((".", "`, ..."))
    for file in part.files:
        assert file.what
        for digest in filter(None, (file.sha256, file.content_sha256)):
            assert len(digest) == 64
            assert set(digest) <= set("0123456789abcdef")


@pytest.mark.parametrize("name", NAMES)
def test_a_split_that_draws_needs_a_seed(name: str, tmp_path: Path) -> None:
    for rule in sources.get(name).splits:
        if rule.seeded:
            with pytest.raises(UsageError, match=r"needs --seed N: a split that cannot be repeated is refused"):
                build(name).open(tmp_path, rule.name)
    with pytest.raises(UsageError, match="--seed must be a whole number from 0; got -1"):
        build(name).open(tmp_path, None, -1)
    with pytest.raises(UsageError, match=f"unknown split of {name} 'rando'"):
        build(name).open(tmp_path, "rando", 1)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("click-log", "controlled")])
def test_a_missing_file_says_what_to_put_where(name: str, tmp_path: Path) -> None:
    part = sources.get(name)
    with pytest.raises(UsageError, match="needs --from FILE_OR_FOLDER, with") as unnamed:
        build(name).open(None, None, 1)
    assert part.obtain in str(unnamed.value)
    for place, problem in ((tmp_path, "has no such file"), (tmp_path / "absent", "does not exist")):
        sentence = refusal(lambda place=place: build(name).open(place, None, 1))
        assert part.files[0].name in sentence
        assert part.files[0].what in sentence
        assert f"{place} {problem}" in sentence
        assert sentence.endswith(part.obtain)


def test_an_unknown_option_or_source_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown source 'criteoo'; did you mean 'criteo'"):
        build("criteoo")
    with pytest.raises(UsageError, match="unknown option of source 'diabetes130' 'keep_decesed'"):
        build("diabetes130", keep_decesed=True)
    with pytest.raises(UsageError, match=r"source\.keep_deceased must be true or false; got 'yes'"):
        build("diabetes130", keep_deceased="yes")
    with pytest.raises(UsageError, match="unknown mechanism 'cats'; did you mean 'cat'"):
        build("controlled", mechanism="cats")
    with pytest.raises(UsageError, match="vocabulary_scale must be above 0"):
        build("click-log", vocabulary_scale=0.0)


# Dealing


@pytest.mark.parametrize("rows", [0, 1, 7, 20, 15, 1003])
def test_rows_are_dealt_in_exact_shares(rows: int) -> None:
    for dealt in (deal_in_order(rows), deal_randomly(rows, seed=5)):
        sizes = np.bincount(dealt, minlength=3)
        assert sizes.tolist() == [rows - 2 * round(rows / 10), round(rows / 10), round(rows / 10)]
    assert (np.diff(deal_in_order(rows).astype(int)) >= 0).all()


def test_criteo_is_dealt_as_in_the_benchmark() -> None:
    # the row counts of the paper and of BARS, Criteo_x4
    assert np.bincount(deal_in_order(45_840_617)).tolist() == [36_672_493, 4_584_062, 4_584_062]


def test_a_seed_repeats_its_split_and_another_does_not() -> None:
    one, again, other = (deal_randomly(1000, seed) for seed in (1, 1, 2))
    assert (one == again).all()
    assert (one != other).any()
    assert (one != deal_in_order(1000)).any()


def test_members_cover_every_dealt_row_once() -> None:
    dealt = np.array([0, DROPPED, 2, 1, 0, 3], np.uint8)
    part = Part(open_text("made", "\t", columns=["a"], content=b""), dealt)
    assert part.splits == ("train", "valid", "test", "shifted")
    found = {split: np.flatnonzero(mask).tolist() for split, mask in part.members(0, 6)}
    assert found == {"train": [0, 4], "valid": [3], "test": [2], "shifted": [5]}
    assert [split for split, _ in part.members(0, 2)] == ["train"]


# Text without a header

plain_cells = st.text(st.characters(exclude_characters="\0\t\r\n", exclude_categories=["Cs"]), max_size=4)


@few_examples
@given(
    st.lists(st.lists(plain_cells, min_size=2, max_size=2), max_size=5),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.booleans(),
)
def test_text_without_a_header_comes_back(rows: list[list[str]], end: str, closed: bool, blank: bool) -> None:
    lines = ["\t".join(row) for row in rows]
    if rows and lines[0].startswith("\ufeff"):
        return
    text = (end * (1 + blank)).join(lines) + end * (closed and bool(lines))
    with TemporaryDirectory() as folder:
        path = Path(folder, "rows.txt")
        path.write_text(text or end, encoding="utf-8", newline="")
        table = open_text(path, "\t", columns=["a", "b"])
        assert table.count_rows() == len(rows)
        found = [list(row.values()) for batch in table.batches() for row in batch.to_pylist()]
    assert found == rows


@few_examples
@given(st.lists(st.sampled_from(["1\t2", "", "\n", "\r", "\r\n", "\n\n", "3\t", "\t"]), max_size=12))
def test_lines_are_counted_as_they_are_parsed(pieces: list[str]) -> None:
    table = open_text("made", "\t", columns=["a", "b"], content="\n".join(pieces).encode() + b"\n")
    try:
        parsed = sum(batch.num_rows for batch in table.batches())
    except DataError:
        return
    assert table.count_rows() == parsed


def test_a_quote_is_a_letter_where_there_is_no_header() -> None:
    table = open_text("made", "\t", columns=["a", "b"], content=b'"x\ty"\n1\t""\n')
    assert [batch.to_pydict() for batch in table.batches()] == [{"a": ['"x', "1"], "b": ['y"', '""']}]


def test_a_fault_in_text_without_a_header_is_one_sentence(tmp_path: Path) -> None:
    def sentence(content: bytes) -> str:
        return refusal(lambda: list(open_text("made", "\t", columns=["a", "b"], content=content).batches()))

    assert sentence(b"1\t2\n3\n") == "made in row 2 has 1 cell; the format names 2 columns"
    assert sentence(b"1\t2\t3\n") == "made in row 1 has 3 cells; the format names 2 columns"
    assert sentence(b"1\t2\n3\t4\0\n") == "made, in row 2, column 'b', holds a NUL byte; save the table as UTF-8 text"
    assert sentence(b"1\t\xff\n") == "made in row 1 is not UTF-8; save the table as UTF-8 text"
    (tmp_path / "empty.txt").write_bytes(b"")
    assert "is empty (0 bytes)" in refusal(lambda: open_text(tmp_path / "empty.txt", "\t", columns=["a"]))
    assert "no file or folder" in refusal(lambda: open_text(tmp_path / "absent.txt", "\t", columns=["a"]))


# Bank marketing

BANK_HEADER = (
    ",age,job,marital,education,default,balance,housing,loan,contact,day,month,duration,campaign,pdays,previous,"
    "poutcome,deposit"
)


def write_bank(
    folder: Path, places: list[int], label: Callable[[int], str] = lambda place: "yes" if place % 3 == 0 else "no"
) -> Path:
    """Calls whose balance is minus their place in time; the first half is the training file."""
    lines = [
        f"{place},{30 + place},retired,married,primary,no,{-place},no,yes,cellular,14,may,{place * 60},4,-1,0,unknown,"
        f"{label(place)}"
        for place in places
    ]
    half = len(lines) // 2
    for name, part in (("train", lines[:half]), ("test", lines[half:])):
        with gzip.open(folder / f"{name}.csv.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join([BANK_HEADER, *part]) + "\n")
    return folder


def check_bank_columns(folder: Path) -> None:
    opened = build("bank-marketing").open(write_bank(folder, list(range(20))), "random", 1)
    assert names_of(opened.schema.numeric) == ["age", "balance", "day", "campaign", "pdays", "previous"]
    assert len(opened.schema.categorical) == 9
    assert not {"", "duration"} & set(opened.schema.columns)
    found = rows_of(opened)
    assert {split: len(rows) for split, rows in found.items()} == {"train": 16, "valid": 2, "test": 2}
    rows = sorted((row for split in found.values() for row in split), key=lambda row: int(row["age"]))
    assert [row["deposit"] for row in rows] == [int(place % 3 == 0) for place in range(20)]
    assert [row["balance"] for row in rows] == [str(-place) for place in range(20)]
    assert any("'duration'" in note for note in opened.notes)


def check_bank_time(folder: Path) -> None:
    places = np.random.default_rng(3).permutation(40).tolist()
    found = rows_of(build("bank-marketing").open(write_bank(folder, places), "time"))
    by_split = {split: sorted(-int(row["balance"]) for row in rows) for split, rows in found.items()}
    assert by_split == {"train": list(range(32)), "valid": [32, 33, 34, 35], "test": [36, 37, 38, 39]}


def test_bank_refuses_other_labels_and_other_headers(tmp_path: Path) -> None:
    write_bank(tmp_path, list(range(20)), lambda place: "maybe" if place == 12 else "no")
    sentence = refusal(lambda: rows_of(build("bank-marketing").open(tmp_path, "random", 1)))
    assert (
        sentence == f"{tmp_path}/test.csv.gz: column 'deposit', row 3: 'maybe' is no label; the labels are 'no', 'yes'"
    )
    with gzip.open(tmp_path / "test.csv.gz", "wt") as file:
        file.write("age,deposit\n1,no\n")
    assert "missing columns 'balance'" in refusal(lambda: build("bank-marketing").open(tmp_path, "random", 1))


def test_a_file_is_known_by_its_content_and_otherwise_noted(tmp_path: Path) -> None:
    opened = build("bank-marketing").open(write_bank(tmp_path, list(range(20))), "time")
    notes = [note for note in opened.notes if "not the published" in note]
    assert [note.split()[0] for note in notes] == ["train.csv.gz", "test.csv.gz"]
    assert "a718b5efa64bcf017e78f8db838e8a81401be5bee87cb112aa4310f132ef93d9" in notes[0]
    assert str(tmp_path) not in "".join(opened.notes)


def test_a_file_may_be_stored_with_another_compression(tmp_path: Path) -> None:
    write_bank(tmp_path, list(range(20)))
    before = rows_of(build("bank-marketing").open(tmp_path, "time"))
    content = gzip.decompress((tmp_path / "train.csv.gz").read_bytes())
    (tmp_path / "train.csv.gz").unlink()
    with pa.output_stream(tmp_path / "train.csv.zst", compression="zstd") as file:
        file.write(content)
    assert rows_of(build("bank-marketing").open(tmp_path, "time")) == before


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write_bank(tmp_path, list(range(2000))) / "train.csv.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    assert str(path) in refusal(lambda: build("bank-marketing").open(tmp_path, "random", 1))


# Census income


def census_line(number: int, **changed: str) -> str:
    cells = {name: f"{name[:3]} of {number} " for name in census_income.COLUMNS.split()}
    cells |= {name: str(number) for name in census_income.NUMERIC.split()}
    cells |= {"instance_weight": "1700.09", "state_of_previous_residence": "?", "year": "95"}
    cells |= {"income_gt_50k": "50000+." if number % 4 == 0 else "- 50000."}
    return ", ".join((cells | changed).values())


def write_census(folder: Path, train: list[str], test: list[str]) -> Path:
    (folder / "census_income_1994_1995_train.csv").write_text("\n".join(train) + "\n")
    with pa.output_stream(folder / "census_income_1994_1995_test.csv.zst", compression="zstd") as file:
        file.write(("\n".join(test) + "\n").encode())
    return folder


def check_census(folder: Path) -> None:
    write_census(folder, [census_line(n) for n in range(30)], [census_line(n) for n in range(100, 108)])
    opened = build("census-income").open(folder, None, 4)
    assert (len(opened.schema.numeric), len(opened.schema.categorical)) == (7, 33)
    assert opened.schema.missing == ("?",)
    assert "instance_weight" not in opened.schema.columns
    assert {"detailed_industry_recode", "year"} <= set(names_of(opened.schema.categorical))
    found = rows_of(opened)
    assert {split: len(rows) for split, rows in found.items()} == {"train": 27, "valid": 3, "test": 8}
    assert [row["age"] for row in found["test"]] == [str(n) for n in range(100, 108)]
    row = found["test"][0]
    assert (row["income_gt_50k"], found["test"][1]["income_gt_50k"]) == (1, 0)
    assert row["state_of_previous_residence"] == "?"
    assert row["education"] == "edu of 100"


def test_census_deals_both_files_where_asked(tmp_path: Path) -> None:
    write_census(tmp_path, [census_line(n) for n in range(30)], [census_line(n) for n in range(100, 110)])
    assert sizes_of(build("census-income").open(tmp_path, "random", 4)) == {"train": 32, "valid": 4, "test": 4}


def test_census_refuses_a_header_a_ragged_row_and_a_single_file(tmp_path: Path) -> None:
    header, rows = ", ".join(census_income.COLUMNS.split()), [census_line(n) for n in range(10)]
    write_census(tmp_path, [header, *rows], rows)
    sentence = refusal(lambda: build("census-income").open(tmp_path, None, 4))
    assert "census_income_1994_1995_train.csv starts with 'age', ' wage_per_hour', ' capital_gains' where" in sentence
    assert "it has a header, and the format has none; take its first line out" in sentence
    write_census(tmp_path, [*rows, rows[0] + ", 1"], rows)
    assert "in row 11 has 43 cells; the format names 42 columns" in refusal(
        lambda: rows_of(build("census-income").open(tmp_path, None, 4))
    )
    file = tmp_path / "census_income_1994_1995_train.csv"
    assert "is a file, not the folder" in refusal(lambda: build("census-income").open(file, None, 4))


# Diabetes 130


def diabetes_row(number: int, patient: int, discharge: int, label: str) -> dict[str, str]:
    columns = [*diabetes130.NUMERIC.split(), *diabetes130.CATEGORICAL.split()]
    row = {"encounter_id": str(1000 + number), "patient_nbr": str(patient)} | dict.fromkeys(columns, "1")
    return row | {
        "discharge_disposition_id": str(discharge),
        "weight": "?",
        "max_glu_serum": "None",
        "time_in_hospital": str(number),
        "readmitted": label,
    }


def write_diabetes(folder: Path, name: str = "dataset_diabetes.zip") -> Path:
    """120 stays of 40 patients; every tenth stay ends in one of the discharge codes 11 and 13 of death and hospice."""
    labels = ("NO", "<30", ">30", ">30")
    rows = [diabetes_row(n, n % 40, (11, 13)[n // 10 % 2] if n % 10 == 0 else 1, labels[n % 4]) for n in range(120)]
    text = "\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]) + "\n"
    if name.endswith(".csv"):
        (folder / name).write_text(text)
        return folder
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("dataset_diabetes/IDs_mapping.csv", "a,b\n")
        archive.writestr("dataset_diabetes/diabetic_data.csv", text)
    return folder


def check_diabetes_stays(folder: Path) -> None:
    opened = build("diabetes130").open(write_diabetes(folder), None, 6)
    assert (len(opened.schema.numeric), len(opened.schema.categorical)) == (8, 39)
    assert not {"encounter_id", "patient_nbr"} & set(opened.schema.columns)
    assert opened.schema.missing == ("?",)
    rows = [row for split in rows_of(opened).values() for row in split]
    stays = sorted(int(row["time_in_hospital"]) for row in rows)
    assert stays == [n for n in range(120) if n % 10]
    assert all(row["readmitted"] == (int(row["time_in_hospital"]) % 4 == 1) for row in rows)
    assert {row["max_glu_serum"] for row in rows} == {"None"}
    assert "left out: 12 stays that ended in death or in a hospice" in opened.notes
    assert sizes_of(build("diabetes130", keep_deceased=True).open(folder, None, 6)).keys() == {"train", "valid", "test"}
    assert sum(sizes_of(build("diabetes130", keep_deceased=True).open(folder, None, 6)).values()) == 120


def check_diabetes_patients(folder: Path) -> None:
    found = rows_of(build("diabetes130").open(write_diabetes(folder), None, 6))
    patients = {split: {int(row["time_in_hospital"]) % 40 for row in rows} for split, rows in found.items()}
    assert {split: len(held) for split, held in patients.items()} == {"train": 28, "valid": 4, "test": 4}
    assert len(set.union(*patients.values())) == 36


def test_diabetes_may_be_unpacked_or_have_another_name(tmp_path: Path) -> None:
    rows = rows_of(build("diabetes130").open(write_diabetes(tmp_path), None, 6))
    write_diabetes(tmp_path, "other.zip")
    assert rows_of(build("diabetes130").open(tmp_path / "other.zip", None, 6)) == rows
    write_diabetes(tmp_path, "diabetic_data.csv")
    assert rows_of(build("diabetes130").open(tmp_path / "diabetic_data.csv", None, 6)) == rows
    (tmp_path / "dataset_diabetes.zip").unlink()
    assert rows_of(build("diabetes130").open(tmp_path, None, 6)) == rows


def test_diabetes_refuses_a_damaged_or_a_foreign_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sentence() -> str:
        return refusal(lambda: build("diabetes130").open(path, None, 6))

    path = write_diabetes(tmp_path) / "dataset_diabetes.zip"
    intact = path.read_bytes()
    monkeypatch.setattr(diabetes130, "MAX_BYTES", 1000)
    assert "claims that diabetic_data.csv has more than 1,000 bytes; it is not read" in sentence()
    monkeypatch.undo()
    path.write_bytes(intact[:-30])
    assert "is not a readable zip archive, or is damaged" in sentence()
    middle = len(intact) // 2
    path.write_bytes(intact[:middle] + bytes(8) + intact[middle + 8 :])
    assert "is not a readable zip archive, or is damaged" in sentence()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "holds 0 files named diabetic_data.csv; it must hold one" in sentence()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("diabetic_data.csv", "age,readmitted\n1,NO\n")
    assert "missing columns" in sentence()


# Criteo


def criteo_line(number: int) -> str:
    counts = [str(number - 5) if column % 3 else "" for column in range(13)]
    return "\t".join([str(number % 4 == 0).replace("True", "1").replace("False", "0"), *counts, *["68fd1e64"] * 25, ""])


def check_criteo(folder: Path) -> None:
    path = folder / "train.txt"
    path.write_text("\n".join(map(criteo_line, range(40))) + "\n")
    opened = build("criteo").open(path, None, 2)
    assert names_of(opened.schema.numeric) == [f"I{number}" for number in range(1, 14)]
    assert [(c.name, c.min_count) for c in opened.schema.categorical] == [(f"C{n}", 10) for n in range(1, 27)]
    found = rows_of(opened)
    assert {split: len(rows) for split, rows in found.items()} == {"train": 32, "valid": 4, "test": 4}
    rows = sorted((row for split in found.values() for row in split), key=lambda row: int(row["I2"]))
    assert [int(row["I2"]) for row in rows] == [number - 5 for number in range(40)]
    assert {row["I1"] for row in rows} == {row["C26"] for row in rows} == {""}
    assert [row["label"] for row in rows] == [str(int(number % 4 == 0)) for number in range(40)]
    by_time = rows_of(build("criteo", min_count=1).open(folder, "time"))
    assert [int(row["I2"]) for split in ("train", "valid", "test") for row in by_time[split]] == list(range(-5, 35))


def test_criteo_reads_a_folder_of_parts_in_their_order(tmp_path: Path) -> None:
    for part in range(3):
        with gzip.open(tmp_path / f"part_{part}.tsv.gz", "wt") as file:
            file.write("\n".join(criteo_line(number) for number in range(10 * part, 10 * part + 10)))
    (tmp_path / "readme.md").write_text("not a part")
    by_time = rows_of(build("criteo").open(tmp_path, "time"))
    assert [int(row["I2"]) for split in ("train", "valid", "test") for row in by_time[split]] == list(range(-5, 25))
    # the unlabelled test.txt of the challenge lies beside train.txt, and is no part of it
    (tmp_path / "train.txt").write_text(criteo_line(7) + "\n")
    (tmp_path / "test.txt").write_text("no table")
    assert sizes_of(build("criteo").open(tmp_path, "time")) == {"train": 1}


def test_criteo_refuses_a_header_and_a_ragged_row(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("\t".join(criteo.COLUMNS) + "\n" + criteo_line(1) + "\n")
    assert refusal(lambda: build("criteo").open(path, None, 2)) == (
        f"{path} starts with 'label', 'I1', 'I2' where numbers belong: it has a header, and the format has none; "
        "take its first line out"
    )
    path.write_text(criteo_line(1) + "\n" + criteo_line(2)[:-10] + "\n")
    assert f"{path} in row 2 has 38 cells" in refusal(lambda: rows_of(build("criteo").open(path, None, 2)))
    path.write_text(criteo_line(1) + "\n" + criteo_line(2).replace("-3", "x") + "\n")
    opened = build("criteo").open(path, "time")
    assert f"{path}: column 'I2', row 2: 'x' is not a number" in refusal(
        lambda: prepare(opened.schema, opened.parts, tmp_path / "out")
    )
    assert not (tmp_path / "out").exists()


# AutoML3

KINDS = ["Numerical", "Time", "Categorical", "Multi-value", "Numerical"]


def write_automl3(folder: Path, batches: dict[str, tuple[int, int]], kinds: list[str] | None = None) -> Path:
    """Batches by name, with their first and last number; the first cell of a row is its number."""
    (folder / "ada_feat.type").write_text("\n".join(kinds or KINDS) + "\n")
    for name, (start, stop) in batches.items():
        lines = [f"{n} 2018 {1 << 60 | n % 2} 7,{n} {'NaN' if n % 2 else n / 4}" for n in range(start, stop)]
        (folder / f"ada_{name}.data").write_text("\n".join(lines) + "\n")
        (folder / f"ada_{name}.solution").write_text("\n".join(str(int(n % 3 == 0)) for n in range(start, stop)) + "\n")
    return folder


def check_automl3(folder: Path) -> None:
    opened = build("automl3").open(write_automl3(folder, {"test1": (0, 8), "test10": (14, 20), "test2": (8, 14)}))
    assert (names_of(opened.schema.numeric), names_of(opened.schema.categorical)) == (["f0", "f4"], ["f2"])
    found = rows_of(opened)
    assert {split: [int(row["f0"]) for row in rows] for split, rows in found.items()} == {
        "train": list(range(12)),
        "valid": list(range(12, 16)),
        "test": list(range(16, 20)),
    }
    rows = [row for split in found.values() for row in split]
    assert [row["label"] for row in rows] == [int(n % 3 == 0) for n in range(20)]
    # a category is its text, so that it is the same one in every batch
    assert [row["f2"] for row in rows] == [str(1 << 60 | n % 2) for n in range(20)]
    assert opened.schema.missing == ("NaN",)
    assert [row["f4"] for row in rows[:3]] == ["0.0", "NaN", "0.5"]
    assert "left out, as in the paper: columns of the kind Time (f1) and Multi-value (f3)" in opened.notes
    batches = "ada_test1.data, ada_test2.data, ada_test10.data"
    assert f"no labelled training batch is here; read instead, in their order: {batches}" in opened.notes


def test_automl3_reads_training_batches_where_they_are_labelled(tmp_path: Path) -> None:
    write_automl3(tmp_path, {"train1": (0, 6), "train2": (6, 10), "test1": (90, 99)})
    opened = build("automl3", min_count=3).open(tmp_path, "random", 1)
    found = rows_of(opened)
    assert {split: len(rows) for split, rows in found.items()} == {"train": 8, "valid": 1, "test": 1}
    assert {int(row["f0"]) for rows in found.values() for row in rows} == set(range(10))
    assert [column.min_count for column in opened.schema.categorical] == [3]
    assert "left out: 1 test batches, as the training batches have labels" in opened.notes
    assert any("a random split is easier than time" in note for note in opened.notes)
    for number in (1, 2):
        (tmp_path / f"ada_train{number}.solution").unlink()
    assert {int(row["f0"]) for rows in rows_of(build("automl3").open(tmp_path)).values() for row in rows} == set(
        range(90, 99)
    )


def test_automl3_refuses_what_does_not_fit_together(tmp_path: Path) -> None:
    def sentence() -> str:
        return refusal(lambda: rows_of(build("automl3").open(tmp_path)))

    write_automl3(tmp_path, {"test1": (0, 8)})
    solution = tmp_path / "ada_test1.solution"
    labels = solution.read_text()
    solution.write_text(labels + "1\n")
    assert "ada_test1.data has 8 rows, its .solution has 9 labels; both must agree" in sentence()
    solution.write_text(labels[:-4])
    assert "ada_test1.data has more rows, its .solution has 6 labels; both must agree" in sentence()
    solution.write_text(labels.replace("1", "2", 1))
    assert "ada_test1.solution, in row 1: the label '2' is neither 0 nor 1" in sentence()
    solution.unlink()
    assert "needs ada_train1.data with ada_train1.solution" in sentence()
    write_automl3(tmp_path, {"test1": (0, 8)}, ["Numerical", "Ordinal"])
    assert "ada_feat.type: unknown kind of column 'Ordinal'" in sentence()
    write_automl3(tmp_path, {"test1": (0, 8)}, KINDS[:-1])
    assert "in row 1 has 5 cells; the format names 4 columns" in sentence()
    write_automl3(tmp_path, {"test1": (0, 8)})
    data = tmp_path / "ada_test1.data"
    data.write_text("price time code tags stock\n" + data.read_text())
    assert "starts with 'price', 'stock' where numbers belong" in sentence()
    (tmp_path / "bob_feat.type").write_text("Numerical\n")
    assert "holds more than one data set (ada_feat.type, bob_feat.type)" in sentence()


# The checks above, and what each must reject

FORMAT_CHECKS: list[Check] = [
    check_bank_columns,
    check_bank_time,
    check_census,
    check_diabetes_stays,
    check_diabetes_patients,
    check_criteo,
    check_automl3,
]


@pytest.mark.parametrize("check", FORMAT_CHECKS, ids=lambda check: check.__name__)
def test_a_format_is_read_as_it_should_be(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


def with_column(module: ModuleType, name: str) -> Any:
    return replace(module.SCHEMA, numeric=(*module.SCHEMA.numeric, NumericColumn(name)))


def meaning(**changed: int) -> Callable[..., Table]:
    """`relabelled` with other meanings of some labels."""
    return lambda table, label, meanings: relabelled(table, label, meanings | changed)


def left_trimmed(table: Table) -> Table:
    """`trimmed` on the left alone."""

    def change(batch: pa.RecordBatch, done: int) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(list(map(pc.utf8_ltrim_whitespace, batch.columns)), batch.schema.names)

    return replace(table, files=tuple(ChangedFile(file, change) for file in table.files))


def by_name(place: Path, name: str, kind: str) -> list[Path]:
    return sorted(place.glob(f"{name}_{kind}*.data"))


def gaps_filled(path: Path, delimiter: str, columns: Any) -> Table:
    """A reader to which an empty cell is a zero."""

    def fill(batch: pa.RecordBatch, done: int) -> pa.RecordBatch:
        cells = [pc.if_else(pc.equal(column, ""), "0", column) for column in batch.columns]
        return pa.RecordBatch.from_arrays(cells, batch.schema.names)

    table = open_text(path, delimiter, columns=columns)
    return replace(table, files=tuple(ChangedFile(file, fill) for file in table.files))


FLAWS: list[tuple[str, Check, ModuleType, str, Any]] = [
    ("duration kept", check_bank_columns, bank_marketing, "SCHEMA", with_column(bank_marketing, "duration")),
    ("labels swapped", check_bank_columns, bank_marketing, "relabelled", meaning(no=1, yes=0)),
    ("order of the files", check_bank_time, bank_marketing, "_places", lambda table: np.arange(table.count_rows())),
    ("spaces kept", check_census, census_income, "trimmed", left_trimmed),
    ("weight kept", check_census, census_income, "SCHEMA", with_column(census_income, "instance_weight")),
    ("too many valid", check_census, census_income, "VALID_SHARE", 0.2),
    ("hospice kept", check_diabetes_stays, diabetes130, "DECEASED", ("11",)),
    ("any return counts", check_diabetes_stays, diabetes130, "relabelled", meaning(**{">30": 1})),
    ("rows, not patients", check_diabetes_patients, diabetes130, "PATIENT", "encounter_id"),
    ("empty is zero", check_criteo, criteo, "open_text", gaps_filled),
    ("newest first", check_criteo, criteo, "deal_in_order", lambda rows: deal_in_order(rows)[::-1]),
    ("batch 10 before 2", check_automl3, automl3, "_numbered", by_name),
    ("time is a number", check_automl3, automl3, "_kinds", lambda path: ["Numerical", *KINDS[:1], *KINDS[2:]]),
]


@pytest.mark.parametrize(("check", "module", "name", "flaw"), [f[1:] for f in FLAWS], ids=[f[0] for f in FLAWS])
def test_a_flaw_in_a_source_is_rejected(
    check: Check, module: ModuleType, name: str, flaw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, flaw)
    with pytest.raises(AssertionError):
        check(tmp_path)


# The controlled process of the paper, Appendix A


def logit_of_the_paper(x: list[float], c: list[int], mechanism: str) -> float:
    """The equations of Appendix A, term by term, on one row."""
    x0, x1, x2, c0, c1 = *x, *c
    q = 0.65 * math.sin(math.pi * x0) + 0.35 * x1 - 0.25 * x2
    q += 0.18 * (c0 - 1.5) - 0.12 * (c1 - 1.0)
    if mechanism == "add":
        r = 1.10 * math.sin(1.35 * math.pi * x0)
    elif mechanism == "cat":
        inner = x0 + 0.16 * (c0 - 1.5) - 0.11 * (c1 - 1)
        r = (0.85 + 0.22 * c0 + 0.14 * c1) * math.sin(math.pi * inner)
    elif mechanism == "num":
        r = 1.25 * math.sin(math.pi * (x0 + 0.58 * x1)) + 1.05 * x0 * x2
    else:
        inner = x0 + 0.13 * (c0 - 1.5) - 0.09 * (c1 - 1) + 0.45 * x1
        r = (0.72 + 0.17 * c0 + 0.11 * c1 + 0.28 * math.tanh(2 * x2)) * math.sin(math.pi * inner) + 0.85 * x0 * x2
    return q + r - 0.18


Logits = Callable[[np.ndarray, np.ndarray, str], np.ndarray]
Draws = Callable[[str, str, int, int], controlled.Draw]
DRAWN = 1_000_000


def check_controlled_logits(logits: Logits) -> None:
    rng = np.random.default_rng(8)
    x, c = rng.uniform(-1, 1, (500, 3)), np.stack([rng.integers(0, 4, 500), rng.integers(0, 3, 500)], 1)
    for mechanism in ("add", "cat", "num", "mix"):
        wanted = [logit_of_the_paper(*row, mechanism) for row in zip(x.tolist(), c.tolist(), strict=True)]
        np.testing.assert_allclose(logits(x, c, mechanism), wanted, rtol=0, atol=1e-12)


def check_controlled_context(draw: Draws) -> None:
    """Prevalences, correlations and label rates of a million rows, within five standard errors."""
    shares = [np.array([0.52, 0.27, 0.15, 0.06]), np.array([0.62, 0.28, 0.10])]
    for split, direction in (("train", 1), ("shifted", -1)):
        drawn = draw(split, "mix", 3, DRAWN)
        for column, share in enumerate(shares):
            wanted = share[::direction]
            found = np.bincount(drawn.categories[:, column], minlength=len(share)) / DRAWN
            assert (np.abs(found - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / DRAWN)).all()
        x0, x1, x2 = drawn.numbers.T
        c0, c1 = drawn.categories.T
        assert abs(x0.mean()) < 5 / math.sqrt(3 * DRAWN)
        assert abs(x0.var() - 1 / 3) < 5 * math.sqrt((1 / 5 - 1 / 9) / DRAWN)
        # given its category a number is uniform, but for what is clipped
        for value, category, width, step, middle in ((x1, c0, 0.78, 0.16, 1.5), (x2, c1, 0.82, 0.14, 1.0)):
            for level in range(category.max() + 1):
                centre = direction * step * (level - middle)
                low, high = max(-1.0, centre - width), min(1.0, centre + width)
                some = value[category == level]
                assert low <= some.min() < low + 1e-3
                assert high - 1e-3 < some.max() <= high
                inside = (low - centre + width) / (2 * width) * low + (centre + width - high) / (2 * width) * high
                mean = inside + (high**2 - low**2) / (4 * width)
                assert abs(some.mean() - mean) < 5 * some.std() / math.sqrt(len(some))
        assert np.sign(np.corrcoef(x1, c0)[0, 1]) == np.sign(np.corrcoef(x2, c1)[0, 1]) == direction
        rates = 1 / (1 + np.exp(-drawn.logits))
        assert abs(drawn.labels.mean() - rates.mean()) < 5 * math.sqrt((rates * (1 - rates)).mean() / DRAWN)
        # labels follow their own logit, not just the mean
        score = (drawn.labels - rates) * drawn.logits
        assert abs(score.mean()) < 5 * score.std() / math.sqrt(DRAWN)


def test_the_controlled_logit_is_that_of_the_paper() -> None:
    check_controlled_logits(controlled.true_logits)


LOGIT_FLAWS: dict[str, Logits] = {
    "no constant": lambda x, c, m: controlled.true_logits(x, c, m) + 0.18,
    "no x2 in the tanh": lambda x, c, m: controlled.true_logits(x, c, m) - 1e-6 * np.tanh(2 * x[:, 2]),
    "categories from 1": lambda x, c, m: controlled.true_logits(x, c + 1, m),
    "mix is num": lambda x, c, m: controlled.true_logits(x, c, "num" if m == "mix" else m),
    "x1 and x2 swapped": lambda x, c, m: controlled.true_logits(x[:, [0, 2, 1]], c, m),
}


@pytest.mark.parametrize("flaw", LOGIT_FLAWS.values(), ids=LOGIT_FLAWS)
def test_another_controlled_logit_is_rejected(flaw: Logits) -> None:
    with pytest.raises(AssertionError):
        check_controlled_logits(flaw)


def test_the_controlled_context_is_that_of_the_paper() -> None:
    check_controlled_context(controlled.draw)


def relabelled_draw(split: str, mechanism: str, seed: int, rows: int) -> controlled.Draw:
    drawn = controlled.draw(split, mechanism, seed, rows)
    return drawn._replace(labels=np.random.default_rng(seed).permutation(drawn.labels))


def unclipped_draw(split: str, mechanism: str, seed: int, rows: int) -> controlled.Draw:
    drawn = controlled.draw(split, mechanism, seed, rows)
    numbers = drawn.numbers.copy()
    numbers[numbers == 1.0] = 1.01
    return drawn._replace(numbers=numbers)


CONTEXT_FLAWS: dict[str, Draws] = {
    "shifted is not": lambda split, mechanism, seed, rows: controlled.draw("test", mechanism, seed, rows),
    "labels shuffled": relabelled_draw,
    "not clipped": unclipped_draw,
}


@pytest.mark.parametrize("flaw", CONTEXT_FLAWS.values(), ids=CONTEXT_FLAWS)
def test_another_controlled_context_is_rejected(flaw: Draws) -> None:
    with pytest.raises(AssertionError):
        check_controlled_context(flaw)


def test_controlled_draws_are_shared_between_mechanisms_and_not_between_splits() -> None:
    draws = {mechanism: controlled.draw("train", mechanism, 1) for mechanism in ("add", "cat", "num", "mix")}
    for drawn in draws.values():
        assert (drawn.numbers == draws["add"].numbers).all()
        assert (drawn.categories == draws["add"].categories).all()
    assert (draws["add"].logits != draws["mix"].logits).any()
    numbers = [controlled.draw(split, "add", seed).numbers[0, 0] for split in controlled.SPLIT_ROWS for seed in (1, 2)]
    assert len(set(numbers)) == 8


def test_controlled_is_prepared_with_a_shifted_split(tmp_path: Path) -> None:
    opened = build("controlled", mechanism="cat").open(seed=5)
    table = prepare(opened.schema, opened.parts, tmp_path / "out", opened.origin)
    assert {name: split["rows"] for name, split in table.splits.items()} == {
        "train": 20_000,
        "valid": 5_000,
        "test": 10_000,
        "shifted": 10_000,
    }
    assert table.manifest["origin"] == {
        "source": "controlled",
        "options": {"mechanism": "cat"},
        "split": "official",
        "seed": 5,
        "notes": [],
    }
    drawn = controlled.draw("shifted", "cat", 5)
    values = table.split("shifted").batch(slice(0, 10_000)).values.numpy()
    assert sorted(map(tuple, values.tolist())) == sorted(map(tuple, drawn.numbers.tolist()))
    file = opened.parts[3].table
    logits = np.concatenate([batch.column("true_logit").to_numpy() for batch in file.batches(["true_logit"])])
    assert (logits == drawn.logits).all()


# The log in the shape of Criteo's

MASK = (1 << 64) - 1
SMALL = 0.004


def effect_of(rank: int, purpose: int) -> float:
    """The effect of a category in Python's whole numbers: SplitMix64's finaliser on the rank and the purpose."""
    if rank == 0:
        return 0.0
    bits = (rank + (purpose << 40) + 0x9E3779B97F4A7C15) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    bits ^= bits >> 31
    return ((bits >> 11) / 2**53 - 0.5) * math.sqrt(12)


def code_of(rank: int, column: int) -> str:
    bits = ((rank ^ (column << 27)) * 0x9E3779B1) % (1 << 32)
    return f"{((bits ^ (bits >> 16)) * 0x85EBCA6B) % (1 << 32):08x}"


def logit_of_a_click(row: dict[str, Any], ranks: list[dict[str | None, int]]) -> float:
    """The planted response, term by term, on one row as it is written."""
    rank = {f"C{j + 1}": ranks[j][row[f"C{j + 1}"]] for j in range(26)}
    place = {
        column.name: 0.0
        if row[column.name] is None
        else (math.log(row[column.name] - column.low + 0.5) - column.centre) / column.spread
        for column in click_log.COUNTS
    }
    logit = -1.55
    logit += sum(0.15 * (-1) ** k * math.tanh(place[f"I{k + 1}"]) for k in range(13))
    logit += sum(0.2 * effect_of(rank[f"C{j + 1}"], j) for j in range(26))
    for count, category, strength in (
        ("I7", 17, 0.7),
        ("I13", 14, 0.5),
        ("I2", 9, 0.5),
        ("I6", 2, 0.4),
        ("I5", 15, 0.4),
    ):
        leaning = effect_of(rank[f"C{category}"], 26 + category - 1)
        logit += strength * ((leaning > 0) - (leaning < 0)) * math.sin(1.5 * place[count])
    logit += 0.5 * math.sin(1.5 * place["I7"]) * math.tanh(place["I11"])
    logit += 0.4 * math.sin(1.5 * place["I4"]) * math.tanh(place["I8"])
    return logit


def check_log_logits(log: click_log.CriteoShaped) -> None:
    ranks = [{None: 0} | {code_of(k, j): k for k in range(1, size + 1)} for j, size in enumerate(log.vocabularies)]
    rows = log.chunk(2).slice(0, 300).to_pylist()
    wanted = [logit_of_a_click(row, ranks) for row in rows]
    np.testing.assert_allclose([row["true_logit"] for row in rows], wanted, rtol=0, atol=1e-12)


def check_log_labels(log: click_log.CriteoShaped) -> None:
    table = pa.Table.from_batches(list(log.batches(click_log.SHAPE, 1 << 16)))
    labels, logits = table["label"].to_numpy(), table["true_logit"].to_numpy()
    rates = 1 / (1 + np.exp(-logits))
    score = (labels - rates) * logits
    assert abs((labels - rates).mean()) < 5 * math.sqrt((rates * (1 - rates)).mean() / log.rows)
    assert abs(score.mean()) < 5 * score.std() / math.sqrt(log.rows)


def check_log_chunks(log: click_log.CriteoShaped) -> None:
    """Any chunk can be drawn alone, and none is like another."""
    whole = pa.Table.from_batches(list(log.batches(click_log.SHAPE, 1 << 16)))
    assert whole.num_rows == log.rows == log.count_rows()
    start = click_log.CHUNK_ROWS
    alone = replace(log, rows=10).chunk(1)
    assert pa.Table.from_batches([alone]).equals(whole.slice(start, start).combine_chunks())
    assert not log.chunk(0).equals(log.chunk(1))
    assert not log.chunk(0).equals(replace(log, seed=log.seed + 1).chunk(0))


LOG_CHECKS = [check_log_logits, check_log_labels, check_log_chunks]
LOG = click_log.CriteoShaped(rows=150_000, seed=9, vocabulary_scale=SMALL)


class Deaf(click_log.CriteoShaped):
    """Gives every chunk the rows of the first."""

    def chunk(self, number: int) -> pa.RecordBatch:
        return super().chunk(0)


class Swayed(click_log.CriteoShaped):
    """Clicks more than its logit says."""

    def chunk(self, number: int) -> pa.RecordBatch:
        batch = super().chunk(number)
        clicked = np.random.default_rng(number).random(batch.num_rows) < 0.01
        labels = np.maximum(batch.column("label").to_numpy(), clicked).astype(np.uint8)
        return batch.set_column(0, "label", pa.array(labels))


class Additive(click_log.CriteoShaped):
    """States a logit without one of the responses that turn."""

    def chunk(self, number: int) -> pa.RecordBatch:
        batch = super().chunk(number)
        place = np.nan_to_num(click_log.COUNTS[3].place(batch.column("I4").to_numpy(zero_copy_only=False)))
        logits = batch.column("true_logit").to_numpy() - 0.01 * np.sin(1.5 * place)
        return batch.set_column(batch.num_columns - 1, "true_logit", pa.array(logits))


@pytest.mark.parametrize("check", LOG_CHECKS, ids=lambda check: check.__name__)
def test_the_made_log_is_what_it_says(check: Callable[[click_log.CriteoShaped], None]) -> None:
    check(LOG)


@pytest.mark.parametrize(
    ("check", "flaw"), [(check_log_logits, Additive), (check_log_labels, Swayed), (check_log_chunks, Deaf)]
)
def test_a_flaw_in_the_made_log_is_rejected(
    check: Callable[[click_log.CriteoShaped], None], flaw: type[click_log.CriteoShaped]
) -> None:
    with pytest.raises(AssertionError):
        check(flaw(LOG.rows, LOG.seed, LOG.vocabulary_scale))


def test_the_made_log_has_the_shape_of_criteo() -> None:
    log = click_log.CriteoShaped(rows=200_000, seed=4)
    assert click_log.SHAPE[:-1] == criteo.COLUMNS
    assert log.vocabularies == click_log.VOCABULARIES
    assert max(replace(log, vocabulary_scale=200.0).vocabularies) > 30_000_000
    table = pa.Table.from_batches(list(log.batches(click_log.SHAPE, 1 << 16)))
    assert 0.24 < table["label"].to_numpy().mean() < 0.27
    for column in click_log.COUNTS:
        values = table[column.name].to_numpy()
        gaps = np.isnan(values.astype(float)).mean()
        assert abs(gaps - column.absent) < 5 * math.sqrt(max(column.absent, 1e-9) / log.rows)
        assert np.nanmin(values) == column.low
        assert np.nanmax(values) <= column.high
    spend = table["I5"].to_numpy()
    assert np.nanmax(spend) > 200 * np.nanmedian(spend)
    assert table["I2"].to_numpy().min() == -3
    ranks = click_log._ranks(1_000_000, np.random.default_rng(1))
    for rank in (1, 2, 3, 10):
        share = math.log(1 + 1 / rank) / math.log(1_000_001)
        assert abs((ranks == rank).mean() - share) < 5 * math.sqrt(share / len(ranks))
    assert ranks.max() <= 1_000_000


def test_codes_are_one_to_one() -> None:
    ranks = np.arange(1, 200_001, dtype=np.uint64)
    codes = click_log._codes(ranks, 3).to_pylist()
    assert len(set(codes)) == len(codes)
    assert codes[:20] == [code_of(rank, 3) for rank in range(1, 21)]
    assert click_log._codes(np.array([0, 5], np.uint64), 0).to_pylist() == [None, code_of(5, 0)]


def test_the_best_auc_of_the_made_log_is_that_of_its_logit() -> None:
    table = pa.Table.from_batches(list(click_log.CriteoShaped(200_000, 1).batches(click_log.SHAPE, 1 << 16)))
    labels, logits = table["label"].to_numpy(), table["true_logit"].to_numpy()
    best = metrics.evaluate(labels, logits)["auc"]
    assert 0.78 < best < 0.80
    noise = np.random.default_rng(0).normal(0.0, 0.3, len(logits))
    assert metrics.evaluate(labels, logits + noise)["auc"] < best


def test_the_made_log_as_criteo_tsv_reads_the_same(tmp_path: Path) -> None:
    click_log.write_criteo_tsv(tmp_path / "train.txt", 3000, 2, SMALL)
    (lines,) = [(tmp_path / "train.txt").read_text().splitlines()]
    assert len(lines) == 3000
    assert {line.count("\t") for line in lines} == {39}
    made = build("click-log", rows=3000, vocabulary_scale=SMALL).open(seed=2)
    read = build("criteo").open(tmp_path, "random", 2)
    assert made.schema == read.schema
    one, other = (
        prepare(opened.schema, opened.parts, tmp_path / name) for opened, name in ((made, "made"), (read, "read"))
    )
    assert one.digest == other.digest


# The command line


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["prepare", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_source_is_prepared_with_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_diabetes(tmp_path)
    option = "source.keep_deceased=true"
    place = ("--source", "diabetes130", "--from", tmp_path, "--seed", "6")
    code, out, err = run(capsys, *place, "--option", option, "--out", tmp_path / "out", "--json")
    assert code == 0
    said = json.loads(out)
    assert sum(said["rows"].values()) == 120
    assert [f"scalarlens: {note}" for note in said["notes"]] == err.splitlines()
    table = PreparedTable(tmp_path / "out")
    assert table.digest == said["digest"]
    origin = table.manifest["origin"]
    assert (origin["source"], origin["split"], origin["seed"]) == ("diabetes130", "random", 6)
    assert origin["options"] == {"keep_deceased": True}
    assert any("dataset_diabetes.zip is not the published" in note for note in origin["notes"])
    for file in (tmp_path / "out").rglob("*"):
        assert not file.is_file() or str(tmp_path).encode() not in file.read_bytes()
    run(capsys, *place, "--option", option, "--out", tmp_path / "again")
    for file in (tmp_path / "out").rglob("*"):
        assert (
            not file.is_file()
            or file.read_bytes() == (tmp_path / "again" / file.relative_to(tmp_path / "out")).read_bytes()
        )


def test_a_made_log_is_prepared_with_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = ("--source", "click-log", "--seed", "1", "--out", tmp_path / "out")
    code, out, err = run(capsys, *made, "--rows", "1000", "--option", "source.vocabulary_scale=0.01")
    assert (code, out, err) == (0, f"{tmp_path}/out: train 800 rows, valid 100 rows, test 100 rows\n", "")
    code, _, err = run(capsys, *made, "--rows", "1000", "--option", "source.rows=7")
    assert (code, "say the same" in err) == (2, True)
    code, _, err = run(capsys, *made, "--rows", "1000", "--from", tmp_path)
    assert (code, "--from changes nothing" in err) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--source", "criteo", "--schema", "s.toml"], "brings its own schema and files; leave out --schema"),
        (["--source", "criteo", "--train", "a.csv", "--valid", "b.csv"], "leave out --train, --valid"),
        (["--from", "data", "--schema", "s.toml", "--train", "a.csv"], "--from belongs to a source; add --source NAME"),
        (["--rows", "5", "--schema", "s.toml", "--train", "a.csv"], "--rows belongs to a source"),
        (["--option", "source.a=1", "--schema", "s.toml", "--train", "a.csv"], "--option belongs to a source"),
        (["--schema", "s.toml", "--train", "a.csv", "--split", "time"], "--split time belongs to a source"),
        (["--schema", "s.toml"], "nothing to prepare: give --source NAME --from PATH, or --schema FILE --train FILE"),
        (["--train", "a.csv"], "a.csv needs a schema: give --schema FILE"),
        (["--source", "criteo"], "the random split of criteo needs --seed N"),
        (["--source", "criteo", "--seed", "1"], "criteo needs --from FILE_OR_FOLDER, with train.txt"),
        (["--source", "criteo", "--split", "official", "--seed", "1"], "unknown split of criteo 'official'"),
        (["--source", "criteo", "--rows", "7"], "unknown option of source 'criteo' 'rows'"),
        (["--source", "criteo", "--option", "encoder.rank=8"], "unknown part in --option 'encoder'"),
    ],
)
def test_the_two_forms_exclude_each_other(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *arguments, "--out", tmp_path / "out")
    assert code == 2
    assert sentence in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_seed_that_nothing_needs_is_taken_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bank(tmp_path, list(range(40)))
    place = ("--source", "bank-marketing", "--from", tmp_path, "--split", "time")
    code, _, err = run(capsys, *place, "--seed", "5", "--out", tmp_path / "one")
    assert (code, "the time split of bank-marketing draws nothing, so that --seed changes nothing" in err) == (0, True)
    assert run(capsys, *place, "--out", tmp_path / "two")[0] == 0
    assert (tmp_path / "one" / "manifest.json").read_bytes() == (tmp_path / "two" / "manifest.json").read_bytes()


def test_a_folder_of_one_s_own_may_hold_its_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.csv").write_text("price,clicked\n" + "".join(f"{n},{n % 2}\n" for n in range(20)))
    (folder / "schema.toml").write_text('label = "clicked"\n[numeric]\nprice = {}\n')
    code, out, _ = run(capsys, "--train", folder, "--split", "random", "--seed", "1", "--out", tmp_path / "out")
    assert (code, "train 16 rows, valid 2 rows, test 2 rows" in out) == (0, True)
    assert PreparedTable(tmp_path / "out").manifest["origin"] == {"split": "random", "seed": 1, "notes": []}


def test_list_datasets_says_what_each_expects(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "datasets", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(found) == NAMES
    for name, entry in found.items():
        assert {"files", "licence", "obtain", "splits", "default_split", "paper_split", "options"} <= set(entry)
        assert [split["name"] for split in entry["splits"]] == [rule.name for rule in sources.get(name).splits]
    assert found["census-income"]["default_split"] == "official"
    assert found["criteo"]["paper_split"] == "random"
    assert found["diabetes130"]["options"] == {"keep_deceased": False}
    assert main(["list", "datasets"]) == 0
    text = capsys.readouterr().out
    for entry in found.values():
        assert entry["licence"] in text
        for file in entry["files"]:
            assert file["name"] in text
            assert (file["sha256"] or "") in text


def test_held_out_rows_do_not_reach_training(tmp_path: Path) -> None:
    def prepared(test: list[str], name: str) -> PreparedTable:
        write_census(tmp_path, [census_line(n) for n in range(30)], test)
        opened = build("census-income").open(tmp_path, None, 4)
        return prepare(opened.schema, opened.parts, tmp_path / name)

    one = prepared([census_line(n) for n in range(100, 108)], "one")
    other = prepared([census_line(n, education="unheard of") for n in range(500, 509)], "other")
    assert one.training_digest == other.training_digest
    assert one.splits["test"] != other.splits["test"]


# The real files, where they are


def measured(opened: Opened) -> dict[str, tuple[int, int]]:
    """Rows and positives of each split, read from the label alone."""
    found: dict[str, tuple[int, int]] = {}
    for part in opened.parts:
        done = 0
        for batch in part.table.batches([opened.schema.label]):
            cells = np.array(batch.column(opened.schema.label).to_pylist())
            for split, mask in part.members(done, done + len(cells)):
                rows, positives = found.get(split, (0, 0))
                found[split] = rows + int(mask.sum()), positives + int(cells[mask].astype(int).sum())
            done += len(cells)
    return found


def rows_and_rate(found: dict[str, tuple[int, int]], *splits: str) -> tuple[int, float]:
    rows, positives = (sum(found[split][i] for split in splits or found) for i in (0, 1))
    return rows, positives / rows


def test_real_bank_marketing(real_data: Path) -> None:
    opened = build("bank-marketing").open(real_data / "bank_marketing", None, 2026)
    assert not any("not the published" in note for note in opened.notes)
    found = measured(opened)
    assert {split: rows for split, (rows, _) in found.items()} == {"train": 36_169, "valid": 4_521, "test": 4_521}
    assert rows_and_rate(found) == (45_211, pytest.approx(0.1170, abs=5e-5))
    by_time = measured(build("bank-marketing").open(real_data / "bank_marketing", "time"))
    assert by_time["test"][0] == 4_521
    assert rows_and_rate(by_time, "train")[1] < 0.08
    assert rows_and_rate(by_time, "test")[1] == pytest.approx(0.47, abs=0.005)


def test_real_census_income(real_data: Path) -> None:
    opened = build("census-income").open(real_data / "census_income_kdd", None, 2026)
    assert not any("not the published" in note for note in opened.notes)
    found = measured(opened)
    assert found["valid"][0] == 19_952
    assert rows_and_rate(found, "train", "valid") == (199_523, pytest.approx(0.06206, abs=5e-6))
    assert rows_and_rate(found, "test") == (99_762, pytest.approx(0.06201, abs=5e-6))


def test_real_diabetes130(real_data: Path) -> None:
    opened = build("diabetes130").open(real_data / "diabetes130", None, 2026)
    assert not any("not the published" in note for note in opened.notes)
    assert "left out: 2,423 stays that ended in death or in a hospice" in opened.notes
    assert rows_and_rate(measured(opened))[0] == 99_343
    every = build("diabetes130", keep_deceased=True).open(real_data / "diabetes130", None, 2026)
    assert rows_and_rate(measured(every)) == (101_766, pytest.approx(0.1116, abs=5e-5))


def test_real_automl3(real_data: Path) -> None:
    opened = build("automl3").open(real_data / "automl3_rl")
    assert not any("not the published" in note for note in opened.notes)
    assert any("no labelled training batch is here" in note for note in opened.notes)
    assert (len(opened.schema.numeric), len(opened.schema.categorical)) == (8, 14)
    found = measured(opened)
    assert rows_and_rate(found) == (24_803, pytest.approx(0.8669, abs=5e-5))
    # both labels in every split: the last tenth alone has only positives
    assert all(0 < positives < rows for rows, positives in found.values())
    assert found["test"][0] == 4_961


def test_a_changed_real_file_is_noted(real_data: Path, tmp_path: Path) -> None:
    for path in (real_data / "bank_marketing").iterdir():
        content = gzip.decompress(path.read_bytes())
        with gzip.open(tmp_path / path.name, "wb", compresslevel=1) as file:
            file.write(content if path.name.startswith("test") else content.replace(b"retired", b"tired"))
    notes = [note for note in build("bank-marketing").open(tmp_path, "time").notes if "not the published" in note]
    assert [note.split()[0] for note in notes] == ["train.csv.gz"]
