"""A prepared table on disk: packed splits, the training statistics, the schema, and a manifest written last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalarlens.errors import DataError, UsageError, unknown_name
from scalarlens.storage import read_json, sha256_of, write_json
from scalarlens.table.schema import Schema
from scalarlens.table.statistics import TrainingStatistics
from scalarlens.table.stored import load_statistics

if TYPE_CHECKING:
    from torch import Tensor

    from scalarlens.table.batches import PackedSplit

MANIFEST_FILE = "manifest.json"
FORMAT = 1


class PreparedTable:
    """What `scalarlens prepare` leaves in a folder; opening it maps files and reads no rows."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST_FILE
        if not path.exists():
            raise DataError(f"{self.folder} holds no prepared table (no {MANIFEST_FILE}); run `scalarlens prepare`")
        self.manifest = read_json(path, DataError)
        if self.manifest.get("format") != FORMAT:
            raise DataError(f"{path} has format {self.manifest.get('format')!r}; this version reads {FORMAT}")
        self.schema = Schema.from_tables(self.manifest["schema"], str(path))

    @cached_property
    def statistics(self) -> TrainingStatistics:
        """The training statistics, read when they are first asked for: a large vocabulary takes memory."""
        statistics = load_statistics(self.folder, self.splits["train"]["rows"], DataError)
        if statistics.digest() != self.manifest["statistics_digest"]:
            raise DataError(f"{self.folder}: the statistics are not those of the manifest; prepare the table again")
        return statistics

    @property
    def splits(self) -> dict[str, Any]:
        splits: dict[str, Any] = self.manifest["splits"]
        return splits

    @property
    def digest(self) -> str:
        """Digest of everything in the folder."""
        digests = (f"{name} {split['digest']}" for name, split in sorted(self.splits.items()))
        return sha256_of(self.training_digest, *digests)

    @property
    def training_digest(self) -> str:
        """Digest of what training may see before model selection: schema, statistics, training rows."""
        return sha256_of(self.schema.digest(), self.manifest["statistics_digest"], self.splits["train"]["digest"])

    def split(self, name: str, scale: Callable[[Tensor], Tensor] | None = None) -> PackedSplit:
        """One split; `scale` is applied to the values of each batch."""
        # Imported late, because whoever only prepares a table has no use for PyTorch, which is slow to load.
        from scalarlens.table.batches import PackedSplit, open_blocks

        if name not in self.splits:
            raise unknown_name(f"split of {self.folder}", name, self.splits)
        blocks = open_blocks(self.folder / name, self.splits[name])
        if self.splits[name]["rows"] == 0:
            raise DataError(f"the {name} split of {self.folder} has no rows")
        return PackedSplit(blocks, len(self.schema.numeric), len(self.schema.categorical), scale)


def write_manifest(
    folder: Path,
    schema: Schema,
    statistics_digest: str,
    splits: dict[str, Any],
    origin: Mapping[str, Any] | None = None,
) -> None:
    """The manifest; `origin` says where the rows come from, and is in no digest."""
    write_json(
        folder / MANIFEST_FILE,
        {
            "format": FORMAT,
            "schema": schema.to_tables(),
            "statistics_digest": statistics_digest,
            "splits": splits,
            **({"origin": dict(origin)} if origin else {}),
        },
    )


def refuse_foreign_folder(folder: Path) -> None:
    """An output folder is replaced only if it is empty or holds a prepared table; through a link, where it leads."""
    if folder.is_symlink() and not folder.exists():
        raise UsageError(f"{folder} is a link to {folder.readlink()}, which does not exist; remove it")
    if folder.is_file():
        raise UsageError(f"{folder} is a file; --out names a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST_FILE).exists():
        raise UsageError(f"{folder} is not empty and holds no prepared table; choose another --out")
