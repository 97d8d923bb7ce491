"""The plain min-max rule: a group's extremes become the extremes of the code range.

Exact arithmetic only (max, divide, round), so the codes depend on nothing but the weight: not on threads, chunks or
instruction sets. That is why an INT8 head derived from a tied embedding at load follows this rule: the one the gate
judged and the one served later are the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.formats import integer
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.schemes import Scheme
from quantkit_kernels.arrays import Array, cast

CHUNK = 1 << 18
"""Weights converted to float32 at a time: they stay in a core's cache through all passes."""


def minmax_scale(weight: Array, scheme: Scheme) -> Array:
    """float32 `[N, G]` unrounded scales of a float32 weight `[N, K]`.

    Symmetric: greatest magnitude over half the code range's width (7.5 for INT4, as compressed-tensors; 127 for
    INT8). Asymmetric: the span from least to greatest value, zero included, over the number of steps.
    """
    low, high = integer.code_range(scheme.bits, symmetric=scheme.symmetric)
    groups = integer.to_groups(weight, integer.group_count(weight.shape[-1], scheme.group_size))
    if scheme.symmetric:
        return np.maximum(groups.max(-1), -groups.min(-1)) / np.float32((high - low) / 2)
    return (np.maximum(groups.max(-1), 0) - np.minimum(groups.min(-1), 0)) / np.float32(high - low)


def zero_point(least: Array, scale: Array, bits: int) -> Array:
    """float32 `[N, G]` zero points that put `least` (≤ 0) on the first code, as whole numbers within the range."""
    low, high = integer.code_range(bits, symmetric=False)
    return np.clip(np.rint(low - least / scale), low, high)


def quantize_minmax(weight: Array, scheme: Scheme, *, scale_dtype: np.dtype[Any], where: str = "") -> QuantizedMatrix:
    """A float weight `[N, K]` of any float type in `scheme`, by the min-max rule, a few rows at a time.

    Scales are rounded to `scale_dtype` before codes are computed. NaN or Inf raises NumericsError, a group size that
    does not divide RecipeError, both naming `where`.
    """
    groups = integer.group_count(weight.shape[1], scheme.group_size, where=where)
    rows = max(1, CHUNK // weight.shape[1])
    codes, scales, zeros = [], [], []
    for start in range(0, len(weight), rows):
        values = cast(weight[start : start + rows], np.float32)
        integer.require_finite(values, where=where)
        scale = integer.round_scale(minmax_scale(values, scheme), scale_dtype)
        zero = None
        if not scheme.symmetric:
            least = np.minimum(integer.to_groups(values, groups).min(-1), 0)
            zero = zero_point(least, scale, scheme.bits).astype(np.int8)
            zeros.append(zero)
        codes.append(integer.quantize(values, scale, zero, scheme.bits))
        scales.append(scale)
    return QuantizedMatrix(
        scheme, np.concatenate(codes), np.concatenate(scales), np.concatenate(zeros) if zeros else None
    )
