"""Per-token dynamic quantization: each row as 8-bit codes and the one number a code's step stands for."""

from __future__ import annotations

import torch
from torch import Tensor

TOPS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Types of codes, and what the largest magnitude of a row becomes."""
SMALLEST = 1e-30
"""A row whose largest magnitude is below this is all zero."""


def reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes `[T, K]` of the type, and scales float32 `[T]`: x ≈ codes · scale.

    x: float `[T, K]`; dtype: int8 or float8_e4m3fn. Ties round to even. A row that is not finite gets codes of zero and
    a scale of NaN.
    """
    values, unit = spread(x, TOPS[dtype])
    codes = values.round() if dtype == torch.int8 else values.clamp(-TOPS[dtype], TOPS[dtype])
    return codes.to(dtype), unit[..., 0]


def spread(x: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """x · (most / the row's largest magnitude), not rounded yet, float32 `[..., n]`, and what 1 of it stands for,
    float32 `[..., 1]`. A row that is not finite gets zeros and NaN."""
    x = x.to(torch.float32)
    top = x.abs().amax(-1, keepdim=True)
    live = top >= SMALLEST
    bound = torch.full_like(top, most)  # torch takes a number over a tensor by way of the reciprocal: another rounding
    values = torch.where(live, x * (bound / torch.where(live, top, 1.0)), 0.0)
    broken = ~torch.isfinite(x).all(-1, keepdim=True)
    return torch.where(broken, 0.0, values), torch.where(broken, torch.nan, torch.where(live, top / most, 0.0))
