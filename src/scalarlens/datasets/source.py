"""What a source is: a named table whose files, licence, schema, splits and traps are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from scalarlens.datasets.files import Table, TableFile, require_inside, sha256_of_content
from scalarlens.datasets.parts import Part
from scalarlens.errors import DataError, UsageError, unknown_name
from scalarlens.registry import Registry, bind_options, options_of
from scalarlens.table.cells import not_numbers
from scalarlens.table.schema import CategoricalColumn, NumericColumn, Schema

COMPRESSIONS = ("", ".gz", ".zst", ".bz2")


@dataclass(frozen=True)
class SourceFile:
    """A file as its publisher gives it; `sha256` is None where no digest of it is known."""

    name: str
    what: str
    sha256: str | None = None
    #: digest of what a compressed file holds, so that one that was compressed again is still known
    content_sha256: str | None = None


@dataclass(frozen=True)
class SplitRule:
    """How rows come to their splits; a seeded rule draws, the others have nothing to draw."""

    name: str
    rule: str
    seeded: bool = False


@dataclass(frozen=True)
class Opened:
    """A source that was opened: what `prepare` needs, and sentences that a reader of the result must know."""

    schema: Schema
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    #: where the rows come from, for the manifest; no path in it
    origin: Mapping[str, Any] = field(default_factory=dict)


class Source:
    """A table that people obtain themselves, or that is made; nothing here downloads.

    A subclass states the facts below, and reads. Its options are keyword-only arguments of its constructor, which
    keeps each under its own name.
    """

    files: ClassVar[tuple[SourceFile, ...]] = ()
    licence: ClassVar[str]
    obtain: ClassVar[str]
    #: the first is the source's own, which is taken where none is named
    splits: ClassVar[tuple[SplitRule, ...]]
    #: the split of the paper's experiments, where they contain this source
    paper_split: ClassVar[str | None] = None

    @classmethod
    def name(cls) -> str:
        return sources.name_of(cls)

    @classmethod
    def split_rule(cls, name: str | None) -> SplitRule:
        """The split of that name; the source's own where none is named."""
        rules = {rule.name: rule for rule in cls.splits}
        if name is None:
            return cls.splits[0]
        if name not in rules:
            raise unknown_name(f"split of {cls.name()}", name, rules)
        return rules[name]

    def open(self, place: str | Path | None = None, split: str | None = None, seed: int | None = None) -> Opened:
        """Find and check the files, and deal their rows to splits.

        `place` is a file, or the folder that holds the files by their names. A made source takes no place, and
        a split that draws nothing makes no use of a seed.
        """
        rule = self.split_rule(split)
        if rule.seeded and seed is None:
            raise UsageError(
                f"the {rule.name} split of {self.name()} needs --seed N: a split that cannot be repeated is refused"
            )
        if seed is not None and seed < 0:
            raise UsageError(f"--seed must be a whole number from 0; got {seed}")
        if self.files and place is None:
            raise UsageError(f"{self.name()} needs --from FILE_OR_FOLDER, with {self._wanted()}; {self.obtain}")
        opened = self._open(Path(place or "."), rule.name, seed or 0)
        origin = {
            "source": self.name(),
            "options": {name: getattr(self, name) for name in options_of(type(self))},
            "split": rule.name,
            "seed": seed if rule.seeded else None,
            "notes": list(opened.notes),
        }
        return replace(opened, origin=origin)

    def _open(self, place: Path, split: str, seed: int) -> Opened:
        raise NotImplementedError

    def _wanted(self) -> str:
        return " and ".join(file.name for file in self.files)

    def _find(self, place: Path) -> tuple[list[Path], tuple[str, ...]]:
        """The files in their order, as they are or compressed, and a note on each that is not as published."""
        paths = [self._find_one(place, file) for file in self.files]
        notes = (note_on_digest(path, file) for path, file in zip(paths, self.files, strict=True))
        return paths, tuple(note for note in notes if note)

    def _find_one(self, place: Path, file: SourceFile) -> Path:
        if place.is_file() and len(self.files) == 1:
            return place
        bare = file.name
        for ending in COMPRESSIONS[1:]:
            bare = bare.removesuffix(ending)
        for name in (file.name, *(bare + ending for ending in COMPRESSIONS)):
            require_inside(place / name, place)
            if (place / name).is_file():
                return place / name
        raise self._missing(place, file.name, file.what)

    def _missing(self, place: Path, name: str, what: str) -> DataError:
        where = "is a file, not the folder that holds it" if place.is_file() else "has no such file"
        where = where if place.exists() else "does not exist"
        return DataError(f"{self.name()} needs {name} ({what}), but {place} {where}; {self.obtain}")


