"""Activations at a layer boundary: in memory, or in one file that a killed run leaves whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Boundary:
    """float32 activations `[T, n]` of all calibration tokens by value name, filled and read by ranges of tokens.

    Args:
        widths: n by value name.
        tokens: T.
        path: the file to spill to, under a name of its own until `finish`; None keeps the arrays in memory.
    """

    def __init__(self, widths: Mapping[str, int], tokens: int, path: Path | None) -> None:
        self._path = path
        self._part = None if path is None else path.with_name(f".part-{path.name}")
        if self._part is not None:
            with self._part.open("wb") as file:  # room taken now: a disk that fills later would be a SIGBUS
                os.posix_fallocate(file.fileno(), 0, max(1, _bytes(widths, tokens)))
        self._map(widths, tokens, self._part, "r+")

    @classmethod
    def reopen(cls, widths: Mapping[str, int], tokens: int, path: Path) -> Boundary | None:
        """What an earlier run finished at `path`; None when it did not, or with other sizes."""
        if not path.is_file() or path.stat().st_size != max(1, _bytes(widths, tokens)):
            return None
        boundary = cls.__new__(cls)
        boundary._path, boundary._part = path, None
        boundary._map(widths, tokens, path, "r")
        return boundary

    def get(self, start: int, stop: int) -> dict[str, Tensor]:
        """Tokens `[start, stop)` of every value, as copies."""
        return {name: torch.from_numpy(array[start:stop].copy()) for name, array in self._arrays.items()}

    def put(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Tokens from `start` on of every value."""
        for name, value in values.items():
            self._arrays[name][start : start + len(value)] = value.numpy()

    def finish(self) -> None:
        """Flush what was put and give the file its name: from now on `reopen` finds it."""
        if self._part is None or self._path is None:
            return
        for array in self._arrays.values():
            if isinstance(array, np.memmap):
                array.flush()
        self._part.replace(self._path)
        self._part = None

    def close(self) -> None:
        """Let go of the arrays and remove the file."""
        self._arrays.clear()
        for path in (self._part, self._path):
            if path is not None:
                path.unlink(missing_ok=True)

    def _map(self, widths: Mapping[str, int], tokens: int, path: Path | None, mode: str) -> None:
        self._arrays: dict[str, NDArray[np.float32]] = {}
        start = 0
        for name, width in widths.items():
            if path is None or tokens * width == 0:
                self._arrays[name] = np.empty((tokens, width), np.float32)
            else:
                self._arrays[name] = np.memmap(path, np.float32, mode, offset=start, shape=(tokens, width))  # type: ignore[call-overload]
            start += 4 * tokens * width


def _bytes(widths: Mapping[str, int], tokens: int) -> int:
    return 4 * tokens * sum(widths.values())
