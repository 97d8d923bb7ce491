"""Freed memory goes back to the system: glibc would keep a layer's fragments in its heap while the process lives.

How much depends on how threads interleave: of 24 layers of 3.5 MB matrices next to nothing in one run and 190 MB in the
next, beside other jobs. So whoever walks a model returns it after each layer (2 to 5 ms).
"""

from __future__ import annotations

import ctypes
import gc

_M_MMAP_THRESHOLD = -3


def map_large_blocks() -> None:
    """Have glibc take large blocks from the system and hand them back when freed, each by itself."""
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is not None:
        setting(_M_MMAP_THRESHOLD, 1 << 20)


def return_freed_memory() -> None:
    """Hand the heap's free pages back, the small blocks' too."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def collect_and_return() -> None:
    """The same after collecting what only refers to itself: half a second in a process of many modules."""
    gc.collect()
    return_freed_memory()
