"""What a training tells while it runs: a line on a terminal, times in a file, TensorBoard where asked for."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Self

from scalarlens.errors import MissingExtra

TIMINGS_FILE = "timings.jsonl"


class Reporter:
    """Shows rate and ETA of the epoch on a terminal, and is silent elsewhere; keeps seconds per epoch in a file."""

    REFRESH_SECONDS = 0.5

    def __init__(self, quiet: bool, *, folder: Path | None = None, tensorboard: bool = False, title: str = "") -> None:
        self._line = not quiet and sys.stderr.isatty()
        self._folder, self._title = folder, title
        self._open_writer = _tensorboard() if tensorboard else None
        self._writer: Any = None
        self._began = self._shown = time.monotonic()
        self._epoch = 0
        self.seconds = 0.0

    def titled(self, title: str) -> Reporter:
        """A fresh reporter for another training on the same terminal."""
        return Reporter(not self._line, title=title)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def progress(self, epoch: int, done: int, rows: int, entry: dict[str, Any] | None) -> None:
        now = time.monotonic()
        if epoch != self._epoch:
            self._epoch, self._began, self._first = epoch, now, done
        if entry is not None:
            self._close_epoch(entry, now - self._began, rows)
        elif self._line and now - self._shown > self.REFRESH_SECONDS:
            self._shown = now
            rate = (done - self._first) / max(now - self._began, 1e-9)
            left = (rows - done) / rate if rate else float("inf")
            self._show(f"epoch {epoch}: {done:,} of {rows:,} rows, {rate:,.0f} rows/s, {left:.0f} s left in the epoch")

    def _close_epoch(self, entry: dict[str, Any], seconds: float, rows: int) -> None:
        self.seconds += seconds
        if self._folder is not None:
            with (self._folder / TIMINGS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"epoch": entry["epoch"], "seconds": round(seconds, 3), "rows": rows}) + "\n")
        if self._open_writer is not None and self._folder is not None:
            # Opened late: a folder that holds events before its run has begun would be taken for somebody else's.
            self._writer = self._writer or self._open_writer(str(self._folder / "tensorboard"))
            for name in ("train_loss", "valid_auc", "valid_log_loss", "learning_rate"):
                self._writer.add_scalar(name, entry[name], entry["epoch"])
        if self._line:
            self._show(
                f"epoch {entry['epoch']}: loss {entry['train_loss']:.5f}, validation AUC {entry['valid_auc']:.5f}, "
                f"{seconds:.1f} s",
                end="\n",
            )

    def _show(self, text: str, end: str = "") -> None:
        print(f"\r\x1b[K{self._title}{text}", end=end, file=sys.stderr, flush=True)


class StageReporter:
    """Shows the stage of a preparation with its rate and, where known, the time left; on a terminal alone."""

    REFRESH_SECONDS = 0.5

    def __init__(self, quiet: bool) -> None:
        self._line = not quiet and sys.stderr.isatty()
        self._stage = ""
        self._began = self._shown = 0.0
        self._first = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._line and self._stage:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def progress(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._first = stage, now, done
        if not self._line or now - self._shown < self.REFRESH_SECONDS:
            return
        self._shown = now
        rate = (done - self._first) / max(now - self._began, 1e-9)
        text = f"{stage}: {done:,}" if total is None else f"{stage}: {done:,} of {total:,}"
        left = "" if total is None or not rate else f", {(total - done) / rate:.0f} s left"
        print(f"\r\x1b[K{text}, {rate:,.0f} per second{left}", end="", file=sys.stderr, flush=True)


def _tensorboard() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtra("tensorboard", "tensorboard", "--tensorboard") from None
    return SummaryWriter
