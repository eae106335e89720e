"""Writes that stop anywhere, documents that lie, and Arrow files that unpack to more than they are."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalarlens import storage
from scalarlens.errors import ArtifactError, DataError, UsageError
from scalarlens.storage import (
    as_stored,
    one_line,
    parse_json,
    read_arrow,
    read_json,
    replacing,
    replacing_folder,
    sha256_of,
    sha256_of_file,
    shown,
    to_json,
    write_arrow,
    write_atomic,
    write_json,
)

few_examples = settings(max_examples=60, deadline=None, derandomize=True, database=None)
OLD, NEW = b"old " * 500, b"new " * 900

Writer = Callable[[Path], None]


def contents(folder: Path) -> dict[str, Any]:
    """Everything below a folder, by name."""
    return {entry.name: contents(entry) if entry.is_dir() else entry.read_bytes() for entry in sorted(folder.iterdir())}


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, at: Callable[[int], None]) -> Iterator[None]:
    """Calls `at` with a running number before every system call that orders or publishes what was written."""
    steps, looking = iter(range(10**6)), []

    def watch(call: Callable[..., Any]) -> Callable[..., Any]:
        def watched_call(*args: Any, **options: Any) -> Any:
            if not looking:
                looking.append(True)
                at(next(steps))
                looking.clear()
            return call(*args, **options)

        return watched_call

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "open"):
            patch.setattr(os, name, watch(getattr(os, name)))
        yield


# files


def atomically(path: Path) -> None:
    write_atomic(path, NEW)


def in_place(path: Path) -> None:
    """A mutant: it writes where readers look."""
    with path.open("wb") as file:
        file.write(NEW[:100])
        file.flush()
        os.fsync(file.fileno())
        file.write(NEW[100:])


def removed_first(path: Path) -> None:
    """A mutant: for a moment there is no file."""
    partial = path.with_name("partial")
    partial.write_bytes(NEW)
    path.unlink()
    partial.replace(path)


def seen_while_writing(write: Writer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a reader would find at every step, and at the end."""
    (folder / "file").write_bytes(OLD)
    seen: list[dict[str, Any]] = []
    with watched(monkeypatch, lambda step: seen.append({p.name: p.read_bytes() for p in folder.glob("[!.]*")})):
        write(folder / "file")
    return [*seen, contents(folder)]


def test_a_reader_finds_the_old_file_or_the_new_one_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = seen_while_writing(atomically, tmp_path, monkeypatch)
    assert len(seen) >= 4
    assert all(found in ({"file": OLD}, {"file": NEW}) for found in seen)
    assert seen[-1] == {"file": NEW}


@pytest.mark.parametrize("mutant", [in_place, removed_first])
def test_the_check_of_every_step_rejects_other_ways_to_write(
    mutant: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = seen_while_writing(mutant, tmp_path, monkeypatch)
    assert not all(found in ({"file": OLD}, {"file": NEW}) for found in seen)


def steps_until_success(
    write: Writer, prepare: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> Iterator[Path]:
    """The path after a write whose first, second, ... call of these names failed, until a write succeeds."""
    for failing in range(50):
        path, calls = prepare(), iter(range(10**6))

        def broken(
            call: Callable[..., Any], calls: Iterator[int] = calls, failing: int = failing
        ) -> Callable[..., Any]:
            def broken_call(*args: Any, **options: Any) -> Any:
                if next(calls) == failing:
                    raise OSError(28, "No space left on device")
                return call(*args, **options)

            return broken_call

        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(os, name, broken(getattr(os, name)))
            try:
                write(path)
            except OSError:
                pass
            else:
                return
        yield path
    raise AssertionError("no write succeeded")


def test_a_failing_disk_leaves_the_old_file_or_the_new_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare() -> Path:
        (tmp_path / "file").write_bytes(OLD)
        return tmp_path / "file"

    outcomes = []
    for path in steps_until_success(atomically, prepare, monkeypatch, ("fsync", "replace")):
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
        outcomes.append(path.read_bytes())
    assert outcomes == [OLD, OLD, NEW]  # the content, the rename, the entry in the folder
    assert contents(tmp_path) == {"file": NEW}


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)

    def interrupted(partial: Path) -> None:
        partial.write_bytes(NEW[:10])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "file") as partial:
        interrupted(partial)
    assert contents(tmp_path) == {"file": OLD}


