"""How much a group's output suffers from its quantized weight, before any gradient is known."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats.matrix import QuantizedMatrix

CHUNK = 1 << 22
"""Weights compared at a time."""


def weight_sensitivity(weight: Tensor, quantized: QuantizedMatrix, input_sq: Tensor) -> float:
    """Expected squared error of the group's output, summed over its rows: Σ_k E[x_k²] · Σ_n ΔW_nk².

    The diagonal of the layer-wise objective tr(ΔW · E[x xᵀ] · ΔWᵀ) that GPTQ minimises (arXiv:2210.17323, eq. 1).

    Args:
        weight: the original, `[N, K]`, any float type.
        quantized: its quantized form, same shape.
        input_sq: `[K]` float32, mean square of each input channel over the calibration tokens.
    """
    total = torch.zeros(weight.shape[1], dtype=torch.float64)
    rows = max(1, CHUNK // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        stop = min(start + rows, weight.shape[0])
        delta = quantized.rows(start, stop).dequantize().sub_(weight[start:stop].float())
        total += delta.square_().sum(0)
    return float((total * input_sq.double()).sum())
