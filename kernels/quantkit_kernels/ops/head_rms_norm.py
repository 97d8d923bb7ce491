"""RMS norm over each attention head's channels (the q/k norm of Qwen3 and Gemma 3)."""

from __future__ import annotations

from torch import Tensor

from quantkit_kernels.ops import rms_norm


def reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Norm of each head of x: float32 `[T, heads, D]` by weight `[D]`. Returns float32 `[T, heads, D]`."""
    return rms_norm.reference(x, weight, eps, offset)
