"""Shared by all tests."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Half a million objects of imported modules never die: builds collect between stages and need not walk them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the end they may go."""
    gc.unfreeze()
