"""Argument types of the benchmarks: what measures nothing is refused before anything is measured."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def matrix(text: str) -> tuple[int, int]:
    """Rows and columns, as in 960x576."""
    rows, _, columns = text.partition("x")
    try:
        return count(rows), count(columns)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape like 960x576") from None
