"""Memory for what a step streams: weights and the KV cache, on huge pages.

Reading tens of megabytes from 4 KiB pages costs a page walk (two-dimensional under a hypervisor) and stops the
hardware's prefetcher every 4 KiB; huge pages read two to three times as fast.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quantkit_kernels.arrays import Array

_HUGE = 2 << 20
_CHUNK = 8 * _HUGE
_ALIGN = 64
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def _mapping(nbytes: int) -> mmap.mmap:
    """Zeroed private memory of whole huge pages, which the kernel is asked to back with huge pages."""
    size = -(-nbytes // _HUGE) * _HUGE
    region = mmap.mmap(-1, size, flags=_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return region  # a kernel without huge pages: slower, not wrong
    return region


class _Pool:
    """Small pieces share a chunk of huge pages; a chunk goes when the last array in it goes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def take(self, nbytes: int) -> Array:
        if nbytes >= _CHUNK // 2:
            return np.frombuffer(_mapping(nbytes), np.uint8, nbytes)
        with self._lock:
            if self._chunk is None or self._used + nbytes > _CHUNK:
                self._chunk, self._used = _mapping(_CHUNK), 0
            piece = np.frombuffer(self._chunk, np.uint8, nbytes, self._used)
            self._used += -(-nbytes // _ALIGN) * _ALIGN
        return piece


_pool = _Pool()


class Allocate(Protocol):
    """Where a kernel's arrays come from: `zeroed`, `streamed`, or a `Spill`'s."""

    def __call__(self, *shape: int, dtype: np.dtype[Any]) -> Array:
        """A contiguous, zeroed array, 64-byte aligned."""
        ...


def zeroed(*shape: int, dtype: np.dtype[Any]) -> Array:
    """An array on pages of its own, which take memory once they are written to and go back when the array goes."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=_PRIVATE), dtype).reshape(shape)


def streamed(*shape: int, dtype: np.dtype[Any]) -> Array:
    """An array on huge pages."""
    nbytes = math.prod(shape) * dtype.itemsize
    return _pool.take(nbytes).view(dtype).reshape(shape) if nbytes else np.empty(shape, dtype)


class Spill:
    """Arrays in a file of `folder` that has no name: shared mappings, which the kernel may write out and drop.

    For models that are run once and shall not count as anonymous memory. The disk's blocks are freed with the last
    array, whatever ends the process. Mappings double in size up to 1 GiB and are shared by arrays: each holds a file
    descriptor, of which there are few. OSError when the disk has no room.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(prefix="quantkit-spill-", dir=folder)  # noqa: SIM115 - lives as long as we
        self._end = 0
        self._region: mmap.mmap | None = None
        self._used = self._size = 0
        self._next = _CHUNK

    def array(self, *shape: int, dtype: np.dtype[Any]) -> Array:
        """An array of its own in the file, as `Allocate` says."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return np.empty(shape, dtype)
        if self._region is None or self._used + nbytes > self._size:
            self._map(nbytes)
        assert self._region is not None
        piece = np.frombuffer(self._region, np.uint8, nbytes, self._used)
        self._used += -(-nbytes // _ALIGN) * _ALIGN
        return piece.view(dtype).reshape(shape)

    def _map(self, nbytes: int) -> None:
        """Another region of at least `nbytes` behind those there are."""
        length = -(-max(nbytes, self._next) // _HUGE) * _HUGE
        os.posix_fallocate(self._file.fileno(), self._end, length)  # a full disk is an error now, not a SIGBUS later
        self._region = mmap.mmap(self._file.fileno(), length, flags=mmap.MAP_SHARED, offset=self._end)
        self._end += length
        self._used, self._size, self._next = 0, length, min(2 * self._next, 1 << 30)
