"""Cells of the paged cache: how a key or value is stored in each format, and read back.

    INT8    clamp(round(x / scale), -127, 127)
    FP8     e4m3 of clamp(x / scale, -448, 448), a byte; NaN is 0x7f
    INT4    y = clamp(x / scale, -65504, 65504) in groups of channels (`cache_formats.group_of`), each with a float16
            minimum and scale: minimum = min(y) rounded down, scale = (max(y) - minimum) / 15 rounded up,
            code = round((y - minimum) / scale) in 0..15, so that no y lies outside its group's range; y ≈ code·scale +
            minimum. A group that holds NaN is NaN. The cell: every group's codes, its first half of channels in the low
            nibbles and its second in the high ones; then every group's scale and minimum.
    others  a cast

Rounding is to the nearest, half to even, in float32. The native kernels store the same bytes (src/cells.inl).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.cache_formats import CACHE_FORMATS, group_of

_MOST_HALF = 65504.0


def store(x: Tensor, scale: Tensor | None, cache_format: str) -> Tensor:
    """Cells `[..., Hkv, cell]` of x float32 `[..., Hkv, D]`; scale: float32 `[Hkv, D]`, None for float formats.

    ValueError where a scale is missing or the format cannot hold heads of D channels.
    """
    kind = CACHE_FORMATS[cache_format]
    dtype: torch.dtype = getattr(torch, kind.dtype)
    if not kind.scaled:
        return x.to(dtype)
    if scale is None:
        raise ValueError(f"a cache in {cache_format} needs k_scale and v_scale, float32 [num_kv_heads, head_dim]")
    y = x / scale
    if cache_format == "FP8":
        codes = y.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.where(y.isnan(), torch.full_like(codes, 0x7F), codes)
    if cache_format == "INT4":
        return _store_int4(y.clamp(-_MOST_HALF, _MOST_HALF))
    return torch.clamp(torch.round(y), -127, 127).to(dtype)


def load(cells: Tensor, cache_format: str, head_dim: int) -> Tensor:
    """float32 `[..., D]` of cells `[..., cell]`, without the calibrated scale."""
    if cache_format == "FP8":
        return cells.view(torch.float8_e4m3fn).to(torch.float32)
    if cache_format != "INT4":
        return cells.to(torch.float32)
    codes, levels = cells.split((head_dim // 2, cells.shape[-1] - head_dim // 2), dim=-1)
    packed = codes.unflatten(-1, (-1, group_of(head_dim) // 2))
    unit, minimum = levels.contiguous().view(torch.float16).unflatten(-1, (-1, 2)).float().split(1, dim=-1)
    return (torch.cat((packed & 15, packed >> 4), dim=-1) * unit + minimum).flatten(-2)


def _store_int4(y: Tensor) -> Tensor:
    size = group_of(y.shape[-1])
    groups = y.unflatten(-1, (-1, size))
    spoiled = groups.isnan().any(-1, keepdim=True)
    groups = torch.where(spoiled, 0.0, groups)
    minimum = _half_below(groups.amin(-1, keepdim=True) + 0.0)  # + 0: neither is -0
    unit = _half_above((groups.amax(-1, keepdim=True) - minimum.float() + 0.0) / 15)
    steps = (groups - minimum.float()) / torch.where(unit == 0, 1.0, unit.float())
    codes = steps.round().clamp(max=15).to(torch.uint8)
    low, high = codes.split(size // 2, dim=-1)
    minimum = torch.where(spoiled, torch.tensor(float("nan"), dtype=torch.float16), minimum)
    levels = torch.cat((unit, minimum), dim=-1).view(torch.uint8)
    return torch.cat(((low | high << 4).flatten(-2), levels.flatten(-2)), dim=-1)


def _half_below(x: Tensor) -> Tensor:
    """The greatest float16 that is at most x, |x| <= 65504."""
    near = x.half()
    bits = near.view(torch.int16)
    return torch.where(near.float() <= x, bits, torch.where(bits < 0, bits + 1, bits - 1)).view(torch.float16)


def _half_above(x: Tensor) -> Tensor:
    """The least float16 that is at least x, 0 <= x <= 65504."""
    near = x.half()
    bits = near.view(torch.int16)
    return torch.where(near.float() < x, bits + 1, bits).view(torch.float16)
