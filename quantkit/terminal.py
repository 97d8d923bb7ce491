"""Text for a terminal: names, reasons and answers in files are other people's words, and must not steer it."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with its line breaks; all else that is no visible character (escapes, marks of direction) is written out
    as Python would."""
    return "\n".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in text.split("\n"))
