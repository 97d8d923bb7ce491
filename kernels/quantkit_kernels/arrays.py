"""The arrays that weights, activations and caches come in: numpy's, and bfloat16, which numpy has no type for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BFLOAT16: np.dtype[Any] = np.dtype([("bfloat16", "V2")])
"""Two opaque bytes an element: copied, cut and joined like any type, while arithmetic on it is an error."""


def dtype_of(name: str) -> np.dtype[Any]:
    """The type of a name: numpy's own, or `bfloat16`."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def cast(array: Array, dtype: np.dtype[Any] | type[np.number[Any]]) -> Array:
    """`array` in another type, rounded half to even; itself where it is of that type already."""
    wanted = np.dtype(dtype)
    if array.dtype == wanted:
        return array
    values = _widened(array) if array.dtype == BFLOAT16 else array
    if wanted == BFLOAT16:
        return _narrowed(values.astype(np.float32, copy=False))
    with np.errstate(over="ignore"):
        return values.astype(wanted, copy=False)


def _widened(array: Array) -> NDArray[np.float32]:
    wide = array.view(np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _narrowed(values: NDArray[np.float32]) -> Array:
    bits = np.ascontiguousarray(values).view(np.uint32)
    kept = bits >> 16
    rounded = ((bits + (0x7FFF + (kept & 1))) >> 16).astype(np.uint16)
    # A NaN stays one: rounding could carry its bits into infinity or the sign.
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).view(BFLOAT16)
