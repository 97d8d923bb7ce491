"""A `quantkit serve` process for tests: the real command on a tiny random checkpoint."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

COMMAND = (sys.executable, "-c", "from quantkit.cli import main; main()", "serve")


class Server:
    """Started and ready when made; a context manager that leaves nothing running."""

    def __init__(self, artifact: Path, *options: str, wait: bool = True, **environment: str) -> None:
        command = [*COMMAND, str(artifact), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        self.lines: list[str] = []
        self.log: list[str] = []
        self._said: queue.Queue[str | None] = queue.Queue()
        for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.log)):
            threading.Thread(target=self._read, args=(stream, lines), daemon=True).start()
        self.url = ""
        key = environment.get("QUANTKIT_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        if wait:
            self._wait_ready()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=10)

    def client(self, **options: object) -> httpx.Client:
        """A client of this server, with its key unless `options` has other headers."""
        return httpx.Client(base_url=self.url, **{"timeout": 60, "headers": self._headers} | options)

    def engine(self) -> psutil.Process:
        """The engine process."""
        [engine] = [p for p in psutil.Process(self.process.pid).children() if "engine_process" in " ".join(p.cmdline())]
        return engine

    def metric(self, name: str, **labels: str) -> float:
        """The value of one metric now."""
        with self.client() as client:
            text = client.get("/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def _wait_ready(self) -> None:
        while (line := self._said.get(timeout=60)) is not None:
            if line.split()[:1] == ["URL"]:
                self.url = line.split()[1]
            if line == "ready":
                return
        raise RuntimeError(f"the server did not start: {''.join(self.log)}")

    def _read(self, stream: object, lines: list[str]) -> None:
        for line in stream:  # type: ignore[attr-defined]
            lines.append(line)
            if lines is self.lines:
                self._said.put(line.strip())
        if lines is self.lines:
            self._said.put(None)


def eventually(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Whether `condition` comes true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
