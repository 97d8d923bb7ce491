"""Processes that compile at once, one target each: Triton keeps state by process, and a process uses one core."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.compile.aot import ENVIRONMENT
from quantkit.errors import PreflightError
from quantkit_kernels.triton import Fact


@dataclass(frozen=True)
class Job:
    """One kernel to compile: its key in the cache, its file's module, its name, and the facts it is specialised for."""

    key: str
    module: str
    kernel: str
    facts: Mapping[str, Fact]


def compile_all(
    jobs: Mapping[str, Sequence[Job]],
    cache: Path,
    workers: int,
    step: Callable[[int, int, str], None],
    *,
    scratch: Path | None = None,
) -> None:
    """Compile the jobs of each target into the cache, `workers` processes at once; `step` hears of each kernel.

    scratch: folder for what is removed again, the system's own if absent. PreflightError with the compiler's last line
    where one fails, or where the cache cannot be written; no process outlives this call.
    """
    busy = {target: list(wanted) for target, wanted in jobs.items() if wanted}
    if not busy:
        return
    parts = max(1, workers // len(busy))
    waiting = [(target, wanted[i::parts]) for target, wanted in busy.items() for i in range(min(parts, len(wanted)))]
    total, done = sum(len(part) for _, part in waiting), 0
    kernel_of = {job.key: f"{job.kernel} for {target}" for target, part in waiting for job in part}
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreflightError(
            f"compiled kernels cannot be kept there: {error.strerror}", where=str(cache), next="Set XDG_CACHE_HOME"
        ) from None
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quantkit-compile-", dir=scratch)))
        step(0, total, "starting")
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < workers:
                worker = stack.enter_context(_Worker(*waiting.pop(0), cache, place))
                selector.register(worker.output, selectors.EVENT_READ, worker)
            for entry, _ in selector.select():
                line = entry.data.output.readline()
                if line:
                    done += 1
                    step(done, total, kernel_of[line.decode().strip()])
                else:
                    selector.unregister(entry.fileobj)
                    entry.data.finish()


class _Worker:
    """One process of `quantkit.compile.worker`, killed when its block ends."""

    def __init__(self, target: str, jobs: Sequence[Job], cache: Path, scratch: Path) -> None:
        self._target = target
        self._errors = scratch / f"{jobs[0].key}.errors"
        request = scratch / f"{jobs[0].key}.request"
        body = {"parent": os.getpid(), "target": target, "cache": str(cache.absolute()), "jobs": [*map(asdict, jobs)]}
        request.write_text(json.dumps(body), encoding="utf-8")
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with request.open("rb") as given, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "quantkit.compile.worker"],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **ENVIRONMENT, "TRITON_CACHE_DIR": str(scratch / "triton"), "PYTHONPATH": path},
                bufsize=0,
            )

    @property
    def output(self) -> Any:
        """Its standard output: the key of each kernel that is whole."""
        return self._process.stdout

    def finish(self) -> None:
        """Wait for its end; PreflightError where it failed."""
        if self._process.wait() != 0:
            lines = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise PreflightError(f"compiling failed: {lines[-1][:300] if lines else 'no message'}", where=self._target)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self.output.close()
