"""Draws a build's progress on stderr: a bar on a terminal, one plain line an event elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_PLAIN_INTERVAL_S = 10.0


class PlainLines:
    """Stage begins and ends, and a sign of life every ten seconds; for logs."""

    def __init__(self) -> None:
        self._title, self._told = "", 0.0

    def begin(self, title: str, number: int, total: int) -> None:
        """Stage `number` of `total` starts."""
        self._title, self._told = f"[{number}/{total}] {title}", time.monotonic()

    def step(self, done: int, total: int, what: str) -> None:
        """Part `done` of `total`."""
        if time.monotonic() - self._told > _PLAIN_INTERVAL_S:
            self._told = time.monotonic()
            self.note(f"{self._title}: {what}, {done}/{total}")

    def end(self, seconds: float, *, cached: bool) -> None:
        """The stage is whole."""
        self.note(f"{self._title}: {'cached, took' if cached else 'done in'} {seconds:.1f} s")

    def note(self, text: str) -> None:
        """One line."""
        print(text, file=sys.stderr, flush=True)


class Bar:
    """One bar for the stage that runs, with part, time taken and time left; whole stages stay above it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, what="")
        self._title = ""

    def begin(self, title: str, number: int, total: int) -> None:
        """Stage `number` of `total` starts."""
        self._title = f"[{number}/{total}] {title}"
        self._progress.reset(self._task, total=None, description=self._title, what="")

    def step(self, done: int, total: int, what: str) -> None:
        """Part `done` of `total`."""
        self._progress.update(self._task, completed=done, total=total, what=what)

    def end(self, seconds: float, *, cached: bool) -> None:
        """The stage is whole."""
        self.note(f"{self._title}: {'cached, took' if cached else 'done in'} {seconds:.1f} s")

    def note(self, text: str) -> None:
        """One line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def shown() -> Iterator[PlainLines | Bar]:
    """The progress to hand to a build, drawn while the block runs."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield PlainLines()
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[what]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress)
