"""Activations at a layer boundary: in memory, or in files when a folder is given."""

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
        folder: where to spill; None keeps the arrays in memory.
    """

    def __init__(self, widths: Mapping[str, int], tokens: int, folder: Path | None) -> None:
        self._paths: list[Path] = []
        self._arrays: dict[str, NDArray[np.float32]] = {}
        for index, (name, width) in enumerate(widths.items()):
            if folder is None:
                self._arrays[name] = np.empty((tokens, width), np.float32)
                continue
            path = folder / f"boundary-{id(self):x}-{index}.f32"
            self._paths.append(path)
            with path.open("wb") as file:  # room taken now: a disk that fills later would be a SIGBUS
                os.posix_fallocate(file.fileno(), 0, tokens * width * 4)
            self._arrays[name] = np.memmap(path, np.float32, "r+", shape=(tokens, width))

    def get(self, start: int, stop: int) -> dict[str, Tensor]:
        """Tokens `[start, stop)` of every value, as copies."""
        return {name: torch.from_numpy(array[start:stop].copy()) for name, array in self._arrays.items()}

    def put(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Tokens from `start` on of every value."""
        for name, value in values.items():
            self._arrays[name][start : start + len(value)] = value.numpy()

    def close(self) -> None:
        """Let go of the arrays and remove their files."""
        self._arrays.clear()
        for path in self._paths:
            path.unlink(missing_ok=True)