sources: Registry[type[Source]] = Registry("source", __package__, "scalarlens list datasets")


def build(name: str, **options: Any) -> Source:
    """A registered source; options are checked against its constructor.

    >>> build("census-income").open()
    Traceback (most recent call last):
    ...
    scalarlens.errors.UsageError: the official split of census-income needs --seed N: a split that cannot be ...
    """
    part = sources.get(name)
    return part(**bind_options("source", name, part, options))


def schema_of(numeric: str, categorical: str, label: str, *, missing: Sequence[str] = (), min_count: int = 1) -> Schema:
    """A schema from names that are separated by spaces."""
    return Schema(
        tuple(NumericColumn(name) for name in numeric.split()),
        tuple(CategoricalColumn(name, min_count=min_count) for name in categorical.split()),
        label=label,
        missing=tuple(missing),
    )


def note_on_digest(path: Path, file: SourceFile) -> str | None:
    """A sentence for a file that is not as published, which is read all the same."""
    if file.sha256 is None:
        return None
    found, published = sha256_of_content(path), (file.sha256, file.content_sha256)
    if found in published:
        return None
    return (
        f"{path.name} is not the published {file.name}, but is read all the same: "
        f"its content has SHA-256 {found}, not {file.content_sha256 or file.sha256}"
    )


@dataclass(frozen=True)
class ChangedFile:
    """A file of a table whose batches are changed as they pass; `done` rows came before the batch."""

    file: TableFile
    change: Callable[[pa.RecordBatch, int], pa.RecordBatch]

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def columns(self) -> tuple[str, ...]:
        return self.file.columns

    def batches(self, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        done = 0
        for batch in self.file.batches(columns, batch_rows):
            yield self.change(batch, done)
            done += batch.num_rows

    def count_rows(self) -> int:
        return self.file.count_rows()


def relabelled(table: Table, label: str, meanings: Mapping[str, int]) -> Table:
    """The table with its label as 0 and 1; a text without a meaning is refused."""
    texts, values = pa.array(list(meanings)), pa.array(list(meanings.values()), pa.uint8())

    def reader(file: TableFile) -> TableFile:
        def change(batch: pa.RecordBatch, done: int) -> pa.RecordBatch:
            if label not in batch.schema.names:
                return batch
            found = pc.index_in(batch.column(label), value_set=texts)
            if found.null_count:
                row = pc.index(found.is_null(), True).as_py()
                known = ", ".join(map(repr, meanings))
                cell = batch.column(label)[row].as_py()
                raise DataError(
                    f"{file.path}: column {label!r}, row {done + row + 1}: {cell!r} is no label; the labels are {known}"
                )
            return batch.set_column(batch.schema.names.index(label), label, values.take(found))

        return ChangedFile(file, change)

    return Table(table.path, table.columns, tuple(map(reader, table.files)))


def trimmed(table: Table) -> Table:
    """The table with its texts freed of the spaces around them."""

    def change(batch: pa.RecordBatch, done: int) -> pa.RecordBatch:
        columns = [pc.utf8_trim_whitespace(column) for column in batch.columns]
        return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)

    return Table(table.path, table.columns, tuple(ChangedFile(file, change) for file in table.files))


def refuse_header(table: Table, columns: Sequence[str]) -> None:
    """Refuse a file whose first row has only words where all of `columns` hold numbers."""
    for file in table.files:
        for batch in file.batches(columns, 1):
            first = [batch.column(name)[:1] for name in columns]
            present = [cell for cell in first if cell[0].as_py().strip() not in ("", "?", "NaN")]
            if present and all(not_numbers(cell)[0] for cell in present):
                words = ", ".join(repr(cell[0].as_py()[:40]) for cell in present[:3])
                raise DataError(
                    f"{file.path} starts with {words} where numbers belong: "
                    "it has a header, and the format has none; take its first line out"
                )
            break
