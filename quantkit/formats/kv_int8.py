"""INT8 keys and values: static scales, one a head and channel, symmetric codes in -127..127.

The reference of what the cache holds; the kernels store the same codes (kv_write in KERNELS.md).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quantkit.formats import integer
from quantkit_kernels.arrays import Array, cast

TOP = 127


def scale_from_absmax(absmax: Array) -> Array:
    """float32 `[Hkv, D]` scales that map the greatest magnitude seen, `absmax` `[Hkv, D]`, to the last code."""
    return cast(absmax, np.float32) / np.float32(TOP)


def quantize(x: Array, scale: Array) -> NDArray[np.int8]:
    """int8 `[T, Hkv, D]` codes of float keys or values `[T, Hkv, D]`: round half to even, saturate at ±127.

    scale: float32 `[Hkv, D]`, positive. NaN or Inf raises NumericsError.
    """
    integer.require_finite(x, where="KV cache")
    return np.clip(np.rint(cast(x, np.float32) / scale), -TOP, TOP).astype(np.int8)


def dequantize(codes: Array, scale: Array) -> NDArray[np.float32]:
    """float32 `[T, Hkv, D]` from int8 codes and float32 `[Hkv, D]` scales."""
    return cast(codes, np.float32) * scale
