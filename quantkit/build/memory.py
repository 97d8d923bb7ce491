"""Peak anonymous memory of the build over its process tree, sampled from /proc."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType


def anonymous_bytes(pid: int | None = None) -> int:
    """Anonymous resident bytes (RssAnon) of a process and all its descendants; 0 for one that is gone."""
    total, pending = 0, [pid or os.getpid()]
    while pending:
        folder = Path("/proc") / str(pending.pop())
        try:
            status = (folder / "status").read_text()
            for task in (folder / "task").iterdir():
                pending += map(int, (task / "children").read_text().split())
        except (OSError, ValueError):
            continue
        for line in status.splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1]) * 1024
    return total


class PeakMemory:
    """A thread that samples `anonymous_bytes()`; `take()` returns the peak in bytes since the last `take()`."""

    def __init__(self, interval_s: float = 0.05) -> None:
        self._interval_s = interval_s
        self._peak = self._span = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> int:
        """The peak in bytes since the last call, the present included; starts the next span."""
        now = anonymous_bytes()
        with self._lock:
            peak, self._peak = max(self._peak, now), 0
            self._span += 1
        return peak

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            span = self._span
            now = anonymous_bytes()
            with self._lock:
                if span == self._span:  # else it was read, in part, before this span began
                    self._peak = max(self._peak, now)
