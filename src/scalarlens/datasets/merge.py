"""From what the chunks contribute to the statistics of the whole: exact, and in bounded memory.

The distinct values of a column, or its distinct texts, are brought together range by range: bounds taken from a
sample cut the order of the values into ranges that fit a budget, and each range is made unique on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from scalarlens.datasets.spool import Arrays, read_texts, save_arrays, text_arrays, write_arrays
from scalarlens.storage import replacing
from scalarlens.table.statistics import BLOCK_VALUES, MISSING_ID, UNSEEN_ID, Vocabulary, VocabularyStream, describe

#: every so many values of a run stand for it in the sample
SAMPLE_EVERY = 64
#: what merging holds per value or text of a range, beyond the bytes of a text
BYTES_PER_VALUE, BYTES_PER_TEXT = 64, 96
#: categories are listed in pieces of about this many
PIECE = 1 << 16
_VOCABULARY = pa.schema([("text", pa.string()), ("count", pa.int64())])


def merge_numbers(chunks: Sequence[Arrays], column: int, result: Path, budget: int) -> None:
    """The statistics of one numeric column, from the sorted distinct training values of each chunk; in a file."""
    if result.exists():
        return
    values, counts = (result.with_name(f"{result.name}.{what}") for what in ("distinct", "counts"))
    with values.open("wb") as values_file, counts.open("wb") as counts_file:
        for distinct, tally in _ranges_of_values(chunks, column, budget):
            values_file.write(distinct.data)
            counts_file.write(tally.data)

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, values.stat().st_size, BLOCK_VALUES * 8):
            found = np.fromfile(values, np.float64, BLOCK_VALUES, offset=start)
            yield found, np.fromfile(counts, np.int64, BLOCK_VALUES, offset=start)

    described = describe(blocks)
    save_arrays(result, {name: np.atleast_1d(value) for name, value in described.items()})
    values.unlink()
    counts.unlink()


def read_numbers(result: Path) -> dict[str, np.ndarray]:
    """What `merge_numbers` left: a grid of quantiles, and single numbers."""
    found = Arrays(result)
    return {name: found.read(name) if name == "quantiles" else found.read(name)[0] for name in found.names}


def _ranges_of_values(chunks: Sequence[Arrays], column: int, budget: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    names = f"distinct.{column}", f"counts.{column}"
    total = sum(chunk.size(names[0]) for chunk in chunks)
    ranges = -(-total * BYTES_PER_VALUE // budget)
    if ranges == 0:
        return
    places = np.array([[0, chunk.size(names[0])] for chunk in chunks])
    if ranges > 1:
        runs = (chunk.read(names[0]) for chunk in chunks)
        sample = np.sort(np.concatenate([run[::SAMPLE_EVERY] for run in runs]))
        bounds = np.unique(sample[len(sample) * np.arange(1, ranges) // ranges])
        inner = [np.searchsorted(chunk.read(names[0]), bounds) for chunk in chunks]
        places = np.hstack([places[:, :1], np.array(inner), places[:, 1:]])
    for start, stop in zip(places.T[:-1], places.T[1:], strict=True):
        pieces = [[chunk.read(name, a, b) for name in names] for chunk, a, b in zip(chunks, start, stop, strict=True)]
        values, counts = (np.concatenate(column) for column in zip(*pieces, strict=True))
        if len(values):
            order = np.argsort(values, kind="stable")
            values = values[order]
            firsts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
            yield values[firsts], np.add.reduceat(counts[order].astype(np.int64), firsts)


class TextColumn:
    """One column of texts in several chunks: its merge, and what came of it.

    Texts are numbered by falling count and then by the text, from `Vocabulary.FIRST_ID`; those that occur less
    often than `min_count` share one number. Only counts of the rows that the chunks counted enter.
    """

    def __init__(self, name: str, chunks: Sequence[Arrays], folder: Path, min_count: int = 1) -> None:
        self.name, self.min_count = name, min_count
        self._all_chunks, self._folder = chunks, folder
        self._ids, self._texts = folder / f"{name}.ids", folder / f"{name}.texts"

    @cached_property
    def _chunks(self) -> list[tuple[Arrays, int]]:
        """The chunks that have this column, with the number of their texts."""
        found = [chunk for chunk in self._all_chunks if f"{self.name}.bounds" in chunk]
        return [(chunk, chunk.size(f"{self.name}.counts") - 1) for chunk in found]

    @cached_property
    def merged(self) -> Arrays:
        return Arrays(self._ids)

    def merge(self, budget: int) -> None:
        """Number the texts; nothing is done twice."""
        if self._ids.exists():
            return
        bounds = self._bounds(budget)
        ranges = [
            self._unite(number, low, high)
            for number, (low, high) in enumerate(zip([None, *bounds], [*bounds, None], strict=True))
        ]
        classes = _Classes(ranges)
        with (
            replacing(self._texts) as partial,
            partial.open("wb") as file,
            pa.ipc.new_file(file, _VOCABULARY) as writer,
        ):
            for texts, counts in classes.texts():
                writer.write_batch(pa.record_batch([texts, counts], schema=_VOCABULARY))
        ids = np.full(sum(size for _, size in self._chunks), UNSEEN_ID, np.int32)
        for entry, numbers in zip(ranges, classes.numbers(), strict=True):
            positions = entry.read("positions")
            ids[entry.read("places")[positions >= 0]] = numbers[positions[positions >= 0]]
        tallies = [chunk.read(f"{self.name}.counts") for chunk, _ in self._chunks]
        missing = sum(int(tally[-1]) for tally in tallies)
        rare = sum(int(tally.sum()) for tally in tallies) - missing - int(classes.counts @ classes.totals)
        ends = np.cumsum([size for _, size in self._chunks]).tolist()
        places = {chunk.path.name: (end - size, end) for (chunk, size), end in zip(self._chunks, ends, strict=True)}
        notes = {"size": int(classes.totals.sum()), "missing": missing, "rare": rare, "places": places}
        save_arrays(self._ids, {"ids": ids}, notes)
        for entry in ranges:
            entry.path.unlink()

    def ids_of(self, chunk: Arrays) -> np.ndarray:
        """The number of each code of a chunk; the last code is a missing cell."""
        known = self.merged.read("ids", *self.merged.notes["places"][chunk.path.name])
        return np.append(known, np.int32(MISSING_ID))

    @property
    def vocabulary(self) -> VocabularyStream:
        notes = self.merged.notes
        return VocabularyStream(notes["missing"], notes["rare"], notes["size"], self._pieces())

    @property
    def size(self) -> int:
        return int(self.merged.notes["size"]) + Vocabulary.FIRST_ID

    def _pieces(self) -> Iterator[tuple[pa.Array, np.ndarray]]:
        with pa.OSFile(str(self._texts)) as file, pa.ipc.open_file(file) as reader:
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                yield batch.column(0), batch.column(1).to_numpy()

    def _bounds(self, budget: int) -> list[pa.Scalar]:
        """Texts that cut the order of all texts into ranges which fit the budget."""
        needed = sum(chunk.size(f"{self.name}.bytes") * 2 + size * BYTES_PER_TEXT for chunk, size in self._chunks)
        ranges = -(-needed // budget)
        if ranges < 2:
            return []
        sample = [read_texts(chunk, self.name).take(np.arange(0, size, SAMPLE_EVERY)) for chunk, size in self._chunks]
        united = pa.concat_arrays(sample)
        ordered = united.take(pc.sort_indices(united))
        return list(pc.unique(ordered.take(len(ordered) * np.arange(1, ranges) // ranges)))

    def _unite(self, number: int, low: pa.Scalar | None, high: pa.Scalar | None) -> Arrays:
        """The texts from `low` up to `high` made unique and ordered by falling count, then text; in a file."""
        places, pieces, tallies = [], [], []
        start = 0
        for chunk, size in self._chunks:
            texts, counts = read_texts(chunk, self.name), chunk.read(f"{self.name}.counts")[:-1]
            inside = _between(texts, low, high)
            places.append(start + inside)
            pieces.append(texts.take(pa.array(inside)) if len(inside) < size else texts)
            tallies.append(counts[inside])
            start += size
        encoded = pa.concat_arrays(pieces).dictionary_encode()
        del pieces
        codes = encoded.indices.to_numpy()
        counts = np.bincount(codes, np.concatenate(tallies), len(encoded.dictionary)).astype(np.int64)
        kept = np.flatnonzero(counts >= self.min_count)
        texts = encoded.dictionary.take(pa.array(kept))
        order = pc.sort_indices(texts).to_numpy().astype(np.int64)
        order = order[np.argsort(-counts[kept[order]], kind="stable")]
        position = np.full(len(counts), -1, np.int32)
        position[kept[order]] = np.arange(len(kept), dtype=np.int32)
        classes, sizes = np.unique(counts[kept], return_counts=True)
        arrays = {"places": np.concatenate(places), "positions": position[codes], "classes": classes[::-1]}
        path = self._folder / f"{self.name}.range.{number}"
        write_arrays(path, {**arrays, "sizes": sizes[::-1], **text_arrays("texts", texts.take(pa.array(order)))})
        return Arrays(path)


class _Classes:
    """The texts of several ranges by their count: how many each range has, and which numbers they get."""

    def __init__(self, ranges: Sequence[Arrays]) -> None:
        self.ranges = ranges
        self.counts = np.unique(np.concatenate([entry.read("classes") for entry in ranges]))[::-1]
        self.sizes = np.zeros((len(ranges), len(self.counts)), np.int64)
        for row, entry in zip(self.sizes, ranges, strict=True):
            row[np.searchsorted(-self.counts, -entry.read("classes"))] = entry.read("sizes")
        self.ends = np.cumsum(self.sizes, axis=1)
        self.totals = self.sizes.sum(axis=0)

    def numbers(self) -> Iterator[np.ndarray]:
        """The numbers of the texts of each range, in the order in which its file holds them."""
        first = Vocabulary.FIRST_ID + np.cumsum(self.totals) - self.totals
        before = np.cumsum(self.sizes, axis=0) - self.sizes
        for sizes, ends, earlier in zip(self.sizes, self.ends, before, strict=True):
            yield (np.repeat(first + earlier - (ends - sizes), sizes) + np.arange(sizes.sum())).astype(np.int32)

    def texts(self) -> Iterator[tuple[pa.Array, np.ndarray]]:
        """All texts in the order of their numbers, with their counts, in pieces."""
        starts = self.ends - self.sizes
        for begin, end in self._groups():
            pieces = []
            for entry, start, stop in zip(self.ranges, starts[:, begin], self.ends[:, end - 1], strict=True):
                pieces += [(a, min(a + PIECE, stop), entry) for a in range(start, stop, PIECE)]
            if end - begin == 1:
                for a, b, entry in pieces:
                    yield read_texts(entry, "texts", a, b), np.full(b - a, self.counts[begin])
                continue
            texts = pa.concat_arrays([read_texts(entry, "texts", a, b) for a, b, entry in pieces])
            counts = np.concatenate([np.repeat(self.counts[begin:end], sizes[begin:end]) for sizes in self.sizes])
            order = np.argsort(-counts, kind="stable")
            yield texts.take(pa.array(order)), counts[order]

    def _groups(self) -> Iterator[tuple[int, int]]:
        """Consecutive counts that together have about `PIECE` texts."""
        begin = held = 0
        for place, total in enumerate(self.totals.tolist()):
            if held and held + total > PIECE:
                yield begin, place
                begin, held = place, 0
            held += total
        if held:
            yield begin, len(self.totals)


def _between(texts: pa.Array, low: pa.Scalar | None, high: pa.Scalar | None) -> np.ndarray:
    """Places of the texts from `low` up to but without `high`; None is open."""
    inside = np.ones(len(texts), dtype=bool)
    if low is not None:
        inside &= pc.greater_equal(texts, low).to_numpy(zero_copy_only=False)
    if high is not None:
        inside &= pc.less(texts, high).to_numpy(zero_copy_only=False)
    return np.flatnonzero(inside)
