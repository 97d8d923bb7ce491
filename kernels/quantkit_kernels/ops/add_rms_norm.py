"""Residual add followed by RMS norm: what stands between two blocks of a pre-norm decoder."""

from __future__ import annotations

from torch import Tensor

from quantkit_kernels.ops import rms_norm


def reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """`residual_out = x + residual`, `y = rms_norm(residual_out)`.

    x, residual: float32 `[T, H]`; weight: `[H]`. Returns `(y, residual_out)`, float32 `[T, H]` each.
    """
    residual_out = x + residual
    return rms_norm.reference(residual_out, weight, eps, offset), residual_out
