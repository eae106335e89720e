"""Many runs into one store: in this process, in a pool of processes, or on a Ray cluster.

Every runner is a crew of workers under one loop. Workers hold the tables and return records; the loop alone
decides what runs next and writes, so that a worker that dies takes nothing with it but the run in its hands.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from scalarlens.cluster import cores, ensure_ray, import_ray
from scalarlens.errors import CheckFailed, UsageError, unknown_name
from scalarlens.experiments.execute import Execution, SharedTables, execute, machine, versions
from scalarlens.experiments.spec import ATTEMPTS, RunRecord, RunSpec
from scalarlens.experiments.store import RunStore, is_finished

#: so many workers in a row may die before they are ready; then it is not bad luck
STILLBORN = 3
#: seconds that a worker has to end by itself
PATIENCE = 5.0


@dataclass(frozen=True)
class Event:
    """What has happened to one run; `lost` is a run whose worker died, and `pid` the process that has or had it."""

    state: Literal["started", "done", "failed", "lost"]
    spec: RunSpec
    done: int
    total: int
    pid: int | None


@dataclass(frozen=True)
class Lost:
    """A worker died; `began` says whether it had begun to work before."""

    began: bool


class Crew(Protocol):
    """Workers of one kind: hired, given one run at a time, waited for, and dismissed."""

    def hire(self) -> Any: ...

    def assign(self, worker: Any, spec: RunSpec, attempt: int) -> int | None: ...

    def wait(self, busy: Collection[Any]) -> tuple[Any, RunRecord | Lost]: ...

    def dismiss(self, worker: Any) -> None: ...

    def close(self) -> None: ...


def run(
    specs: Iterable[RunSpec],
    store: RunStore,
    tables: Iterable[str | Path],
    *,
    device: torch.device | str,
    runner: str = "local",
    jobs: int = 1,
    threads: int | None = None,
    way: str = "eager",
    tell: Callable[[Event], None] | None = None,
) -> dict[str, int]:
    """Run what the store does not hold yet, and say how all of it stands then.

    `tables` are folders of prepared tables; on a cluster each machine has them under the same paths. `jobs` workers
    compute on `threads` threads each, by default the cores of this machine shared out. Ray starts on this machine,
    or joins the cluster that the environment variable RAY_ADDRESS names.
    """
    if runner not in CREWS:
        raise unknown_name("runner", runner, CREWS)
    if runner == "local" and jobs != 1:
        raise UsageError(f"the local runner has one job, this process; got {jobs}; --runner pool has several")
    specs, folders = list(dict.fromkeys(specs)), [str(Path(folder).resolve()) for folder in tables]
    shared_out = max(1, cores() // max(1, jobs))
    execution = Execution(str(device), shared_out if threads is None else threads, runner, jobs, way)
    _check(specs, folders)
    waiting = store.unfinished(specs)
    if waiting:
        crew = CREWS[runner](folders, execution)
        try:
            _Shift(crew, store, execution, len(waiting), tell).work(waiting)
        finally:
            crew.close()
    return store.standing(specs)


def _check(specs: Sequence[RunSpec], folders: Sequence[str]) -> None:
    """Refuse wrong data here, in one sentence, and not in every worker."""
    tables = SharedTables(folders, "cpu")
    for spec in specs:
        tables.require(spec)


class _Shift:
    """The loop over waiting runs and the crew that works on them."""

    def __init__(
        self,
        crew: Crew,
        store: RunStore,
        execution: Execution,
        total: int,
        tell: Callable[[Event], None] | None,
    ) -> None:
        self.crew, self.store, self.execution, self.total, self.tell = crew, store, execution, total, tell
        self.busy: dict[Any, tuple[RunSpec, int | None]] = {}
        self.losses: Counter[RunSpec] = Counter()
        self.done = 0

    def work(self, specs: Sequence[RunSpec]) -> None:
        waiting = deque(specs)
        idle = [self.crew.hire() for _ in range(min(self.execution.jobs, len(waiting)))]
        while waiting or self.busy:
            while waiting and len(self.busy) < self.execution.jobs:
                self._start(waiting.popleft(), idle)
            if self.busy:
                self._finish(*self.crew.wait(self.busy.keys()), waiting, idle)

    def _start(self, spec: RunSpec, idle: list[Any]) -> None:
        found = self.store.find(spec)
        if is_finished(found):  # by somebody else with the same store
            self.done += 1
            return
        worker = idle.pop() if idle else self.crew.hire()
        pid = self.crew.assign(worker, spec, 1 if found is None else found.attempts + 1)
        self.busy[worker] = spec, pid
        self._say("started", spec, pid)

    def _finish(self, worker: Any, outcome: RunRecord | Lost, waiting: deque[RunSpec], idle: list[Any]) -> None:
        spec, pid = self.busy.pop(worker)
        if isinstance(outcome, Lost):
            self.crew.dismiss(worker)
            self._say("lost", spec, pid)
            self.losses[spec] += outcome.began
            if self.losses[spec] < ATTEMPTS:
                waiting.appendleft(spec)
                return
            outcome = self._gave_up(spec)
        elif outcome.status == "failed":
            # Its process may be of no more use, as after an assertion on a GPU.
            self.crew.dismiss(worker)
        else:
            idle.append(worker)
        record = self.store.put(outcome)
        if record.finished:
            self.done += 1
        else:
            waiting.append(spec)
        self._say(record.status, spec, pid)

    def _gave_up(self, spec: RunSpec) -> RunRecord:
        return RunRecord(
            spec,
            status="failed",
            attempts=ATTEMPTS,
            execution=asdict(self.execution),
            versions=versions(),
            machine=machine(torch.device("cpu")),
            timings={"started": datetime.now(UTC).isoformat(timespec="seconds")},
            history=[],
            error={"type": "WorkerDied", "message": f"its worker died {ATTEMPTS} times; it may lack memory"},
        )

    def _say(self, state: Literal["started", "done", "failed", "lost"], spec: RunSpec, pid: int | None) -> None:
        if self.tell is not None:
            self.tell(Event(state, spec, self.done, self.total, pid))


class _Here:
    """This process, as a crew of one."""

    def __init__(self, folders: Sequence[str], execution: Execution) -> None:
        self._tables = SharedTables(folders, execution.device)
        self._execution = execution
        self._given: list[tuple[RunSpec, int]] = []

    def hire(self) -> str:
        return "here"

    def assign(self, worker: str, spec: RunSpec, attempt: int) -> int:
        self._given.append((spec, attempt))
        return os.getpid()

    def wait(self, busy: Collection[str]) -> tuple[str, RunRecord]:
        spec, attempt = self._given.pop()
        return next(iter(busy)), execute(spec, self._tables, self._execution, attempt=attempt)

    def dismiss(self, worker: str) -> None:
        """The process goes on, whatever its run ended with."""

    def close(self) -> None:
        """Nothing outlives the object."""


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """While the context lasts, processes that start find a variable with this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _Stillborn:
    """Counts workers that die before they are ready; several in a row end the work with a reason."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def born(self) -> None:
        self._in_a_row = 0

    def died(self, began: bool, reason: str) -> Lost:
        self._in_a_row = 0 if began else self._in_a_row + 1
        if self._in_a_row >= STILLBORN:
            raise CheckFailed(f"{STILLBORN} workers in a row ended before they could begin: {reason}")
        return Lost(began)


class _PoolWorker:
    """A process with its own copy of the tables, and the pipe to it."""

    def __init__(self, folders: Sequence[str], execution: Execution) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, list(folders), execution), daemon=True)
        with _environment("OMP_NUM_THREADS", str(execution.threads)):
            self.process.start()
        theirs.close()  # so that the pipe ends when the process does
        self.ready = False


class _Pool:
    """Processes of this machine, each started afresh."""

    def __init__(self, folders: Sequence[str], execution: Execution) -> None:
        self._folders, self._execution = folders, execution
        self._workers: list[_PoolWorker] = []
        self._stillborn = _Stillborn()

    def hire(self) -> _PoolWorker:
        worker = _PoolWorker(self._folders, self._execution)
        self._workers.append(worker)
        return worker

    def assign(self, worker: _PoolWorker, spec: RunSpec, attempt: int) -> int | None:
        try:
            worker.pipe.send((spec.to_tables(), attempt))
        except OSError:
            worker.ready = False  # it died while it had nothing to do, which is no fault of this run
        return worker.process.pid

    def wait(self, busy: Collection[_PoolWorker]) -> tuple[_PoolWorker, RunRecord | Lost]:
        while True:
            for worker in busy:
                if not worker.pipe.poll():
                    continue
                try:
                    message = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join(PATIENCE)
                    reason = f"the last one with exit code {worker.process.exitcode}"
                    return worker, self._stillborn.died(worker.ready, reason)
                if message is not None:
                    return worker, RunRecord.from_document(message, "what a worker sent")
                worker.ready = True
                self._stillborn.born()
            connection.wait([worker.pipe for worker in busy])

    def dismiss(self, worker: _PoolWorker) -> None:
        self._workers.remove(worker)
        worker.pipe.close()
        worker.process.terminate()
        worker.process.join(PATIENCE)
        if worker.process.is_alive():
            worker.process.kill()

    def close(self) -> None:
        for worker in list(self._workers):
            self.dismiss(worker)


def _serve(pipe: connection.Connection, folders: Sequence[str], execution: Execution) -> None:
    """What a process of the pool does until its pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who gives the work
    parent = os.getppid()

    def leave_if_orphaned(*_: object) -> None:
        if os.getppid() != parent:
            raise SystemExit(1)

    tables = SharedTables(folders, execution.device)
    with suppress(EOFError, BrokenPipeError):
        pipe.send(None)
        while True:
            spec_tables, attempt = pipe.recv()
            spec = RunSpec.from_tables(spec_tables)
            record = execute(spec, tables, execution, attempt=attempt, progress=leave_if_orphaned)
            pipe.send(record.to_document())


