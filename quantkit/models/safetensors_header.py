"""The header of a safetensors file: which tensors lie where.

It is third-party data and is checked whole: every offset in bounds, no overlap, no byte unaccounted for (the format's
own rules, see safetensors' `SafeTensors::deserialize`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import CheckpointError
from quantkit_kernels.arrays import BFLOAT16

ARRAY_TYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype(np.int64),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
}
"""Types that are read here, by the format's names."""
_MOST_HEADER = 100 << 20
_MOST_DIMS = 8
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6, "C64": 64, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: `offset` and `size` in bytes of `file`; `dtype` as the format spells it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The checked header of one safetensors file; CheckpointError names file and tensor."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise CheckpointError(
                f"is truncated: {size} bytes hold no whole header", where=str(path), next="Fetch the file again"
            )
        if length > _MOST_HEADER:
            raise CheckpointError(f"header of {length} bytes exceeds the format's {_MOST_HEADER}", where=str(path))
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, _DuplicateError) else "is not valid JSON"
        raise CheckpointError(f"header {reason}", where=str(path), next="Fetch the file again") from None
    if not isinstance(header, dict):
        raise CheckpointError("header must be a JSON object", where=str(path))
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}
    _check_layout(path, tensors, 8 + length, size)
    return tensors


class _DuplicateError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _DuplicateError("names a tensor twice")
    return value


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    where = f"{path}: {name}"
    if not isinstance(entry, dict):
        raise CheckpointError("header entry must be an object", where=where)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"unknown type {str(dtype)[:40]!r}", where=where)
    if not isinstance(shape, list) or len(shape) > _MOST_DIMS or not all(_whole(n) for n in shape):
        raise CheckpointError(f"shape {str(shape)[:60]} is not a list of sizes", where=where)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_whole(n) for n in offsets):
        raise CheckpointError(f"data_offsets {str(offsets)[:60]} are not two positions", where=where)
    first, last = offsets
    if first > last:
        raise CheckpointError(f"data_offsets {offsets} run backwards", where=where)
    if last > size - start:
        raise CheckpointError(
            f"ends {last - (size - start)} bytes after the end of the file: truncated",
            where=where,
            next="Fetch the file again",
        )
    if math.prod(shape) * _BITS[dtype] != (last - first) * 8:
        raise CheckpointError(f"{last - first} bytes do not hold {dtype} {shape}", where=where)
    return StoredTensor(path, dtype, tuple(shape), start + first, last - first)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _check_layout(path: Path, tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    """Tensors must follow each other without overlap or gap, to the end of the file."""
    position, previous = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
        if tensor.offset != position:
            how = "overlaps" if tensor.offset < position else "leaves a gap after"
            raise CheckpointError(f"{how} {previous}", where=f"{path}: {name}")
        position, previous = tensor.offset + tensor.size, name
    if position != size:
        raise CheckpointError(f"{size - position} bytes after the last tensor belong to none", where=str(path))
