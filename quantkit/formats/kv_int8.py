"""INT8 keys and values: static scales, one a head and channel, symmetric codes in -127..127.

The reference of what the cache holds; the kernels store the same codes (kv_write in KERNELS.md).
"""

from __future__ import annotations

from torch import Tensor

from quantkit.formats import integer

TOP = 127


def scale_from_absmax(absmax: Tensor) -> Tensor:
    """float32 `[Hkv, D]` scales that map the greatest magnitude seen, `absmax` `[Hkv, D]`, to the last code."""
    return absmax.float() / TOP


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """int8 `[T, Hkv, D]` codes of float keys or values `[T, Hkv, D]`: round half to even, saturate at ±127.

    scale: float32 `[Hkv, D]`, positive. NaN or Inf raises NumericsError.
    """
    integer.require_finite(x, where="KV cache")
    return (x.float() / scale).round_().clamp_(-TOP, TOP).char()


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 `[T, Hkv, D]` from int8 codes and float32 `[Hkv, D]` scales."""
    return codes.float() * scale
