"""What a build tells while it runs; the command line draws it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Hears about stages and steps, in order, from one thread."""

    def begin(self, title: str, number: int, total: int) -> None:
        """Stage `number` of `total` starts."""

    def step(self, done: int, total: int, what: str) -> None:
        """`done` of `total` parts of the stage are whole; `what` names the present one."""

    def end(self, seconds: float, *, cached: bool) -> None:
        """The stage is whole; `cached`: it was so before."""

    def note(self, text: str) -> None:
        """One line worth reading."""


class Silent:
    """Progress for callers that want none."""

    def begin(self, title: str, number: int, total: int) -> None:
        """Nothing."""

    def step(self, done: int, total: int, what: str) -> None:
        """Nothing."""

    def end(self, seconds: float, *, cached: bool) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""
