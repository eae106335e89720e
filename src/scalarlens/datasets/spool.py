"""What preparation leaves on disk between its stages: files of named arrays, in a folder that knows its command."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from scalarlens.errors import DataError, UsageError
from scalarlens.storage import read_json, replacing, write_json

#: a file of arrays starts with the length of its table of contents
_HEAD = np.dtype("<u8")
_ALIGNMENT = 64


class Work:
    """The folder of a preparation that is not finished yet; it stands beside the folder that will hold the result.

    What it holds serves one command alone: found with another identity, it is emptied. Every file appears whole
    or not at all, so that a file which exists need not be made again. One process at a time has the folder; the
    system gives it free when that process dies.
    """

    IDENTITY_FILE = "identity.json"

    def __init__(self, out: Path) -> None:
        self._out = out
        self.folder = out.with_name(f".{out.name}.work")

    def __enter__(self) -> Work:
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise UsageError(f"{self.folder} is in the way of the work folder of this preparation; remove it")
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_locked():
                    return self
            except BlockingIOError:
                os.close(self._lock)
                raise UsageError(f"another process prepares {self._out}; wait until it has ended") from None
            os.close(self._lock)

    def _is_locked(self) -> bool:
        """False where the process that had the folder has removed it in the meantime."""
        return self.folder.exists() and os.path.samestat(os.fstat(self._lock), self.folder.stat())

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def claim(self, identity: str) -> None:
        """Keep what a run with this identity left, or begin with an empty folder."""
        known = self.folder / self.IDENTITY_FILE
        if not known.exists() or read_json(known, UsageError) != {"identity": identity}:
            # The identity goes first: what is left is then nobody's.
            known.unlink(missing_ok=True)
            for entry in self.folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            write_json(known, {"identity": identity})

    def path(self, name: str) -> Path:
        return self.folder / name

    def release(self) -> None:
        """From here on nothing is continued: what is left in the folder is refuse."""
        (self.folder / self.IDENTITY_FILE).unlink()

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray], notes: Mapping[str, Any] | None = None) -> None:
    """Write a file of named arrays with a few notes, whole or not at all.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_arrays(Path(folder, "a"), {"counts": np.array([3, 4, 5])}, {"rows": 12})
    ...     found = Arrays(Path(folder, "a"))
    ...     found.notes, found.read("counts", 1, 3).tolist()
    ({'rows': 12}, [4, 5])
    """
    with replacing(path) as partial:
        write_arrays(partial, arrays, notes)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], notes: Mapping[str, Any] | None = None) -> None:
    """The same file, for what is made anew after a crash."""
    contents, offset = {}, 0
    for name, array in arrays.items():
        contents[name] = {"type": array.dtype.str, "shape": array.shape, "offset": offset}
        offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    head = json.dumps({"arrays": contents, "notes": notes or {}}).encode()
    with path.open("wb") as file:
        file.write(np.array(len(head), _HEAD).tobytes() + head)
        for array in arrays.values():
            content = np.ascontiguousarray(array)
            file.write(content.data.cast("B") if content.nbytes else b"")
            file.write(bytes(-content.nbytes % _ALIGNMENT))


class Arrays:
    """A file of named arrays; the table of contents is read once, arrays as they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _head(self) -> tuple[dict[str, Any], int]:
        with self.path.open("rb") as file:
            length = int(np.frombuffer(file.read(_HEAD.itemsize), _HEAD)[0])
            return json.loads(file.read(length)), _HEAD.itemsize + length

    @property
    def notes(self) -> dict[str, Any]:
        notes: dict[str, Any] = self._head[0]["notes"]
        return notes

    @property
    def names(self) -> list[str]:
        return list(self._head[0]["arrays"])

    def __contains__(self, name: str) -> bool:
        return name in self._head[0]["arrays"]

    def size(self, name: str) -> int:
        """Length of the first axis."""
        return int(self._head[0]["arrays"][name]["shape"][0])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A copy of `array[start:stop]`."""
        entry = self._head[0]["arrays"][name]
        rows, *rest = entry["shape"]
        stop = rows if stop is None else stop
        width = int(np.prod(rest, dtype=np.int64))
        kind = np.dtype(entry["type"])
        offset = self._head[1] + entry["offset"] + start * width * kind.itemsize
        found = np.fromfile(self.path, kind, count=(stop - start) * width, offset=offset)
        if len(found) != (stop - start) * width:
            raise DataError(f"{self.path} is cut short; remove {self.path.parent} and prepare again")
        return found.reshape(stop - start, *rest)


def text_arrays(name: str, texts: pa.Array) -> dict[str, np.ndarray]:
    """A string array without nulls as the two arrays that `read_texts` puts together again."""
    if not len(texts):
        return {f"{name}.bounds": np.zeros(1, np.int32), f"{name}.bytes": np.empty(0, np.uint8)}
    bounds = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    content = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[bounds[0] : bounds[-1]]
    return {f"{name}.bounds": bounds - bounds[0], f"{name}.bytes": content}


def read_texts(arrays: Arrays, name: str, start: int = 0, stop: int | None = None) -> pa.Array:
    """Texts of a file of arrays, from `start` to `stop`."""
    stop = arrays.size(f"{name}.bounds") - 1 if stop is None else stop
    bounds = arrays.read(f"{name}.bounds", start, stop + 1)
    content = arrays.read(f"{name}.bytes", int(bounds[0]), int(bounds[-1]))
    buffers = [None, pa.py_buffer(bounds - bounds[0]), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.string(), stop - start, buffers)