class _RayWorker:
    """What an actor holds, wherever it runs."""

    def __init__(self, folders: Sequence[str], execution: Execution) -> None:
        self._tables, self._execution = SharedTables(folders, execution.device), execution

    def pid(self) -> int:
        return os.getpid()

    def execute(self, spec_tables: dict[str, Any], attempt: int) -> dict[str, Any]:
        return execute(RunSpec.from_tables(spec_tables), self._tables, self._execution, attempt=attempt).to_document()


class _Ray:
    """Actors on a Ray cluster, one run each at a time."""

    def __init__(self, folders: Sequence[str], execution: Execution) -> None:
        ray = import_ray("--runner ray")
        self._ray, self._folders, self._execution = ray, folders, execution
        self._given: dict[Any, Any] = {}
        self._hired: list[Any] = []
        self._pids: dict[Any, int] = {}
        self._stillborn = _Stillborn()
        self._died = (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError)
        self._began = ensure_ray(ray, num_cpus=max(cores(), execution.jobs * execution.threads))
        self._actor = ray.remote(_RayWorker).options(num_cpus=execution.threads, num_gpus=self._gpu_share())

    def _gpu_share(self) -> float:
        if not self._execution.device.startswith("cuda"):
            return 0.0
        gpus = self._ray.cluster_resources().get("GPU", 0.0)
        if not gpus:
            raise UsageError("--device cuda needs a GPU in the Ray cluster; it has none; use --device cpu")
        return float(min(1.0, gpus / self._execution.jobs))

    def hire(self) -> Any:
        worker = self._actor.remote(self._folders, self._execution)
        self._hired.append(worker)
        return worker

    def assign(self, worker: Any, spec: RunSpec, attempt: int) -> int | None:
        if worker not in self._pids:
            with suppress(*self._died):  # `wait` will find out
                self._pids[worker] = self._ray.get(worker.pid.remote())
                self._stillborn.born()
        # An actor does one thing after the other, so that nothing is to be asked of it once it has its run.
        self._given[worker.execute.remote(spec.to_tables(), attempt)] = worker
        return self._pids.get(worker)

    def wait(self, busy: Collection[Any]) -> tuple[Any, RunRecord | Lost]:
        ended, _ = self._ray.wait(list(self._given), num_returns=1)
        worker = self._given.pop(ended[0])
        try:
            return worker, RunRecord.from_document(self._ray.get(ended[0]), "what a worker sent")
        except self._died as error:
            return worker, self._stillborn.died(worker in self._pids, str(error).strip().splitlines()[-1])

    def dismiss(self, worker: Any) -> None:
        self._hired.remove(worker)
        self._ray.kill(worker)

    def close(self) -> None:
        for worker in list(self._hired):
            self.dismiss(worker)
        if self._began:
            self._ray.shutdown()


CREWS: Mapping[str, Callable[[Sequence[str], Execution], Crew]] = {"local": _Here, "pool": _Pool, "ray": _Ray}
