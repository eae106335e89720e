"""From the cells of one Arrow column to float64 numbers or category texts; the only place where cells are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalarlens.errors import DataError

#: integers beyond this have no exact float64
EXACT_INTEGER = float(2**53)

_LABELS = {"0": 0.0, "0.0": 0.0, "false": 0.0, "1": 1.0, "1.0": 1.0, "true": 1.0}
#: how every text begins that is a number, and some that are not
_NUMBER_START = r"(?i)^[+-]?(\d|\.\d|inf|nan)"


class BadCell(DataError):
    """A cell that cannot be read as what its column promises; `row` counts from 0 within the array given."""

    def __init__(self, column: str, problem: str, row: int, count: int = 1) -> None:
        self.column, self.problem, self.row, self.count = column, problem, row, count
        super().__init__(f"column {column!r}: {problem} at row {row}" + (f" and {count - 1} more" * (count > 1)))


def numbers(cells: pa.Array, column: str, missing: Sequence[str | float] = ()) -> np.ndarray:
    """float64 `[rows]`, NaN = missing. Infinite values pass; the caller decides on them.

    >>> numbers(pa.array(["1.5", "", "?"]), "price", missing=["?"]).tolist()
    [1.5, nan, nan]
    """
    cells = plain(cells)
    kind = cells.type
    if pa.types.is_null(kind):
        return np.full(len(cells), np.nan)
    if pa.types.is_string(kind):
        markers = [marker for marker in missing if isinstance(marker, str)]
        values = _parse(_nullify(pc.utf8_trim_whitespace(cells), markers), column)
    elif pa.types.is_decimal(kind):
        # Arrow's own step from a decimal often misses the nearest float; its step from text does not.
        values = cells.cast(pa.string()).cast(pa.float64())
    elif pa.types.is_boolean(kind):
        values = cells.cast(pa.int8()).cast(pa.float64())
    elif _is_number(kind):
        values = cells.cast(pa.float64(), safe=False)
    else:
        raise DataError(f"column {column!r} holds {kind}, which is not a number; convert it or leave it out")
    array = values.to_numpy(zero_copy_only=False).astype(np.float64, copy=True)
    for marker in missing:
        if isinstance(marker, int | float):
            array[array == marker] = np.nan
    return array


def texts(cells: pa.Array, column: str, missing: Sequence[str] = ()) -> pa.Array:
    """string `[rows]`, null = missing. A whole number reads the same whether it came as 7, 7.0 or "7".

    >>> texts(pa.array([7.0, None, 2.5]), "code").to_pylist()
    ['7', None, '2.5']
    """
    cells = plain(cells)
    kind = cells.type
    if pa.types.is_null(kind):
        return pa.nulls(len(cells), pa.string())
    if pa.types.is_floating(kind):
        return _nullify(_float_texts(cells.cast(pa.float64())), missing)
    try:
        return _nullify(cells.cast(pa.string()), missing)
    except pa.ArrowInvalid as error:
        raise DataError(f"column {column!r} holds text that is not UTF-8") from error
    except pa.ArrowNotImplementedError as error:
        raise DataError(f"column {column!r} holds {kind}, which is not one category per row") from error


def labels(cells: pa.Array, column: str) -> np.ndarray:
    """float32 `[rows]` of 0 and 1, from numbers, booleans or texts like "1", "0.0" and "true"; none missing.

    >>> labels(pa.array(["1", "0.0", "True"]), "clicked").tolist()
    [1.0, 0.0, 1.0]
    """
    cells = plain(cells)
    kind = cells.type
    if pa.types.is_string(kind):
        folded = pc.utf8_lower(pc.utf8_trim_whitespace(cells))
        places = pc.index_in(folded, value_set=pa.array(list(_LABELS)))
        values = pa.array(list(_LABELS.values())).take(places).to_numpy(zero_copy_only=False)
    elif _is_number(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        values = numbers(cells, column)
    else:
        raise DataError(f"column {column!r} holds {kind}, which is not a label; make it 0 or 1")
    bad = np.flatnonzero((values != 0) & (values != 1))
    if len(bad):
        cell = cells[int(bad[0])].as_py()
        absent = cell is None or cell != cell or not str(cell).strip()
        problem = "the label is missing" if absent else f"the label {str(cell)[:60]!r} is neither 0 nor 1"
        raise BadCell(column, problem, int(bad[0]), len(bad))
    return values.astype(np.float32)


def not_numbers(cells: pa.Array, missing: Sequence[str | float] = ()) -> np.ndarray:
    """bool `[rows]`: the texts that `numbers` refuses.

    >>> not_numbers(pa.array(["1.5", "", "?", "many"]), missing=["?"]).tolist()
    [False, False, False, True]
    """
    cells = plain(cells)
    if not pa.types.is_string(cells.type):
        return np.zeros(len(cells), dtype=bool)
    markers = [marker for marker in missing if isinstance(marker, str)]
    cells = _nullify(pc.utf8_trim_whitespace(cells), markers)
    if _parses(cells):
        return np.zeros(len(cells), dtype=bool)
    encoded = cells.dictionary_encode()
    begins = pc.match_substring_regex(encoded.dictionary, _NUMBER_START).to_numpy(zero_copy_only=False)
    bad = np.append(~begins, False)
    likely = np.flatnonzero(begins)
    bad[likely[_refused(encoded.dictionary.take(pa.array(likely)))]] = True
    return bad[encoded.indices.fill_null(len(bad) - 1).to_numpy()]


def plain(cells: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One contiguous array without dictionaries, extension types or large and view strings."""
    if isinstance(cells, pa.ChunkedArray):
        cells = cells.combine_chunks()
    if isinstance(cells.type, pa.BaseExtensionType):
        cells = cells.storage
    if pa.types.is_dictionary(cells.type):
        cells = plain(cells.dictionary).take(cells.indices)
    if pa.types.is_large_string(cells.type) or pa.types.is_string_view(cells.type):
        cells = cells.cast(pa.string())
    return cells


