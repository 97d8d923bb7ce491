"""Round to nearest, with each group's scale searched to make the rounding and clipping error least."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from quantkit.formats import integer
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.minmax import minmax_scale, quantize_minmax, zero_point
from quantkit.formats.schemes import Scheme
from quantkit_kernels.arrays import Array
from quantkit_kernels.tensors import as_array, as_tensor

Search = Literal["mse", "minmax"]

GRID = 100
"""Shrink factors are multiples of 1/GRID (llm-compressor's MSE observer)."""
SHRINK = 0.8
"""Least factor tried on the min-max range."""
NORM = 2.4
"""Exponent of the error: above 2, so that clipping an outlier costs more than many small roundings."""
CHUNK = 1 << 19
"""Weights searched at a time: the working set stays in a core's cache, whatever the layer's size."""


def rtn(
    weight: Tensor, scheme: Scheme, *, search: Search = "mse", scale_dtype: np.dtype[Any], where: str = ""
) -> QuantizedMatrix:
    """A float weight `[N, K]` rounded to the nearest codes of `scheme`.

    `search="mse"` tries the min-max range shrunk by 1.00, 0.99, ..., 0.80 for every group and keeps the factor with
    the least Σ|error|^2.4; the widest wins a tie. Each candidate scale is rounded to `scale_dtype` (a 16-bit type)
    first, so the error is that of what is stored. `search="minmax"` keeps the whole range.

    Raises NumericsError for NaN or Inf and RecipeError for a group size that does not divide, naming `where`.
    """
    if search == "minmax":
        return quantize_minmax(as_array(weight), scheme, scale_dtype=scale_dtype, where=where)
    groups = integer.group_count(weight.shape[1], scheme.group_size, where=where)
    codes = np.empty(weight.shape, np.int8)
    scales = np.empty((weight.shape[0], groups), np.float32)
    zeros = None if scheme.symmetric else np.empty(scales.shape, np.int8)
    rows = max(1, CHUNK // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        values = weight[part].float()
        integer.require_finite(as_array(values), where=where)
        scale, zero = _search(values, scheme, groups, scale_dtype)
        codes[part] = integer.quantize(as_array(values), scale, zero, scheme.bits)
        scales[part] = scale
        if zeros is not None and zero is not None:
            zeros[part] = zero
    return QuantizedMatrix(scheme, codes, scales, zeros)


def _search(values: Tensor, scheme: Scheme, groups: int, dtype: np.dtype[Any]) -> tuple[Array, Array | None]:
    """Scales `[n, G]` (rounded to `dtype`) and zero points of float32 rows `[n, K]` with the least error."""
    low, high = integer.code_range(scheme.bits, symmetric=scheme.symmetric)
    base = as_tensor(integer.round_scale(minmax_scale(as_array(values), scheme), dtype))
    # In units of the base scale errors are near one, so their powers neither vanish nor overflow.
    steps = values.unflatten(-1, (groups, -1)) / base.unsqueeze(-1)
    least = steps.amin(-1).clamp_max_(0)
    error = torch.empty_like(steps)
    best_loss = torch.full_like(base, torch.inf)
    best_scale, best_zero = base.clone(), torch.zeros_like(base)
    for percent in range(GRID, round(SHRINK * GRID) - 1, -1):
        factor = percent / GRID
        scale = as_tensor(integer.round_scale(as_array(base * factor), dtype))
        relative = (scale / base).unsqueeze(-1)
        torch.div(steps, relative, out=error).round_()
        if scheme.symmetric:
            zero = best_zero
            error.clamp_(low, high)
        else:
            zero = as_tensor(zero_point(as_array(least * factor), as_array(relative.squeeze(-1)), scheme.bits))
            shift = zero.unsqueeze(-1)
            torch.maximum(torch.minimum(error, high - shift, out=error), low - shift, out=error)
        error.mul_(relative).sub_(steps).abs_()
        loss = error.log_().mul_(NORM).exp_().sum(-1)  # |e|^2.4; twice as fast as pow
        better = loss < best_loss
        best_loss = torch.where(better, loss, best_loss)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    return as_array(best_scale), None if scheme.symmetric else as_array(best_zero.char())
