"""Reading the pieces of a table in tasks of Ray: on the cores of this machine, or on a cluster that exists already."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from scalarlens.cluster import ensure_ray, import_ray
from scalarlens.datasets.ingest import Piece
from scalarlens.datasets.spool import Work
from scalarlens.errors import ScalarLensError, UsageError

#: a task that dies is given to another worker so many times; it continues behind its last chunk
RETRIES = 3
#: what a task may take, for Ray to count with
TASK_MEMORY = 800_000_000


class RayTasks:
    """An engine: one task for each piece. Chunks go to the work folder, and only the number of rows comes back."""

    def __init__(self) -> None:
        self._ray = import_ray("--engine ray")

    def __call__(self, pieces: Sequence[Piece], tell: Callable[[int], None]) -> None:
        with self._session():
            task = self._ray.remote(_read).options(num_cpus=1, memory=TASK_MEMORY, max_retries=RETRIES)
            waiting = {task.remote(piece): piece for piece in pieces}
            try:
                while waiting:
                    (ended,), _ = self._ray.wait(list(waiting), num_returns=1)
                    tell(self._rows(ended, waiting.pop(ended)))
            finally:
                # Nobody writes to the work folder after this: it may be removed next.
                for left in waiting:
                    self._ray.cancel(left, force=True)
                if waiting:
                    self._ray.wait(list(waiting), num_returns=len(waiting))

    def _rows(self, ended: Any, piece: Piece) -> int:
        try:
            return int(self._ray.get(ended))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ScalarLensError(
                f"the task that read {piece.part.table.path} was lost: {reason}; "
                "give the same command again, which continues"
            ) from error

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Ray as the caller has it; otherwise a cluster that exists, or one of this machine alone for the time."""
        began = ensure_ray(self._ray)
        try:
            yield
        finally:
            if began:
                self._ray.shutdown()


def _read(piece: Piece) -> int:
    """What a task does, wherever it runs."""
    if not (piece.folder / Work.IDENTITY_FILE).exists():
        raise UsageError(f"{os.uname().nodename} does not reach {piece.folder}; --out must be where all machines do")
    rows = 0

    def tell(done: int) -> None:
        nonlocal rows
        rows += done

    with ThreadPoolExecutor(1) as pool:
        piece.read(pool, tell)
    return rows
