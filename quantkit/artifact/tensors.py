"""A safetensors file whose tensors are filled in any order, a few rows at a time.

The header is known before the first byte of data (the plan gives names, types and shapes), so nothing is held back:
memory stays at one weight, and the file never exists twice. Tensors lie by falling element size, then by name, which
keeps each aligned (safetensors' own order).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np

from quantkit.artifact.layout import TensorPlan
from quantkit.errors import CheckpointError
from quantkit.models.safetensors_header import ARRAY_TYPES
from quantkit_kernels.arrays import Array, cast


class TensorFile:
    """One safetensors file being written; a context manager. Every byte of every tensor must be put exactly once."""

    def __init__(self, path: Path, plans: Iterable[TensorPlan]) -> None:
        ordered = sorted(plans, key=lambda plan: (-ARRAY_TYPES[plan.dtype].itemsize, plan.name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for plan in ordered:
            header[plan.name] = {
                "dtype": plan.dtype,
                "shape": list(plan.shape),
                "data_offsets": [position, position + plan.size],
            }
            position += plan.size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._plans = {plan.name: plan for plan in ordered}
        self._missing = {plan.name: plan.size for plan in ordered}
        self._starts: dict[str, int] = {}
        start = 8 + len(text)
        for plan in ordered:
            self._starts[plan.name] = start
            start += plan.size
        self._file = path.open("wb")
        os.posix_fallocate(self._file.fileno(), 0, start)  # a full disk is found out now, not at the last layer
        self._file.write(len(text).to_bytes(8, "little") + text)

    def put(self, name: str, rows: Array, start: int = 0) -> None:
        """Rows `[start, start + n)` of tensor `name`, in its planned type (a float of another type is converted)."""
        plan = self._plans[name]
        if rows.shape[1:] != plan.shape[1:] or start + rows.shape[0] > plan.shape[0]:
            raise CheckpointError(f"{list(rows.shape)} at row {start} does not fit {list(plan.shape)}", where=name)
        data = np.ascontiguousarray(cast(rows, ARRAY_TYPES[plan.dtype])).reshape(-1).view(np.uint8)
        self._file.seek(self._starts[name] + start * (plan.size // plan.shape[0]))
        self._file.write(data.data)
        self._missing[name] -= data.size

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        wrong = sorted(name for name, size in self._missing.items() if size)
        if kind is None and wrong:
            raise CheckpointError(f"{len(wrong)} tensors were not written whole", where=wrong[0])
