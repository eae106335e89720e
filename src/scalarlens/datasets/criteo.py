"""Criteo: the display advertising challenge of 2014, seven days of ads and clicks."""

from __future__ import annotations

from pathlib import Path

from scalarlens.datasets.files import Table, open_text, require_inside
from scalarlens.datasets.parts import Part, deal_in_order, deal_randomly
from scalarlens.datasets.source import (
    COMPRESSIONS,
    Opened,
    Source,
    SourceFile,
    SplitRule,
    refuse_header,
    schema_of,
    sources,
)

NUMERIC = " ".join(f"I{number}" for number in range(1, 14))
CATEGORICAL = " ".join(f"C{number}" for number in range(1, 27))
LABEL = "label"
COLUMNS = (LABEL, *NUMERIC.split(), *CATEGORICAL.split())
#: how the names of files end that belong together in a folder
ENDINGS = tuple(kind + compression for kind in (".txt", ".tsv") for compression in COMPRESSIONS)


@sources.register("criteo")
class Criteo(Source):
    """45,840,617 ads, 25.6 % clicked: 13 counts and 26 categories (Criteo Display Advertising Challenge).

    Counts are read as they are: negative ones stay, an empty cell is missing, no logarithm is taken.

    NOTE[DIFF] The paper gives no least count of a category; `min_count` is that of the benchmark BARS, whose split
    sizes the paper shares.

    >>> Criteo().min_count, COLUMNS[0], COLUMNS[13], COLUMNS[39]
    (10, 'label', 'I13', 'C26')
    """

    files = (SourceFile("train.txt", "45,840,617 rows without a header, separated by tabs; or a folder of such files"),)
    licence = "Criteo's own terms for the data of the challenge; read them where you download"
    obtain = (
        "download the data of the Kaggle Display Advertising Challenge from Criteo (ailab.criteo.com) and unpack its "
        "train.txt; no checksum of it is published"
    )
    splits = (
        SplitRule("random", "80/10/10 % of all rows, drawn with the seed", seeded=True),
        SplitRule("time", "the first 80 % of all rows, which are in the order of time, are train, the last 10 % test"),
    )
    paper_split = "random"

    def __init__(self, *, min_count: int = 10) -> None:
        self.min_count = min_count

    def _open(self, place: Path, split: str, seed: int) -> Opened:
        tables = [open_text(path, "\t", columns=COLUMNS) for path in self._paths(place)]
        table = Table(place, COLUMNS, tuple(file for table in tables for file in table.files))
        refuse_header(table, [LABEL, *NUMERIC.split()])
        rows = table.count_rows()
        dealt = deal_in_order(rows) if split == "time" else deal_randomly(rows, seed)
        return Opened(schema_of(NUMERIC, CATEGORICAL, LABEL, min_count=self.min_count), (Part(table, dealt),))

    def _paths(self, place: Path) -> list[Path]:
        """The training file; or, in a folder without it, all text files in the order of their names."""
        names = {entry.name for entry in place.iterdir()} if place.is_dir() else set()
        whole = any(f"train.txt{compression}" in names for compression in COMPRESSIONS)
        parts = sorted(name for name in names if name.endswith(ENDINGS) and not name.startswith("."))
        if whole or not parts:
            return self._find(place)[0]
        for name in parts:
            require_inside(place / name, place)
        return [place / name for name in parts]
