"""Cells to numbers, texts and labels; the oracles are Python's own `float`, `str` and exact integers."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalarlens.errors import DataError
from scalarlens.table.cells import BadCell, from_objects, labels, not_numbers, numbers, plain, texts

few_examples = settings(max_examples=60, deadline=None, derandomize=True, database=None)
#: integers around the limits of float32 and float64
IDS = [sign * (2**power + step) for power in (24, 53) for step in (-1, 0, 1) for sign in (1, -1)]
TEXT_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


def same(found: np.ndarray, wanted: list[float]) -> bool:
    """Equal bit for bit, every NaN alike."""
    return np.asarray(found, np.float64).tobytes() == np.array(wanted, np.float64).tobytes()


# numbers


@few_examples
@given(st.lists(st.floats(allow_nan=False)))
def test_a_float_survives_as_a_number_and_as_text(values: list[float]) -> None:
    assert same(numbers(pa.array(values, pa.float64()), "x"), values)
    assert same(numbers(pa.array([repr(value) for value in values], pa.string()), "x"), values)


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_text_is_trimmed_and_read_in_every_string_type(kind: pa.DataType) -> None:
    cells = pa.array([" 1.5", "2 ", "", "  ", None, "-3e2", "\tnan", ".5"], pa.string()).cast(kind)
    assert same(numbers(cells, "x"), [1.5, 2.0, math.nan, math.nan, math.nan, -300.0, math.nan, 0.5])


@pytest.mark.parametrize(
    "cells",
    [
        pa.array([1, 0, None], pa.int8()),
        pa.array([1, 0, None], pa.uint64()),
        pa.array([1.0, 0.0, math.nan], pa.float32()),
        pa.array([True, False, None]),
        pa.array([Decimal("1.00"), Decimal("0"), None], pa.decimal128(12, 2)),
        pa.array([1, 0, None]).dictionary_encode(),
        pa.chunked_array([[1], [0, None]]),
    ],
    ids=lambda cells: str(cells.type),
)
def test_every_type_of_number_reads_alike(cells: pa.Array) -> None:
    assert same(numbers(cells, "x"), [1.0, 0.0, math.nan])


PRICES = [Decimal(cents) / 100 for cents in range(10_000_007, 900_000_000, 8_900_003)]


def check_decimals(read: Callable[[pa.Array], np.ndarray]) -> None:
    """A price is the same float whether it comes as a decimal, as text or as a float."""
    assert same(read(pa.array(PRICES, pa.decimal128(18, 2))), [float(price) for price in PRICES])
    assert same(read(pa.array([str(price) for price in PRICES])), [float(price) for price in PRICES])


def test_a_decimal_is_the_nearest_float() -> None:
    check_decimals(lambda cells: numbers(cells, "price"))


def test_a_decimal_that_is_a_float_beside_it_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_decimals(lambda cells: cells.cast(pa.float64()).to_numpy())


def test_infinite_values_pass() -> None:
    assert same(numbers(pa.array(["inf", "-Infinity", "1e400"]), "x"), [math.inf, -math.inf, math.inf])
    assert same(numbers(pa.array([math.inf, 1e30]), "x"), [math.inf, 1e30])


def test_missing_markers_are_texts_or_numbers() -> None:
    assert same(numbers(pa.array(["?", "-1", "5"]), "x", ["?", -1]), [math.nan, math.nan, 5.0])
    assert same(numbers(pa.array([-1, 5]), "x", ["?", -1]), [math.nan, 5.0])
    assert same(numbers(pa.array(["-1.0", "5"]), "x", ["-1"]), [-1.0, 5.0])


def test_all_missing_columns_have_no_number() -> None:
    for cells in (pa.nulls(2), pa.array(["", None]), pa.array([None, None], pa.float64())):
        assert same(numbers(cells, "x"), [math.nan, math.nan])


def check_bad_cell(read: Callable[[pa.Array], Any]) -> None:
    cells = pa.array(["1", "", "many", "2", "12a", "many"])
    with pytest.raises(BadCell) as caught:
        read(cells)
    assert (caught.value.column, caught.value.row, caught.value.count) == ("price", 2, 3)
    assert "'many' is not a number" in caught.value.problem


def test_a_bad_cell_has_its_row_and_its_number() -> None:
    check_bad_cell(lambda cells: numbers(cells, "price"))


def test_a_bad_cell_that_counts_wrongly_is_caught() -> None:
    def skips_empty_cells(cells: pa.Array) -> Any:
        return numbers(pa.array([cell for cell in cells.to_pylist() if cell]), "price")

    def counts_each_text_once(cells: pa.Array) -> Any:
        return numbers(pa.array(list(dict.fromkeys(cells.to_pylist()))), "price")

    for wrong in (skips_empty_cells, counts_each_text_once):
        with pytest.raises(AssertionError):
            check_bad_cell(wrong)


@pytest.mark.parametrize(
    "cells",
    [pa.array([datetime.date(2024, 1, 31)]), pa.array([[1.0]]), pa.array([b"1"]), pa.array([{"a": 1}])],
    ids=lambda cells: str(cells.type),
)
def test_other_types_are_refused_by_name(cells: pa.Array) -> None:
    with pytest.raises(DataError, match=r"column 'price' holds .*not a number") as caught:
        numbers(cells, "price")
    assert str(cells.type) in str(caught.value)


# which texts are no numbers

number_like = st.text(alphabet="0123456789+-.eEinfaN xé", max_size=6)


def check_finds_what_numbers_refuses(find: Callable[[pa.Array], np.ndarray], cells: list[str | None]) -> None:
    """The oracle reads every cell alone."""

    def refused(cell: str | None) -> bool:
        try:
            numbers(pa.array([cell], pa.string()), "x")
        except BadCell:
            return True
        return False

    assert find(pa.array(cells, pa.string())).tolist() == [refused(cell) for cell in cells]


@few_examples
@given(st.lists(st.none() | number_like | st.floats().map(repr) | st.integers().map(str)))
def test_it_finds_what_numbers_refuses(cells: list[str | None]) -> None:
    check_finds_what_numbers_refuses(not_numbers, cells)


def test_a_search_by_the_first_letter_is_caught() -> None:
    def by_first_letter(cells: pa.Array) -> np.ndarray:
        return np.array([bool(cell) and not cell[0].isdigit() for cell in cells.to_pylist()])

    cells = ["12", "12a", "2024-01-31", None, "", "x"]
    check_finds_what_numbers_refuses(not_numbers, cells)
    with pytest.raises(AssertionError):
        check_finds_what_numbers_refuses(by_first_letter, cells)


def test_markers_and_typed_cells_are_not_refused() -> None:
    assert not_numbers(pa.array(["?", "x", " ? "]), ["?", -1]).tolist() == [False, True, False]
    assert not_numbers(pa.array([1.0, math.nan])).tolist() == [False, False]
    assert not_numbers(pa.array([], pa.string())).tolist() == []


# texts


def check_ids_stay_apart(read: Callable[[pa.Array], pa.Array]) -> None:
    assert read(pa.array(IDS, pa.int64())).to_pylist() == [str(number) for number in IDS]


def test_ids_stay_apart_as_texts() -> None:
    check_ids_stay_apart(lambda cells: texts(cells, "id"))
    check_ids_stay_apart(lambda cells: texts(cells.dictionary_encode(), "id"))
    check_ids_stay_apart(lambda cells: texts(cells.cast(pa.string()), "id"))


@pytest.mark.parametrize("narrow", [pa.float32(), pa.float64()], ids=str)
def test_ids_that_pass_through_a_float_are_caught(narrow: pa.DataType) -> None:
    with pytest.raises(AssertionError):
        check_ids_stay_apart(lambda cells: texts(cells.cast(narrow, safe=False), "id"))


@few_examples
@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_every_integer_is_its_own_text(values: list[int]) -> None:
    assert texts(pa.array(values, pa.int64()), "id").to_pylist() == [str(value) for value in values]


@few_examples
@given(st.integers(-(2**53) + 1, 2**53 - 1))
def test_a_whole_number_has_one_text_in_every_type(value: int) -> None:
    cells = [pa.array([value]), pa.array([float(value)]), pa.array([str(value)]), pa.array([value, None])[:1]]
    assert {texts(column, "id")[0].as_py() for column in cells} == {str(value)}


def test_other_floats_keep_their_digits() -> None:
    found = texts(pa.array([2.5, -0.1, 1e300, math.nan, None, -0.0]), "x").to_pylist()
    assert found[3:] == [None, None, "0"]
    assert [float(text) for text in found[:3]] == [2.5, -0.1, 1e300]


@few_examples
@given(st.lists(st.none() | st.text(min_size=1)))
def test_texts_are_kept_as_they_are(values: list[str | None]) -> None:
    for kind in TEXT_TYPES:
        assert texts(pa.array(values, pa.string()).cast(kind), "x").to_pylist() == values


def test_missing_texts() -> None:
    assert texts(pa.array(["a", "", "?", None]), "x", ["?"]).to_pylist() == ["a", None, None, None]
    assert texts(pa.array([7, 8]), "x", ["7"]).to_pylist() == [None, "8"]
    assert texts(pa.nulls(2), "x").to_pylist() == [None, None]


def test_booleans_and_decimals_as_texts() -> None:
    assert texts(pa.array([True, False, None]), "x").to_pylist() == ["true", "false", None]
    assert texts(pa.array([Decimal("1.50")], pa.decimal128(5, 2)), "x").to_pylist() == ["1.50"]


def test_what_is_no_category_is_refused() -> None:
    with pytest.raises(DataError, match="column 'x' holds list"):
        texts(pa.array([[1]]), "x")
    with pytest.raises(DataError, match="column 'x' holds text that is not UTF-8"):
        texts(pa.array([b"\xff"]), "x")


def test_dictionaries_and_chunks_become_plain() -> None:
    cells = pa.chunked_array([pa.array(["a", "b"]).dictionary_encode(), pa.array(["c"]).dictionary_encode()])
    assert plain(cells).equals(pa.array(["a", "b", "c"]))


def test_objects_of_mixed_kinds_meet_as_texts() -> None:
    assert from_objects([1, None, 2], "x").equals(pa.array([1, None, 2]))
    assert from_objects([2**53 + 1, "a", 7.0, None, True], "x").to_pylist() == [
        "9007199254740993",
        "a",
        "7",
        None,
        "true",
    ]


# labels


def check_labels(read: Callable[[pa.Array], np.ndarray]) -> None:
    """Every accepted way to write 0 and 1 gives exactly 0 and 1, and every other cell is refused."""
    for cells in (
        pa.array([0, 1], pa.uint8()),
        pa.array([0.0, 1.0], pa.float32()),
        pa.array([False, True]),
        pa.array([Decimal(0), Decimal(1)], pa.decimal128(3, 1)),
        *(pa.array(pair) for pair in (["0", "1"], ["0.0", "1.0"], ["false", "TRUE"], [" 0", "1 "])),
        pa.array(["0", "1"]).dictionary_encode(),
        pa.array(["0", "1"], pa.large_string()),
    ):
        found = read(cells)
        assert found.dtype == np.float32
        assert found.tolist() == [0.0, 1.0]
    for bad in (2, -1, 0.5, math.nan, math.inf, None, "", " ", "yes", "2", "nan", "1e0", "01", "t", "+1"):
        with pytest.raises(BadCell):
            read(pa.array([bad]))


def test_labels_are_zero_or_one() -> None:
    check_labels(lambda cells: labels(cells, "clicked"))


def test_readers_that_take_too_much_or_too_little_are_caught() -> None:
    def every_number(cells: pa.Array) -> np.ndarray:
        if pa.types.is_floating(cells.type) or pa.types.is_integer(cells.type):
            return numbers(cells, "clicked").astype(np.float32)
        return labels(cells, "clicked")

    def missing_is_no_click(cells: pa.Array) -> np.ndarray:
        cells = plain(cells)
        absent = pa.array([cell is None or cell == "" for cell in cells.to_pylist()])
        return labels(pa.array([0]), "clicked") if absent[0].as_py() else labels(cells, "clicked")

    for wrong in (every_number, missing_is_no_click):
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            check_labels(wrong)


def test_a_bad_label_has_its_row_its_number_and_its_problem() -> None:
    with pytest.raises(BadCell) as caught:
        labels(pa.array(["0", "yes", None, "1"]), "clicked")
    assert (caught.value.row, caught.value.count) == (1, 2)
    assert caught.value.problem == "the label 'yes' is neither 0 nor 1"
    with pytest.raises(BadCell, match="the label is missing") as caught:
        labels(pa.array([1.0, math.nan, 3.0]), "clicked")
    assert (caught.value.row, caught.value.count) == (1, 2)


def test_a_label_of_another_type_is_refused() -> None:
    with pytest.raises(DataError, match="column 'clicked' holds date32"):
        labels(pa.array([datetime.date(2024, 1, 31)]), "clicked")
    with pytest.raises(BadCell, match="missing"):
        labels(pa.nulls(3), "clicked")
