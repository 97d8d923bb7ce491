"""Memory for what a step streams: weights and the KV cache, on huge pages.

Reading tens of megabytes from 4 KiB pages costs a page walk (two-dimensional under a hypervisor) and stops the
hardware's prefetcher every 4 KiB; huge pages read two to three times as fast.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

_HUGE = 2 << 20
_CHUNK = 8 * _HUGE
_ALIGN = 64


def _mapping(nbytes: int) -> mmap.mmap:
    """Zeroed private memory of whole huge pages, which the kernel is asked to back with huge pages."""
    size = -(-nbytes // _HUGE) * _HUGE
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return region  # a kernel without huge pages: slower, not wrong
    return region


class _Pool:
    """Small pieces share a chunk of huge pages; a chunk goes when the last tensor in it goes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def take(self, nbytes: int) -> Tensor:
        if nbytes >= _CHUNK // 2:
            return torch.frombuffer(_mapping(nbytes), dtype=torch.uint8, count=nbytes)
        with self._lock:
            if self._chunk is None or self._used + nbytes > _CHUNK:
                self._chunk, self._used = _mapping(_CHUNK), 0
            piece = torch.frombuffer(self._chunk, dtype=torch.uint8, count=nbytes, offset=self._used)
            self._used += -(-nbytes // _ALIGN) * _ALIGN
        return piece


_pool = _Pool()


def streamed_tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    """A contiguous CPU tensor on huge pages, 64-byte aligned and zeroed (its memory is never used twice)."""
    size = torch.Size(shape)
    nbytes = size.numel() * dtype.itemsize
    return _pool.take(nbytes).view(dtype).view(size) if nbytes else torch.empty(size, dtype=dtype)


class Allocate(Protocol):
    """Where a kernel's large tensors come from: `streamed_tensor`, or a `Spill`'s."""

    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A contiguous, zeroed CPU tensor."""
        ...


class Spill:
    """Tensors in a file of `folder` that has no name: shared mappings, which the kernel may write out and drop.

    For models that are run once and shall not count as anonymous memory. The disk's blocks are freed with the last
    tensor, whatever ends the process. Mappings double in size up to 1 GiB and are shared by tensors: each holds a file
    descriptor, of which there are few. OSError when the disk has no room.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(prefix="quantkit-spill-", dir=folder)  # noqa: SIM115 - lives as long as we
        self._end = 0
        self._region: mmap.mmap | None = None
        self._used = self._size = 0
        self._next = _CHUNK

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A contiguous CPU tensor of its own, zeroed, 64-byte aligned, in the file."""
        size = torch.Size(shape)
        nbytes = size.numel() * dtype.itemsize
        if not nbytes:
            return torch.empty(size, dtype=dtype)
        if self._region is None or self._used + nbytes > self._size:
            self._map(nbytes)
        piece = torch.frombuffer(self._region, dtype=torch.uint8, count=nbytes, offset=self._used)
        self._used += -(-nbytes // _ALIGN) * _ALIGN
        return piece.view(dtype).view(size)

    def _map(self, nbytes: int) -> None:
        """Another region of at least `nbytes` behind those there are."""
        length = -(-max(nbytes, self._next) // _HUGE) * _HUGE
        os.posix_fallocate(self._file.fileno(), self._end, length)  # a full disk is an error now, not a SIGBUS later
        self._region = mmap.mmap(self._file.fileno(), length, flags=mmap.MAP_SHARED, offset=self._end)
        self._end += length
        self._used, self._size, self._next = 0, length, min(2 * self._next, 1 << 30)
