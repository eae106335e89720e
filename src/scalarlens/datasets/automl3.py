"""AutoML3: the data sets of the NeurIPS 2018 challenge on lifelong learning with drift, in their folder format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from scalarlens.datasets.files import Table, TableFile, open_text, require_inside
from scalarlens.datasets.parts import Part, deal_in_order, deal_randomly
from scalarlens.datasets.source import (
    Opened,
    Source,
    SourceFile,
    SplitRule,
    note_on_digest,
    refuse_header,
    schema_of,
    sources,
)
from scalarlens.errors import DataError, unknown_name
from scalarlens.table.cells import BadCell, labels

LABEL = "label"
#: the kinds of columns; the first two are read
KINDS = ("Numerical", "Categorical", "Time", "Multi-value")
#: shares of valid and test in the time split
TIME_SHARES = (0.2, 0.2)


@sources.register("automl3")
class AutoMl3(Source):
    """A folder of the AutoML3 challenge: batches in the order of time, with numbers and categories `f0`, `f1`, ...

    The labelled training batches are read; where a folder has none, its labelled test batches. Columns of the kinds
    Time and Multi-value are left out, as in the paper. A category is the text of its cell, so that it means the same
    in every batch.

    NOTE[DIFF] The paper's row counts are about 60/21/19 % on AutoML-A and 59/21/20 % on AutoML-E, and it states no
    rule. The random split here is 80/10/10 like every other one. The time split is 60/20/20: the last tenth of the
    practice set has one label alone.

    >>> [split.name for split in AutoMl3.splits], AutoMl3.paper_split
    (['time', 'random'], 'random')
    """

    files = (
        SourceFile("NAME_feat.type", "the kind of each column: Numerical, Categorical, Time or Multi-value"),
        SourceFile(
            "NAME_train1.data", "rows without a header, separated by spaces, NaN for missing; more trainK may follow"
        ),
        SourceFile("NAME_train1.solution", "their labels, 0 or 1, one in a line"),
        SourceFile("NAME_test1.data", "later rows, read where no training batch is labelled; more testK may follow"),
        SourceFile("NAME_test1.solution", "their labels"),
        SourceFile("NAME_public.info", "facts about the data set; not read"),
        SourceFile(
            "rl_public.info", "practice set", "cefd4e5694dca071e23fc903a8a209e2e2cb2986a001220698ab5a51177665b0"
        ),
        SourceFile("rl_feat.type", "practice set", "7dc861ce1d38bf69c91d20b0c66f91de803b9016f31c6eb10198685dc0096997"),
        SourceFile("rl_test1.data", "practice set", "00b68d9901db5dc4532787fd1d2aa0e963e52c1cdff3874921a17ad42337107d"),
        SourceFile(
            "rl_test1.solution", "practice set", "88c78d893d8946015cc7d338c86f5a7414c30f68c7d7480078c8d1791e90091f"
        ),
        SourceFile("rl_test2.data", "practice set", "853a329d95c8a9d4adec8337e553345192fa6e37e57ba9159db22b4048318132"),
        SourceFile(
            "rl_test2.solution", "practice set", "993cf2c67bd845cb11b20b78e54b77c7061521d8f2add6129c88a282ad48601a"
        ),
        SourceFile("rl_test3.data", "practice set", "9cd9f6226a598878796001574d88614b871f8e8b1fb8524f677667d8e69544de"),
        SourceFile(
            "rl_test3.solution", "practice set", "2caa764c356446ee20b33d674fb67fca20c298b45441ef969d22169dae232bb7"
        ),
    )
    licence = "none is stated for the data of the challenge; its terms are not known"
    obtain = (
        "the challenge gave its data to registered participants (codalab.org, competition 19836); the practice set "
        "`rl` is in AutoML3_sample_data/rl of its starting kit"
    )
    splits = (
        SplitRule("time", "the first 60 % of the rows, which are in the order of time, are train, the last 20 % test"),
        SplitRule("random", "80/10/10 % of the rows, drawn with the seed", seeded=True),
    )
    paper_split = "random"

    def __init__(self, *, min_count: int = 1) -> None:
        self.min_count = min_count

    def _wanted(self) -> str:
        return "the folder of one data set in it (NAME_feat.type, NAME_train1.data, NAME_train1.solution, ...)"

    def _open(self, place: Path, split: str, seed: int) -> Opened:
        name = self._name_in(place)
        kinds = _kinds(place / f"{name}_feat.type")
        batches, notes = self._batches(place, name)
        rows = _rows(place, batches, [f"f{number}" for number in range(len(kinds))])
        by_kind = {kind: [f"f{number}" for number, k in enumerate(kinds) if k == kind] for kind in KINDS}
        refuse_header(rows, by_kind["Numerical"])
        table = _labelled(rows)
        left_out = [f"{kind} ({', '.join(by_kind[kind])})" for kind in KINDS[2:] if by_kind[kind]]
        if left_out:
            notes.append(f"left out, as in the paper: columns of the kind {' and '.join(left_out)}")
        if split == "random":
            notes.append(
                "the rows are in the order of time and neighbours are alike: a random split is easier than time"
            )
        count = table.count_rows()
        dealt = deal_in_order(count, *TIME_SHARES) if split == "time" else deal_randomly(count, seed)
        schema = schema_of(
            " ".join(by_kind["Numerical"]),
            " ".join(by_kind["Categorical"]),
            LABEL,
            missing=["NaN"],
            min_count=self.min_count,
        )
        return Opened(schema, (Part(table, dealt),), (*self._digests(place), *notes))

    def _name_in(self, place: Path) -> str:
        """What stands for NAME in this folder."""
        found = sorted(place.glob("*_feat.type")) if place.is_dir() else []
        if not found:
            raise self._missing(place, "NAME_feat.type", self.files[0].what)
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise DataError(f"{place} holds more than one data set ({names}); name the folder of one")
        return found[0].name.removesuffix("_feat.type")

    def _batches(self, place: Path, name: str) -> tuple[list[Path], list[str]]:
        """The labelled batches that are read, in their order, and which ones these are."""
        train, test = (_numbered(place, name, kind) for kind in ("train", "test"))
        labelled = [path for path in train if path.with_suffix(".solution").is_file()]
        notes = (
            [f"left out: {len(test)} test batches, as the training batches have labels"] if labelled and test else []
        )
        if not labelled:
            labelled = [path for path in test if path.with_suffix(".solution").is_file()]
            read = ", ".join(path.name for path in labelled)
            notes = [f"no labelled training batch is here; read instead, in their order: {read}"]
        if not labelled:
            raise self._missing(place, f"{name}_train1.data with {name}_train1.solution", "rows and their labels")
        return labelled, notes

    def _digests(self, place: Path) -> list[str]:
        known = [file for file in self.files if file.sha256 and (place / file.name).is_file()]
        return [note for file in known if (note := note_on_digest(place / file.name, file))]


@dataclass(frozen=True, eq=False)
class LabelledFile:
    """Rows of one file with their labels from another, line by line."""

    file: TableFile
    labels: np.ndarray

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.file.columns, LABEL)

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        done = 0
        for batch in self.file.batches([name for name in columns if name != LABEL], batch_rows):
            own = self.labels[done : done + batch.num_rows]
            done += batch.num_rows
            if len(own) < batch.num_rows:
                break
            yield batch.append_column(LABEL, pa.array(own))
        if done != len(self.labels):
            rows = "more" if done > len(self.labels) else f"{done:,}"
            raise DataError(
                f"{self.path} has {rows} rows, its .solution has {len(self.labels):,} labels; both must agree"
            )

    def count_rows(self) -> int:
        return len(self.labels)


def _numbered(place: Path, name: str, kind: str) -> list[Path]:
    """Batches of one kind by their numbers: 2 comes before 10."""
    pattern = re.compile(rf"{re.escape(name)}_{kind}(\d*)\.data")
    found = [(int(match[1] or 0), path) for path in place.iterdir() if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _kinds(path: Path) -> list[str]:
    table = open_text(path, "\t", columns=["kind"])
    kinds = [str(kind).strip() for batch in table.batches() for kind in batch.column("kind").to_pylist()]
    for kind in kinds:
        if kind not in KINDS:
            raise DataError(f"{path}: {unknown_name('kind of column', kind, KINDS)}")
    return kinds


def _rows(place: Path, batches: Sequence[Path], columns: Sequence[str]) -> Table:
    for path in batches:
        require_inside(path, place)
    files = [open_text(path, " ", columns=columns).files[0] for path in batches]
    return Table(place, tuple(columns), tuple(files))


def _labelled(rows: Table) -> Table:
    files = [LabelledFile(file, _labels(file.path.with_suffix(".solution"))) for file in rows.files]
    return Table(rows.path, (*rows.columns, LABEL), tuple(files))


def _labels(path: Path) -> np.ndarray:
    table, read = open_text(path, "\t", columns=[LABEL]), [np.empty(0, np.uint8)]
    for batch in table.batches():
        try:
            read.append(labels(batch.column(LABEL), LABEL).astype(np.uint8))
        except BadCell as bad:
            raise DataError(f"{path}, in row {sum(map(len, read)) + bad.row + 1}: {bad.problem}") from bad
    return np.concatenate(read)
