"""Affine integers: w ≈ (code - zero) · scale, one scale (and zero point) a row and group of input channels.

Pure functions over arrays. A weight is `[N, K]` float32; scales and zero points are `[N, G]`, where G = K // group
size (G = 1: one scale an output channel). Codes live in -2^(b-1) .. 2^(b-1)-1 and are stored as int8; symmetric INT8
leaves -128 unused, so that negating a weight negates its codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import NumericsError, RecipeError
from quantkit_kernels.arrays import BFLOAT16, Array, cast

BITS = (4, 8)
_BFLOAT16_MAX = np.float32(2.0**128 - 2.0**120)


def code_range(bits: int, *, symmetric: bool) -> tuple[int, int]:
    """Least and greatest code of a `bits`-wide integer; RecipeError for widths other than 4 and 8."""
    if bits not in BITS:
        raise RecipeError(f"no {bits}-bit integer format", next=f"Use one of {', '.join(map(str, BITS))} bits")
    top = 2 ** (bits - 1) - 1
    return (-top if symmetric and bits == 8 else -top - 1), top


def group_count(in_features: int, group_size: int, *, where: str = "") -> int:
    """G, the number of groups in a row of `in_features` weights (`group_size` 0: one, the whole row).

    RecipeError when the size does not divide, naming the group sizes of this toolkit that do.
    """
    if group_size == 0:
        return 1
    if group_size < 0 or in_features % group_size:
        fits = [size for size in (32, 64, 128) if in_features % size == 0]
        raise RecipeError(
            f"group size {group_size} does not divide {in_features} input channels",
            where=where,
            next=f"Sizes that do: {', '.join(map(str, fits))}" if fits else "Use W8A16 (per channel) or FP16 here",
        )
    return in_features // group_size


def to_groups(weight: Array, groups: int) -> Array:
    """`[..., G, K // G]` of `[..., K]`: a view of a contiguous array."""
    return weight.reshape(*weight.shape[:-1], groups, -1)


def scale_dtype(source: str) -> np.dtype[Any]:
    """The 16-bit type scales are rounded to: the source's own, and bfloat16 (full range) for a `float32` source."""
    return np.dtype(np.float16) if source == "float16" else BFLOAT16


def round_scale(scale: Array, dtype: np.dtype[Any]) -> NDArray[np.float32]:
    """Scales rounded to `dtype` and given back as float32: finite, positive, and 0 becomes the smallest there is.

    An all-zero group therefore has a positive scale, and its codes are zero. Below float16's normal range, where few
    bits are left, scales are rounded up: a coarse scale costs resolution, one too small would clip.
    """
    if dtype == BFLOAT16:
        return cast(cast(np.clip(scale, np.finfo(np.float32).tiny, _BFLOAT16_MAX), dtype), np.float32)
    info = np.finfo(np.float16)
    tiny, unit = np.float32(info.tiny), np.float32(info.smallest_subnormal)
    rounded = cast(cast(np.clip(scale, unit, np.float32(info.max)), dtype), np.float32)
    return np.where(scale < tiny, np.maximum(np.ceil(scale / unit), 1) * unit, rounded)


def require_finite(x: Array, *, where: str = "") -> None:
    """NumericsError naming the first row and channel of `[..., K]` that holds NaN or Inf."""
    finite = np.isfinite(x)
    if finite.all():
        return
    raise NumericsError(
        f"NaN or Inf at index {np.argwhere(~finite)[0].tolist()}",
        where=where,
        next="The checkpoint is damaged or its conversion overflowed: fetch or convert it again",
    )


def quantize(weight: Array, scale: Array, zero: Array | None, bits: int) -> NDArray[np.int8]:
    """Codes int8 `[N, K]` of a float weight `[N, K]`: round half to even, saturate.

    Args:
        weight: `[N, K]` float32, finite (NumericsError otherwise).
        scale: `[N, G]` float32, positive.
        zero: `[N, G]` int8, or None for symmetric codes.
        bits: 4 or 8.
    """
    require_finite(weight)
    low, high = code_range(bits, symmetric=zero is None)
    steps = to_groups(weight, scale.shape[-1]) / scale[..., None]
    np.rint(steps, out=steps)
    if zero is not None:
        steps += zero[..., None]
    return np.clip(steps, low, high, out=steps).astype(np.int8).reshape(weight.shape)


def dequantize(codes: Array, scale: Array, zero: Array | None) -> NDArray[np.float32]:
    """float32 `[N, K]` = (codes - zero) · scale, from int8 codes `[N, K]` and `[N, G]` scales and zero points."""
    steps = to_groups(codes, scale.shape[-1]).astype(np.float32)
    if zero is not None:
        steps -= zero[..., None]
    steps *= scale[..., None]
    return steps.reshape(codes.shape)
