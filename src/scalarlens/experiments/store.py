"""A folder of run records: one file per run, named by its digest, written last and never trusted blindly."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalarlens.errors import ArtifactError, ScalarLensError, UsageError
from scalarlens.experiments.spec import RunRecord, RunSpec
from scalarlens.storage import as_stored, one_line, read_json, shown, write_json

RECORD_SUFFIX = ".record.json"
REQUESTED_FILE = "requested.json"
LOCK_FILE = ".lock"
FORMAT = 1


@dataclass(frozen=True)
class Requested:
    """A run that a study asked for, and the names under which the study shows it."""

    spec: RunSpec
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """What a study asked a store for: its options, and its runs in their order."""

    study: str
    options: dict[str, Any]
    runs: tuple[Requested, ...]


class RunStore:
    """Records by digest, safe for many processes on one folder; what is not a whole record of ours is refused.

    >>> import tempfile
    >>> RunStore(tempfile.mkdtemp()).records()
    []
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"{self.folder} is a file; a store of runs is a folder")

    def path(self, digest: str) -> Path:
        return self.folder / f"{digest}{RECORD_SUFFIX}"

    def records(self) -> list[RunRecord]:
        """All records, in the order of their digests."""
        return [read_record(path) for path in sorted(self.folder.glob(f"*{RECORD_SUFFIX}"))]

    def find(self, spec: RunSpec) -> RunRecord | None:
        """The record of a run, or None where there is none yet."""
        path = self.path(spec.digest)
        return read_record(path) if path.exists() else None

    def missing(self, specs: Iterable[RunSpec]) -> list[RunSpec]:
        """Those without a record, each once, in their order."""
        return [spec for spec in dict.fromkeys(specs) if self.find(spec) is None]

    def unfinished(self, specs: Iterable[RunSpec]) -> list[RunSpec]:
        """What is left to run: those without a record, and those that failed and may be tried again."""
        return [spec for spec in dict.fromkeys(specs) if not is_finished(self.find(spec))]

    def standing(self, specs: Iterable[RunSpec]) -> dict[str, int]:
        """How many runs are done, failed and missing."""
        counts = {"done": 0, "failed": 0, "missing": 0}
        for spec in dict.fromkeys(specs):
            record = self.find(spec)
            counts["missing" if record is None else record.status] += 1
        return counts

    def put(self, record: RunRecord) -> RunRecord:
        """Keep a record, and return the one that stands: what is finished is not replaced, whoever comes later."""
        with self._locked():
            standing = self.find(record.spec)
            if standing is not None and not _supersedes(record, standing):
                return standing
            write_json(self.path(record.spec.digest), record.to_document())
        return record

    def request(self, study: str, runs: Sequence[Requested], options: dict[str, Any]) -> Request:
        """Note what a study asks for, beside what it asked for before; returns all of it.

        A store serves a study under one set of options: results of two protocols must not meet in one table.
        """
        with self._locked():
            requests = {request.study: request for request in self.requests()}
            asked = Request(study, as_stored(options), tuple(runs))
            requests[study] = _joined(requests[study], asked, self.folder) if study in requests else asked
            self._write_requests(requests.values())
        return requests[study]

    def requests(self) -> list[Request]:
        """What studies asked this store for."""
        path = self.folder / REQUESTED_FILE
        if not path.exists():
            return []
        document = read_json(path)
        try:
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {shown(document['format'])}, and this version reads {FORMAT}")
            return [_request_of(study, entry) for study, entry in document["studies"].items()]
        except (ScalarLensError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArtifactError(f"{path} is no list of requested runs of this version: {one_line(error)}") from error

    def requested(self, study: str) -> Request | None:
        """What one study asked for, or None where it never did."""
        return next((request for request in self.requests() if request.study == study), None)

    def _write_requests(self, requests: Iterable[Request]) -> None:
        studies = {
            request.study: {
                "options": request.options,
                "runs": [{"labels": run.labels, "spec": run.spec.to_tables()} for run in request.runs],
            }
            for request in requests
        }
        write_json(self.folder / REQUESTED_FILE, {"format": FORMAT, "studies": studies})

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among the writers of the folder; the system lifts the lock when a process dies."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK_FILE).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def is_finished(record: RunRecord | None) -> bool:
    """Whether a run, by its record if it has one, leaves nothing to do."""
    return record is not None and record.finished


def read_record(path: Path) -> RunRecord:
    """The record in a file that carries its digest as a name."""
    record = RunRecord.from_document(read_json(path), str(path))
    if path.name != f"{record.spec.digest}{RECORD_SUFFIX}":
        raise ArtifactError(f"{path} holds the record of another run, {record.spec.digest}; remove it")
    return record


def merge(sources: Sequence[str | Path], into: str | Path) -> dict[str, int]:
    """Join stores; nothing is written unless all of it fits together.

    Two done records of one run must have the same results, and the first one stays. A done record takes the place
    of a failed one, as a second attempt does.
    """
    target = RunStore(into)
    stores = [target, *(_existing(Path(source)) for source in sources)]
    kept: dict[str, RunRecord] = {}
    conflicts = []
    for store in stores:
        for record in store.records():
            digest = record.spec.digest
            other = kept.setdefault(digest, record)
            if other.status == record.status == "done" and not _same_results(other, record):
                conflicts.append(f"{record.spec} in {store.folder}")
            if _supersedes(record, other):
                kept[digest] = record
    if conflicts:
        raise ArtifactError(
            f"{len(conflicts)} run{'s' * (len(conflicts) > 1)} ended with different results in different stores: "
            f"{'; '.join(conflicts[:5])}; remove the records that are not to count"
        )
    requests: dict[str, Request] = {}
    for store in stores:
        for request in store.requests():
            before = requests.get(request.study)
            requests[request.study] = request if before is None else _joined(before, request, store.folder)
    for request in requests.values():
        target.request(request.study, request.runs, request.options)
    for record in kept.values():
        target.put(record)
    return {"records": len(kept), "failed": sum(record.status == "failed" for record in kept.values())}


def _existing(folder: Path) -> RunStore:
    store = RunStore(folder)
    if not (folder / REQUESTED_FILE).exists() and not any(folder.glob(f"*{RECORD_SUFFIX}")):
        raise UsageError(f"{folder} holds no runs: it has neither a *{RECORD_SUFFIX} nor a {REQUESTED_FILE}")
    return store


def _supersedes(record: RunRecord, standing: RunRecord) -> bool:
    """Whether a record takes the place of another one of the same run."""
    if standing.status == "done":
        return False
    return record.status == "done" or record.attempts > standing.attempts


def _same_results(one: RunRecord, other: RunRecord) -> bool:
    return json.dumps(as_stored({"": one.results})) == json.dumps(as_stored({"": other.results}))


def _joined(before: Request, added: Request, folder: Path) -> Request:
    """The runs of two requests of one study, which must have the same options."""
    names = sorted(before.options.keys() | added.options.keys())
    differing = [name for name in names if before.options.get(name) != added.options.get(name)]
    if differing:
        raise UsageError(
            f"{folder}: {before.study} was asked for with another {', '.join(differing)} than now; "
            "use the same options, or another store"
        )
    runs = {run.spec: run for run in (*before.runs, *added.runs)}
    return Request(before.study, before.options, tuple(runs.values()))


def _request_of(study: str, entry: dict[str, Any]) -> Request:
    runs = [Requested(RunSpec.from_tables(run["spec"]), dict(run["labels"])) for run in entry["runs"]]
    return Request(study, dict(entry["options"]), tuple(runs))