def test_a_link_in_the_way_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(OLD)
    (tmp_path / ".file.partial").symlink_to(tmp_path / "victim")
    write_atomic(tmp_path / "file", NEW)
    assert contents(tmp_path) == {"file": NEW, "victim": OLD}


# folders

OLD_FOLDER = {"a": OLD, "gone": b"1"}
NEW_FOLDER = {"a": NEW, "below": {"b": b"2"}}


def old_folder(parent: Path) -> Path:
    shutil.rmtree(parent, ignore_errors=True)
    (parent / "folder").mkdir(parents=True)
    for name, content in OLD_FOLDER.items():
        (parent / "folder" / name).write_bytes(content)
    return parent / "folder"


def fill(path: Path) -> None:
    with replacing_folder(path) as partial:
        (partial / "a").write_bytes(NEW)
        (partial / "below").mkdir()
        (partial / "below" / "b").write_bytes(b"2")


def test_at_every_step_a_folder_is_old_or_new_or_its_old_content_waits_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = old_folder(tmp_path / "parent")
    crashed = tmp_path / "crashed"
    crashed.mkdir()

    def copy(step: int) -> None:
        shutil.copytree(path.parent, crashed / str(step))

    with watched(monkeypatch, copy):
        fill(path)
    assert contents(path.parent) == {"folder": NEW_FOLDER}
    states = [contents(state) for state in crashed.iterdir()]
    assert len(states) > 8
    for state in states:
        if "folder" in state:
            assert state["folder"] in (OLD_FOLDER, NEW_FOLDER)
        else:
            assert state[".folder.retired"] == OLD_FOLDER
            assert state[".folder.partial"] == NEW_FOLDER
    assert any("folder" not in state for state in states)  # the documented moment is among the steps
    for state in crashed.iterdir():
        fill(state / "folder")
        assert contents(state) == {"folder": NEW_FOLDER}


def test_a_call_that_fails_after_a_crash_first_puts_the_old_folder_back(tmp_path: Path) -> None:
    old_folder(tmp_path / "parent").rename(tmp_path / "parent" / ".folder.retired")
    with pytest.raises(ZeroDivisionError), replacing_folder(tmp_path / "parent" / "folder"):
        raise ZeroDivisionError
    assert contents(tmp_path / "parent") == {"folder": OLD_FOLDER}


def test_a_failing_disk_leaves_the_old_folder_or_the_new_one_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    parent = tmp_path / "parent"
    for path in steps_until_success(fill, lambda: old_folder(parent), monkeypatch, ("fsync", "replace")):
        assert contents(path) in (OLD_FOLDER, NEW_FOLDER)
        outcomes.append(contents(path) == NEW_FOLDER)
        strays = {entry.name for entry in parent.iterdir()} - {"folder"}
        # With the new folder in place and not yet on disk, the old one is kept.
        assert strays == ({".folder.retired"} if outcomes[-1] else set())
    assert outcomes == sorted(outcomes)
    assert len(outcomes) == 7  # two files, two folders, two renames, the entry in the parent
    assert contents(parent) == {"folder": NEW_FOLDER}


