"""GPTQ: round a weight column by column, each column's error made up for by the columns still to come.

E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv:2210.17323, algorithm 1, with its Cholesky form. Columns go in order of falling Hessian diagonal ("activation
order"), while scales stay those of their own groups, found before any column moves: the stored matrix needs no
permutation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import NumericsError
from quantkit.formats import integer
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.schemes import Scheme
from quantkit.quantize.rtn import Search, rtn
from quantkit_kernels.tensors import as_array, as_tensor

ATTEMPTS = 4
"""Factorisations tried before giving up: the damping asked for, then ten times as much, three times."""


@dataclass(frozen=True)
class Damped:
    """How a matrix was quantized. `damping`: share of the mean diagonal that was added; None where no factor was found
    and plain rounding stood in. `loss`, `rtn_loss`: tr(ΔW·H·ΔWᵀ) of the result and of rounding to nearest."""

    damping: float | None
    loss: float
    rtn_loss: float


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    *,
    scale_dtype: np.dtype[Any],
    search: Search = "mse",
    damping: float = 0.01,
    block: int = 128,
    act_order: bool = True,
    where: str = "",
) -> tuple[QuantizedMatrix, Damped]:
    """A float weight `[N, K]` in codes of `scheme` such that tr(ΔW·H·ΔWᵀ) is small.

    Args:
        weight: `[N, K]`, any float type, finite.
        hessian: `[K, K]` float32, Σ x xᵀ over the calibration tokens (any positive factor); finite.
        scheme: an integer scheme; its scales (and zero points) are those `rtn` finds.
        scale_dtype: 16-bit type the scales are rounded to. search: how they are found.
        damping: share of the mean Hessian diagonal added to it; ten times as much after each failed factorisation.
        block: columns between updates of all later ones.
        act_order: start with the columns of the largest inputs.
        where: names the matrix in errors.

    A channel that never saw an input keeps its weights, rounded to nearest, and makes up for nothing.

    Raises NumericsError for NaN or Inf in the weight or the Hessian, RecipeError for a group size that does not divide.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise NumericsError(
            "the inputs' second moments are NaN or Inf", where=where, next="Drop the sample that overflows"
        )
    nearest = rtn(weight, scheme, search=search, scale_dtype=scale_dtype, where=where)
    matrix = weight.float()
    nearest_loss = layer_loss(matrix, nearest, hessian)
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True) if act_order else torch.arange(len(hessian))
    factor, used = _factor(hessian, order, damping)
    if factor is None:
        return nearest, Damped(None, nearest_loss, nearest_loss)
    codes = _rounded(matrix, nearest, factor, order, block)
    result = QuantizedMatrix(scheme, as_array(codes), nearest.scale, nearest.zero)
    return result, Damped(used, layer_loss(matrix, result, hessian), nearest_loss)


def layer_loss(weight: Tensor, quantized: QuantizedMatrix, hessian: Tensor) -> float:
    """tr(ΔW·H·ΔWᵀ), the summed squared error of the layer's output over the tokens that `hessian` was made of."""
    total = 0.0
    rows = max(1, (1 << 22) // weight.shape[1])
    for start in range(0, len(weight), rows):
        delta = as_tensor(quantized.rows(start, min(start + rows, len(weight))).dequantize())
        delta -= weight[start : start + rows]
        total += float((delta @ hessian).mul_(delta).sum(dtype=torch.float64))
    return total


def _factor(hessian: Tensor, order: Tensor, damping: float) -> tuple[Tensor | None, float]:
    """Upper Cholesky factor `[K, K]` of the damped inverse Hessian in column order, and the damping that gave it."""
    permuted = hessian[order][:, order]
    diagonal = permuted.diagonal()
    dead = diagonal == 0
    mean = diagonal[~dead].mean() if not bool(dead.all()) else torch.ones(())
    diagonal[dead] = mean
    kept = diagonal.clone()
    for attempt in range(ATTEMPTS):
        used = damping * 10**attempt
        permuted.diagonal().copy_(kept + used * mean)
        lower, failed = torch.linalg.cholesky_ex(permuted)
        if int(failed):
            continue
        inverse = torch.cholesky_inverse(lower)
        del lower
        upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
        if not int(failed) and bool(torch.isfinite(upper).all()):
            return upper, used
    return None, 0.0


def _rounded(weight: Tensor, grid: QuantizedMatrix, factor: Tensor, order: Tensor, block: int) -> Tensor:
    """Codes int8 `[N, K]` on the grid's scales. Works on columns as contiguous rows, `[K, N]`."""
    low, high = integer.code_range(grid.scheme.bits, symmetric=grid.zero is None)
    rows, columns = weight.shape
    width = columns // grid.scale.shape[1]
    scales = as_tensor(grid.scale).t().contiguous()
    zeros = None if grid.zero is None else as_tensor(grid.zero).t().float()
    left = weight.t()[order]
    groups = (order // width).tolist()
    codes = torch.empty((columns, rows), dtype=torch.int8)
    errors = torch.empty((block, rows))
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        for column in range(start, stop):
            scale = scales[groups[column]]
            value = left[column]
            steps = (value / scale).round_()
            if zeros is None:
                steps.clamp_(low, high)
                code = steps
            else:
                code = (steps + zeros[groups[column]]).clamp_(low, high)
                steps = code - zeros[groups[column]]
            codes[column] = code
            error = errors[column - start]
            torch.sub(value, steps.mul_(scale) if zeros is None else steps * scale, out=error)
            error /= factor[column, column]
            if column + 1 < stop:
                left[column + 1 : stop].addr_(factor[column, column + 1 : stop], error, alpha=-1)
        if stop < columns:
            left[stop:].addmm_(factor[start:stop, stop:].t(), errors[: stop - start], alpha=-1)
    whole = torch.empty_like(codes)
    whole[order] = codes
    return whole.t().contiguous()
