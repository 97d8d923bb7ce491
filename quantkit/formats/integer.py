"""Affine integers: w ≈ (code - zero) · scale, one scale (and zero point) a row and group of input channels.

Pure functions over tensors. A weight is `[N, K]` float32; scales and zero points are `[N, G]`, where G = K // group
size (G = 1: one scale an output channel). Codes live in -2^(b-1) .. 2^(b-1)-1 and are stored as int8; symmetric INT8
leaves -128 unused, so that negating a weight negates its codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import NumericsError, RecipeError

BITS = (4, 8)


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


def to_groups(weight: Tensor, groups: int) -> Tensor:
    """A view `[N, G, K // G]` of `[N, K]`."""
    return weight.unflatten(-1, (groups, -1))


def scale_dtype(source: torch.dtype) -> torch.dtype:
    """The 16-bit type scales are rounded to: the source's own, and bfloat16 (full range) for a float32 source."""
    return source if source in (torch.float16, torch.bfloat16) else torch.bfloat16


def round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales rounded to `dtype` and given back as float32: finite, positive, and 0 becomes the smallest there is.

    An all-zero group therefore has a positive scale, and its codes are zero. Below float16's normal range, where few
    bits are left, scales are rounded up: a coarse scale costs resolution, one too small would clip.
    """
    info = torch.finfo(dtype)
    if dtype != torch.float16:
        return scale.clamp(info.tiny, info.max).to(dtype).float()
    unit = info.tiny * info.eps
    rounded = scale.clamp(unit, info.max).to(dtype).float()
    return torch.where(scale < info.tiny, (scale / unit).ceil_().clamp_min_(1) * unit, rounded)


def require_finite(x: Tensor, *, where: str = "") -> None:
    """NumericsError naming the first row and channel of `[..., K]` that holds NaN or Inf."""
    # A NaN or an Inf anywhere makes the sum of 0·x NaN: one pass and no mask until there is something to report.
    if torch.isfinite((x * 0).sum()):
        return
    bad = (~torch.isfinite(x)).nonzero()[0].tolist()
    raise NumericsError(
        f"NaN or Inf at index {bad}",
        where=where,
        next="The checkpoint is damaged or its conversion overflowed: fetch or convert it again",
    )


def quantize(weight: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """Codes int8 `[N, K]` of a float weight `[N, K]`: round half to even, saturate.

    Args:
        weight: `[N, K]` float32, finite (NumericsError otherwise).
        scale: `[N, G]` float32, positive.
        zero: `[N, G]` int8, or None for symmetric codes.
        bits: 4 or 8.
    """
    require_finite(weight)
    low, high = code_range(bits, symmetric=zero is None)
    steps = (to_groups(weight, scale.shape[-1]) / scale.unsqueeze(-1)).round_()
    if zero is not None:
        steps += zero.unsqueeze(-1)
    return steps.clamp_(low, high).to(torch.int8).flatten(-2)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """float32 `[N, K]` = (codes - zero) · scale, from int8 codes `[N, K]` and `[N, G]` scales and zero points."""
    steps = to_groups(codes, scale.shape[-1]).float()
    if zero is not None:
        steps -= zero.unsqueeze(-1)
    return (steps * scale.unsqueeze(-1)).flatten(-2)
