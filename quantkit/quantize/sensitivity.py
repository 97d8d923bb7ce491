"""What a group's quantized weight does to the model: to its loss where gradients are known, else to its own output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.formats.matrix import QuantizedMatrix
from quantkit.quantize.gradients import Tap
from quantkit_kernels.tensors import as_tensor

CHUNK = 1 << 22
"""Weights compared at a time."""
_EVEN = 20
"""Samples at which both estimates count the same."""


def weight_error(weight: Tensor, quantized: QuantizedMatrix) -> Tensor:
    """Quantized minus original, float32 `[N, K]`."""
    return as_tensor(quantized.dequantize()).sub_(weight.float())


def loss_changes(tap: Tap, error: Tensor) -> Tensor:
    """First-order change of the loss through each token's output, float64 `[T]`: ∂L/∂y_t · (ΔW x_t).

    Args:
        tap: the group's inputs `[T, K]` and output gradients `[T, N]`.
        error: ΔW, float32 `[N, K]`.
    """
    rows = max(1, CHUNK // max(error.shape))
    parts = [
        (tap.inputs[start : start + rows] @ error.t()).mul_(tap.gradients[start : start + rows]).sum(1)
        for start in range(0, len(tap.inputs), rows)
    ]
    return torch.cat(parts).double()


def predicted_kl(changes: Tensor, lengths: Sequence[int]) -> float:
    """Predicted mean KL divergence in nats a token, between `kl_by_token` and `kl_by_sample`.

    One misses how a sample's errors add up (those of keys and values do), the other is noisy: of S samples its relative
    variance is 2 / S, against a squared error of about 0.1 of the first (docs/results/sensitivity.md). Weighing them by
    these errors gives the second the share S / (S + 20).
    """
    share = len(lengths) / (len(lengths) + _EVEN)
    return (1 - share) * kl_by_token(changes) + share * kl_by_sample(changes, lengths)


def kl_by_token(changes: Tensor) -> float:
    """½ Σ_t (∂L/∂y_t · Δy_t)² / T, from `loss_changes` `[T]`.

    With labels drawn from the model itself, E[(∂L/∂y · Δy)²] is Δyᵀ F Δy, twice the KL to second order (Fisher
    information F); taking tokens apart leaves out how errors of different tokens add up.
    """
    return 0.5 * float(changes.square().mean())


def kl_by_sample(changes: Tensor, lengths: Sequence[int]) -> float:
    """½ Σ_s (Σ_{t in s} ∂L/∂y_t · Δy_t)² / T, samples of `lengths` tokens.

    The whole second-order divergence, of which one square a sample is a noisy estimate.
    """
    sums = torch.stack([part.sum() for part in changes.split(list(lengths))])
    return 0.5 * float(sums.square().sum()) / len(changes)


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
        total += weight_error(weight[start:stop], quantized.rows(start, stop)).square_().sum(0)
    return float((total * input_sq.double()).sum())
