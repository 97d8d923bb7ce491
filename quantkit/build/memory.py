"""Peak anonymous memory of the build over its process tree, sampled from /proc."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType


def anonymous_bytes(pid: int | None = None) -> int:
    """Anonymous resident bytes (RssAnon) of a process and all its descendants; 0 for one that is gone.

    A child that is being started still has its parent's memory, all of it: such a one, told by an address space of the
    same size, is left out.
    """
    total, pending = 0, [(pid or os.getpid(), 0)]
    while pending:
        process, parents_size = pending.pop()
        folder = Path("/proc") / str(process)
        try:
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            size, resident = (int(status[name].split()[0]) for name in ("VmSize", "RssAnon"))
            for task in (folder / "task").iterdir():
                pending += [(int(child), size) for child in (task / "children").read_text().split()]
        except (OSError, ValueError, KeyError):  # gone, or gone but for its exit code
            continue
        if size != parents_size:
            total += resident * 1024
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
