"""Files that are never half written and never trusted blindly: atomic writes, strict JSON, digests."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from scalarlens.errors import ArtifactError, ScalarLensError, UsageError

#: no JSON document of ours comes near this size
MAX_JSON_BYTES = 64 << 20
#: how an Arrow file starts, before the stream of messages in it
ARROW_MAGIC = b"ARROW1\0\0"
#: where Arrow's Message.fbs keeps the header of a message, and the codec of a record batch in it
HEADER_SLOT, COMPRESSION_SLOT = 2, 3


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part, at any moment of a crash."""
    with replacing(path) as partial:
        partial.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary sibling to write to; on success it is flushed to disk and takes the place of `path`."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # what a crash left, or a link that would lead the content elsewhere
    try:
        yield partial
        _flush(partial)
        partial.replace(path)
        _flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary sibling folder to fill; on success it takes the place of `path`, which must be ours to replace.

    Two renames make the exchange, so for a moment nothing is at `path`. If the second one fails, the old folder
    is put back; if the machine stops between them, the old folder waits as `.NAME.retired` for the next call.
    """
    path = path.resolve()
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is not a folder; give a path where one can be written")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, retired = (path.with_name(f".{path.name}.{role}") for role in ("partial", "retired"))
    if retired.exists() and not path.exists():
        retired.replace(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for entry in (*partial.rglob("*"), partial):
            _flush(entry)
        _exchange(partial, path, retired)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _exchange(partial: Path, path: Path, retired: Path) -> None:
    shutil.rmtree(retired, ignore_errors=True)
    replaced = path.exists()
    if replaced:
        path.replace(retired)
    try:
        partial.replace(path)
    except BaseException:
        if replaced:
            retired.replace(path)
        raise
    _flush(path.parent)
    shutil.rmtree(retired, ignore_errors=True)


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


def as_stored(document: dict[str, Any]) -> dict[str, Any]:
    """A document as it comes back from its file: lists for tuples, keys in their order there.

    >>> as_stored({"b": (1, 2), "a": 0})
    {'a': 0, 'b': [1, 2]}
    """
    return parse_json(to_json(document).encode(), "document")


def write_json(path: Path, document: Any) -> None:
    write_atomic(path, to_json(document).encode())


def read_json(path: Path, refuse: type[ScalarLensError] = ArtifactError) -> dict[str, Any]:
    """The JSON object in a file, as `parse_json` reads it."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise refuse(f"{path} is larger than the {MAX_JSON_BYTES} bytes that a JSON document may have")
        content = path.read_bytes()
    except OSError as error:
        raise refuse(f"{path} cannot be read: {one_line(error)}") from error
    return parse_json(content, str(path), refuse)


def parse_json(content: bytes, source: str, refuse: type[ScalarLensError] = ArtifactError) -> dict[str, Any]:
    """A JSON object in UTF-8; duplicate keys, numbers that are not finite and deep nesting are refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        document = dict(pairs)
        if len(document) != len(pairs):
            raise ValueError("a key occurs twice")
        return document

    def no_constant(name: str) -> Any:
        raise ValueError(f"it holds {name}")

    def finite(text: str) -> float:
        if not math.isfinite(number := float(text)):
            raise ValueError(f"it holds {shown(text)}, which no float64 can hold")
        return number

    try:
        text = content.decode("utf-8")
        document = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant, parse_float=finite)
        if not isinstance(document, dict):
            raise ValueError(f"it holds a {type(document).__name__}")
        if "\\ud" in text.lower():
            to_json(document).encode()  # half of a surrogate pair is no text, and is found here
    except (ValueError, RecursionError) as error:
        raise refuse(f"{source} is not a JSON object that can be trusted: {one_line(error)}") from error
    return document


def shown(*values: Any) -> str:
    """A few values as a message may show them, whatever a foreign file holds.

    >>> shown("a\\nb", "x" * 99)
    "'a\\\\nb', 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    cut = [text if len(text) <= 40 else f"{text[:40]}..." for text in map(repr, values[:5])]
    return ", ".join(cut) + (f" and {len(values) - 5} more" if len(values) > 5 else "")


def one_line(error: Exception) -> str:
    """What an error says, as one short line without control characters."""
    line = " ".join(str(error).split())
    return "".join(c if c.isprintable() else "?" for c in line[:200]) + "..." * (len(line) > 200)


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
    """An Arrow IPC file that has exactly this schema and passes Arrow's full validation.

    Compressed content is refused before it is unpacked, and nothing is read twice: the table is no larger than
    the file.
    """
    try:
        content = path.read_bytes()
        if not content.startswith(ARROW_MAGIC):
            raise ValueError("it does not start as one")
        footer = pa.ipc.open_file(pa.py_buffer(content))
        if not footer.schema.equals(schema, check_metadata=True):
            raise refuse(f"{path} holds other columns than {', '.join(schema.names)} of the declared types")
        batches = list(_record_batches(content, schema))
        if len(batches) != footer.num_record_batches:
            raise ValueError("its footer does not describe its content")
        table = pa.Table.from_batches(batches, schema)
        table.validate(full=True)
    except (pa.ArrowException, ValueError, OSError, struct.error) as error:
        raise refuse(f"{path} is not an intact Arrow file: {one_line(error)}") from error
    return table


def _record_batches(content: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    stream = pa.py_buffer(content).slice(len(ARROW_MAGIC))
    messages = iter(pa.ipc.MessageReader.open_stream(pa.BufferReader(stream)))
    next(messages, None)  # the schema, which the footer repeats
    for message in messages:
        if message.type != "record batch":
            raise ValueError(f"it holds a {message.type} message")
        if _names_codec(memoryview(message.metadata)):
            raise ValueError("it is compressed")
        yield pa.ipc.read_record_batch(message, schema)


def _names_codec(metadata: memoryview) -> bool:
    """Whether a record batch says that its body is compressed; PyArrow would tell after unpacking it."""
    message = struct.unpack_from("<I", metadata)[0]
    header = _slot(metadata, message, HEADER_SLOT)
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    return _slot(metadata, batch, COMPRESSION_SLOT) != 0


def _slot(buffer: memoryview, table: int, index: int) -> int:
    """Where a FlatBuffers table keeps a field, 0 if it has none: a table starts with the way back to its slots."""
    slots = table - struct.unpack_from("<i", buffer, table)[0]
    length = struct.unpack_from("<H", buffer, slots)[0]
    entry = 4 + 2 * index
    offset = struct.unpack_from("<H", buffer, slots + entry)[0] if entry < length else 0
    return table + offset if offset else 0
