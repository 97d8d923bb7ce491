"""Ctrl-C that is not lost: a library that swallows KeyboardInterrupt cannot make a build run on for minutes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Gives a check that raises KeyboardInterrupt if SIGINT has come since, even where the first raise was swallowed.

    Outside the main thread, where Python allows no handler, the check does nothing.
    """
    seen = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        signal.default_int_handler(number, frame)

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
