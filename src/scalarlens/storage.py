"""Files that are never half written and never trusted blindly: atomic writes, strict JSON, digests."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from scalarlens.errors import ArtifactError, ScalarLensError

#: no JSON document of ours comes near this size
MAX_JSON_BYTES = 64 << 20


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part, at any moment of a crash."""
    with replacing(path) as partial:
        partial.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary sibling to write to; on success it is flushed to disk and takes the place of `path`."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        _flush(partial)
        partial.replace(path)
        _flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary sibling folder to fill; on success it takes the place of `path`, which must be ours to replace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, retired = (path.with_name(f".{path.name}.{role}") for role in ("partial", "retired"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for file in partial.rglob("*"):
            _flush(file)
        if path.exists():
            shutil.rmtree(retired, ignore_errors=True)
            path.replace(retired)
        partial.replace(path)
        _flush(path.parent)
        shutil.rmtree(retired, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(document: Any) -> str:
    """Canonical JSON: sorted keys, two spaces, no NaN.

    >>> to_json({"b": 1, "a": [0.5]})
    '{\\n  "a": [\\n    0.5\\n  ],\\n  "b": 1\\n}\\n'
    """
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, document: Any) -> None:
    write_atomic(path, to_json(document).encode())


def read_json(path: Path, refuse: type[ScalarLensError] = ArtifactError) -> dict[str, Any]:
    """A JSON object; duplicate keys, NaN, other encodings and oversized or deeply nested documents are refused."""

    def refused(reason: object) -> ScalarLensError:
        return refuse(f"{path} is not a JSON object that can be trusted: {reason}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            raise refused("a key occurs twice")
        return dict(pairs)

    def no_constant(name: str) -> Any:
        raise refused(f"it holds {name}")

    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise refused(f"it is larger than {MAX_JSON_BYTES} bytes")
        document = json.loads(path.read_bytes(), object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError, OSError) as error:
        raise refused(error) from error
    if not isinstance(document, dict):
        raise refused(f"it holds a {type(document).__name__}")
    return document


def sha256_of(*parts: str) -> str:
    """Digest of several texts; where one ends and the next begins counts."""
    sha = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        sha.update(f"{len(encoded)}:".encode() + encoded)
    return sha.hexdigest()


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_arrow(path: Path, table: pa.Table) -> None:
    """An Arrow IPC file."""
    with replacing(path) as partial, pa.ipc.new_file(partial, table.schema) as writer:
        writer.write_table(table)


def read_arrow(path: Path, schema: pa.Schema, refuse: type[ScalarLensError] = ArtifactError) -> pa.Table:
    """An Arrow IPC file that has exactly this schema and passes Arrow's full validation."""
    try:
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        if table.schema.equals(schema):
            table.validate(full=True)
            return table
    except (pa.ArrowException, OSError) as error:
        raise refuse(f"{path} is not an intact Arrow file: {error}") from error
    raise refuse(f"{path} holds the columns {table.schema.names}; expected {schema.names} of the declared types")