def test_if_even_putting_back_fails_the_old_folder_is_kept_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace, calls = old_folder(tmp_path / "parent"), os.replace, iter(range(99))

    def broken(*args: Any) -> None:
        if next(calls) > 0:
            raise OSError(5, "Input/output error")
        replace(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", broken)
        with pytest.raises(OSError, match="Input/output"):
            fill(path)
    assert contents(path.parent) == {".folder.retired": OLD_FOLDER}
    with pytest.raises(ZeroDivisionError), replacing_folder(path):
        raise ZeroDivisionError
    assert contents(path.parent) == {"folder": OLD_FOLDER}


def test_a_folder_is_made_with_its_parents_and_written_through_a_link(tmp_path: Path) -> None:
    fill(tmp_path / "new" / "parent" / "folder")
    assert contents(tmp_path / "new" / "parent") == {"folder": NEW_FOLDER}
    (tmp_path / "link").symlink_to(old_folder(tmp_path / "old"))
    fill(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "old") == {"folder": NEW_FOLDER}


def test_a_file_where_a_folder_is_to_be_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").write_bytes(OLD)
    with pytest.raises(UsageError, match="is not a folder"):
        fill(tmp_path / "folder")
    assert contents(tmp_path) == {"folder": OLD}


# JSON

JSON_DOCUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@few_examples
@given(JSON_DOCUMENTS)
def test_a_document_comes_back_as_it_was_and_in_the_same_bytes(document: dict[str, Any]) -> None:
    content = to_json(document).encode()
    found = parse_json(content, "it")
    assert parse_json(json.dumps(document).encode(), "it") == document  # with escapes for all but ASCII
    assert found == document == as_stored(document)
    assert to_json(found).encode() == content
    assert to_json(dict(reversed(document.items()))).encode() == content


BAD_JSON = {
    "empty": (b"", "Expecting value"),
    "two documents": (b"{} {}", "Extra data"),
    "a list": (b"[1]", "holds a list"),
    "a key twice": (b'{"a": 1, "b": 2, "a": 1}', "a key occurs twice"),
    "a key twice below": (b'{"a": [{"b": 1, "b": 2}]}', "a key occurs twice"),
    "NaN": (b'{"a": NaN}', "it holds NaN"),
    "-Infinity": (b'{"a": [-Infinity]}', "it holds -Infinity"),
    "a float beyond float64": (b'{"a": 1e999}', "no float64 can hold"),
    "an integer of 5000 digits": (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
    "deep lists": (b'{"a": ' + b"[" * 10**6 + b"]" * 10**6 + b"}", "recursion"),
    "deep objects": (b'{"a": ' * 10**5 + b"1" + b"}" * 10**5, "recursion"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "utf-8"),
    "UTF-32": ('{"a": 1}'.encode("utf-32-le"), "."),
    "a byte-order mark": ('{"a": 1}'.encode("utf-8-sig"), "BOM"),
    "not UTF-8": (b'{"a": "\xff"}', "utf-8"),
    "half a surrogate pair": (b'{"a": ["\\uD800"]}', "surrogates not allowed"),
    "half a surrogate pair as a key": (b'{"\\udfff": 1}', "surrogates not allowed"),
    "a control character": (b'{"a": "\n"}', "control character"),
    "cut": (b'{"a": 1', "delimiter"),
}


@pytest.mark.parametrize(("content", "reason"), BAD_JSON.values(), ids=BAD_JSON)
def test_a_document_that_cannot_be_trusted_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "it.json").write_bytes(content)
    for refuse in (ArtifactError, DataError):
        with pytest.raises(refuse, match=f"it.json is not a JSON object that can be trusted: .*{reason}") as caught:
            read_json(tmp_path / "it.json", refuse)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500


def test_json_of_the_standard_library_alone_would_take_most_of_them() -> None:
    taken = set()
    for name, (content, _) in BAD_JSON.items():
        try:
            json.loads(content)
        except (ValueError, RecursionError):
            continue
        taken.add(name)
    assert taken >= {"a list", "a key twice", "NaN", "a float beyond float64", "UTF-16", "UTF-32", "a byte-order mark"}


def test_a_document_beyond_the_size_limit_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "it.json", {"a": 1})
    assert read_json(tmp_path / "it.json") == {"a": 1}
    monkeypatch.setattr(storage, "MAX_JSON_BYTES", 10)
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(ArtifactError, match="larger than the 10 bytes"):
        read_json(tmp_path / "it.json")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            read_json(path, DataError)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_written(value: float, tmp_path: Path) -> None:
    write_json(tmp_path / "it.json", {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "it.json", {"a": [value]})
    assert read_json(tmp_path / "it.json") == {"a": 1}


# messages and digests


def test_what_a_message_shows_is_short_and_printable() -> None:
    hostile = ["\x1b[2J", "a\nb", "x" * 10**6, "\u202e", *"abcdef"]
    line = shown(*hostile)
    assert line.isprintable()
    assert len(line) < 300
    assert line.endswith("and 5 more")
    error = one_line(ValueError("first\nsecond \x1b[31m" + "y" * 10**6))
    assert error.startswith("first second ?[31my")
    assert error.isprintable()
    assert len(error) < 250


@few_examples
@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_digests_of_texts_tell_where_one_ends(left: list[str], right: list[str]) -> None:
    assert (sha256_of(*left) == sha256_of(*right)) == (left == right)


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    # FIPS 180-2, appendix B.1
    assert sha256_of_file(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


# Arrow

SCHEMA = pa.schema([("number", pa.float64()), ("text", pa.string()), ("list", pa.list_(pa.float64()))])


def table_of(rows: list[tuple[float | None, str | None, list[float]]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    return pa.table([pa.array(c, t) for c, t in zip(columns, SCHEMA.types, strict=True)], schema=SCHEMA)


def written(path: Path, table: pa.Table, chunk: int | None = None, **options: Any) -> Path:
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return path


finite = st.floats(allow_nan=False)
cells = st.tuples(st.none() | finite, st.none() | st.text(max_size=4), st.lists(finite, max_size=3))


@few_examples
@given(st.lists(cells, max_size=8))
def test_a_table_comes_back_as_it_was(rows: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_arrow(Path(folder, "it.arrow"), table_of(rows))
        assert read_arrow(Path(folder, "it.arrow"), SCHEMA).equals(table_of(rows))
        assert [entry.name for entry in Path(folder).iterdir()] == ["it.arrow"]


SMALL = [(float(i), f"t{i}", [1.0, 2.0]) for i in range(6)]


def test_a_table_in_several_batches_comes_back_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "it.arrow", table_of(SMALL), chunk=2)
    assert read_arrow(path, SCHEMA).equals(table_of(SMALL))


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_content_is_refused_before_it_is_unpacked(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = pa.schema([("number", pa.float64())])
    table = pa.table([pa.array([0.0] * 500_000)], schema=schema)
    path = written(tmp_path / "it.arrow", table, compression=codec)
    assert path.stat().st_size * 20 < table.nbytes
    before = pa.total_allocated_bytes()
    with pytest.raises(ArtifactError, match=r"it.arrow is not an intact Arrow file: it is compressed"):
        read_arrow(path, schema)
    assert pa.total_allocated_bytes() - before < 1 << 16
    monkeypatch.setattr(storage, "_names_codec", lambda metadata: False)  # the mutant unpacks it
    assert read_arrow(path, schema).equals(table)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "it.arrow", table_of(SMALL), chunk=3)
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(ArtifactError, match=r"it\.arrow is not an intact Arrow file"):
            read_arrow(path, SCHEMA)


def test_a_stream_that_ends_before_its_footer_says_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "it.arrow", table_of(SMALL), chunk=3)
    content = path.read_bytes()
    second = [i for i in range(0, len(content), 8) if content[i : i + 4] == b"\xff" * 4][2]
    path.write_bytes(content[:second] + b"\xff\xff\xff\xff\0\0\0\0" + content[second + 8 :])
    with pytest.raises(ArtifactError, match="its footer does not describe its content"):
        read_arrow(path, SCHEMA)


def test_another_schema_is_refused_with_the_callers_error(tmp_path: Path) -> None:
    for other in (
        pa.schema([*SCHEMA, ("more", pa.int8())]),
        pa.schema([SCHEMA[1], SCHEMA[0], SCHEMA[2]]),
        pa.schema([("number", pa.float32()), SCHEMA[1], SCHEMA[2]]),
        pa.schema([("number", pa.dictionary(pa.int8(), pa.float64())), SCHEMA[1], SCHEMA[2]]),
    ):
        path = written(tmp_path / "it.arrow", other.empty_table())
        with pytest.raises(DataError, match="holds other columns than number, text, list"):
            read_arrow(path, SCHEMA, DataError)


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_a_pickled_extension_type_is_not_unpickled(tmp_path: Path) -> None:
    payload = pickle.dumps(Payload(tmp_path / "marker"))
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": payload}
    table = table_of(SMALL).cast(pa.schema([SCHEMA[0].with_metadata(metadata), SCHEMA[1], SCHEMA[2]]))
    path = written(tmp_path / "it.arrow", table)
    assert payload in path.read_bytes()
    with pytest.raises(ArtifactError, match="holds other columns"):
        read_arrow(path, SCHEMA)
    assert not (tmp_path / "marker").exists()
    pickle.loads(payload)
    assert (tmp_path / "marker").exists()


def test_text_that_is_not_utf8_and_lists_beyond_their_values_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "it.arrow", table_of([(1.0, "abcdefg", [4.0, 5.0])]))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"abcdefg", b"abc\xff\xfeg."))
    with pytest.raises(ArtifactError, match="Invalid UTF8"):
        read_arrow(path, SCHEMA)
    offsets = (0).to_bytes(4, "little") + (2).to_bytes(4, "little")
    assert content.count(offsets) >= 1
    path.write_bytes(content.replace(offsets, (0).to_bytes(4, "little") + (2**30).to_bytes(4, "little")))
    with pytest.raises(ArtifactError, match="is not an intact Arrow file"):
        read_arrow(path, SCHEMA)
