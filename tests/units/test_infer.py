"""The guess of a schema: one table with a column of every kind, and what is said about each of them."""

from __future__ import annotations

import csv
import datetime
import tomllib
from collections.abc import Mapping
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
    "amount_with_words": ("categorical", "mostly numbers, but also 'word"),
    "amount_with_too_many_marks": ("categorical", "mostly numbers, but also 'none at all'"),
    "amount_with_infinity": ("numeric", "1 infinite cells"),
    "count": ("numeric", ""),
    "code": ("numeric", "few distinct values"),
    "padded": ("categorical", "leading zeros"),
    "row_id": ("left out", "nearly one value per row"),
    "shuffled_id": ("left out", "nearly one value per row"),
    "hash": ("left out", "nearly one value per row"),
    "sparse_amount": ("numeric", "nearly one value per row"),
    "user_id": ("categorical", "above 2^24 and often repeated"),
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
    "copy_in_words": ("categorical", "nearly copies the label: its value alone guesses 99."),
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
        "name": [f"visitor {row}" for row in range(ROWS)],
        "city": [["Rome", "Oslo", "Lima"][number] for number in few],
        "flag": [bool(number) for number in few],
        "day": [(start + datetime.timedelta(days=row % 500)).date() for row in range(ROWS)],
        "moment": [None if row % 4 == 0 else start + datetime.timedelta(minutes=row % 900) for row in range(ROWS)],
        "one_number": [5] * ROWS,
        "one_word": ["x"] * ROWS,
        "nothing": [None] * ROWS,
        "marks_only": ["?"] * ROWS,
        "copy": [int(one) * 40 + int(rng.integers(0, 40)) for one in label],
        "copy_upside_down": [-3.5 * one + a / 1000 for one, a in zip(label.tolist(), amounts, strict=True)],
        "copy_in_words": [["cold", "warm", "mild"][2 * one if row % 2 else one] for row, one in enumerate(label)]
        and [("yes" if one else f"no {row % 7}") for row, one in enumerate(flipped.tolist())],
        "copy_in_gaps": [None if one else amount for one, amount in zip(flipped.tolist(), amounts, strict=True)],
        "good_number": [one + a / 25 for one, a in zip(label.tolist(), amounts, strict=True)],
        "good_word": ["a" if one or row % 5 == 0 else "b" for row, one in enumerate(label.tolist())],
    }
