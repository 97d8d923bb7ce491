"""The plain min-max rule: a group's extremes become the extremes of the code range.

Exact arithmetic only (max, divide, round), so the codes depend on nothing but the weight: not on threads, chunks or
instruction sets. That is why an INT8 head derived from a tied embedding at load follows this rule: the one the gate
judged and the one served later are the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats import integer
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.schemes import Scheme

CHUNK = 1 << 22
"""Weights converted to float32 at a time."""


def minmax_scale(weight: Tensor, scheme: Scheme) -> Tensor:
    """float32 `[N, G]` unrounded scales of a float32 weight `[N, K]`.

    Symmetric: greatest magnitude over half the code range's width (7.5 for INT4, as compressed-tensors; 127 for
    INT8). Asymmetric: the span from least to greatest value, zero included, over the number of steps.
    """
    low, high = integer.code_range(scheme.bits, symmetric=scheme.symmetric)
    groups = integer.to_groups(weight, integer.group_count(weight.shape[-1], scheme.group_size))
    if scheme.symmetric:
        return groups.abs().amax(-1) / ((high - low) / 2)
    return (groups.amax(-1).clamp_min(0) - groups.amin(-1).clamp_max(0)) / (high - low)


def zero_point(least: Tensor, scale: Tensor, bits: int) -> Tensor:
    """float32 `[N, G]` zero points that put `least` (≤ 0) on the first code, as whole numbers within the range."""
    low, high = integer.code_range(bits, symmetric=False)
    return (low - least / scale).round_().clamp_(low, high)


def quantize_minmax(weight: Tensor, scheme: Scheme, *, scale_dtype: torch.dtype, where: str = "") -> QuantizedMatrix:
    """A float weight `[N, K]` of any float type in `scheme`, by the min-max rule, a few rows at a time.

    Scales are rounded to `scale_dtype` before codes are computed. NaN or Inf raises NumericsError, a group size that
    does not divide RecipeError, both naming `where`.
    """
    groups = integer.group_count(weight.shape[1], scheme.group_size, where=where)
    rows = max(1, CHUNK // weight.shape[1])
    codes, scales, zeros = [], [], []
    for chunk in weight.split(rows):
        values = chunk.float()
        integer.require_finite(values, where=where)
        scale = integer.round_scale(minmax_scale(values, scheme), scale_dtype)
        zero = None
        if not scheme.symmetric:
            least = integer.to_groups(values, groups).amin(-1).clamp_max(0)
            zero = zero_point(least, scale, scheme.bits).char()
            zeros.append(zero)
        codes.append(integer.quantize(values, scale, zero, scheme.bits))
        scales.append(scale)
    return QuantizedMatrix(scheme, torch.cat(codes), torch.cat(scales), torch.cat(zeros) if zeros else None)
