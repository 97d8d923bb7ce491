"""Text for a terminal: names, reasons and answers in files are other people's words, and must not steer it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


def printable(text: str) -> str:
    """`text` with its line breaks; all else that is no visible character (escapes, marks of direction) is written out
    as Python would."""
    return "\n".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in text.split("\n"))


@contextlib.contextmanager
def silenced(descriptor: int) -> Iterator[None]:
    """Nothing reaches standard output (1) or error (2) meanwhile, native code's lines included."""
    (sys.stdout if descriptor == 1 else sys.stderr).flush()
    saved, nowhere = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(saved, descriptor)
        os.close(saved)