def from_objects(values: Sequence[Any], column: str) -> pa.Array:
    """An Arrow array of Python objects, of mixed kinds if need be: numbers and texts meet as texts."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        pass
    try:
        return pa.array([_text_of(value, column) for value in values], pa.string())
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise DataError(f"column {column!r} holds a value that is neither a number nor a text: {error}") from error


def _text_of(value: Any, column: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    text: str | None = texts(pa.array([value]), column)[0].as_py()
    return text


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _nullify(cells: pa.Array, markers: Sequence[str]) -> pa.Array:
    absent = pc.is_in(cells, value_set=pa.array(["", *markers], cells.type))
    return pc.if_else(absent, pa.scalar(None, cells.type), cells)


def _parse(cells: pa.Array, column: str) -> pa.Array:
    try:
        return cells.cast(pa.float64())
    except pa.ArrowInvalid:
        bad = np.flatnonzero(not_numbers(cells))
    shown = cells[int(bad[0])].as_py()
    raise BadCell(column, f"{shown[:60]!r} is not a number", int(bad[0]), len(bad))


def _refused(texts: pa.Array, first: int = 0) -> list[int]:
    """Places, counted from `first`, of the texts that are not numbers; found by halving."""
    if _parses(texts):
        return []
    if len(texts) == 1:
        return [first]
    half = len(texts) // 2
    return _refused(texts[:half], first) + _refused(texts[half:], first + half)


def _parses(texts: pa.Array) -> bool:
    try:
        texts.cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


def _float_texts(cells: pa.Array) -> pa.Array:
    values = cells.to_numpy(zero_copy_only=False)
    with np.errstate(invalid="ignore"):
        whole = np.isfinite(values) & (values == np.round(values)) & (np.abs(values) < EXACT_INTEGER)
    as_integers = pa.array(np.where(whole, values, 0).astype(np.int64)).cast(pa.string())
    texts_ = pc.if_else(pa.array(whole), as_integers, cells.cast(pa.string()))
    return pc.if_else(pa.array(np.isnan(values)), pa.scalar(None, pa.string()), texts_)
