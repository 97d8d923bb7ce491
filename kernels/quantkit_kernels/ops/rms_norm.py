"""Root-mean-square norm (Zhang and Sennrich 2019, eq. 4), with Gemma's `1 + weight` as an offset."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`x * rsqrt(mean(x²) + eps) * (weight + offset)` over the last dimension.

    x: float32 `[..., H]`; weight: `[H]`. Returns float32 `[..., H]`.
    """
    x = x.to(torch.float32)
    inverse = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return x * inverse * (weight.to(torch.float32) + offset)
