"""The layout of the weights of many experts: each as a matrix of its form lies, one behind the other.

FP16 weights are padded with zeros to a multiple of 128 columns, so that a kernel loads whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quantkit_kernels.triton.layout.packing import PADDING, GpuMatrix


@dataclass(frozen=True)
class GpuExperts:
    """Weights `[E, N, K]` as the kernels read them.

    words: int32 `[E, N, W]` as in `GpuMatrix`, or float16 `[E, N, K padded]` (bits 16). scale: float16 or bfloat16
    `[E, G, N]`, None for float16 weights. zero: float16 `[E, G, N]`, or None for symmetric codes. columns: K.
    """

    words: Tensor
    scale: Tensor | None
    zero: Tensor | None
    columns: int
    bits: int
    group_size: int


def stack_experts(matrices: Sequence[GpuMatrix]) -> GpuExperts:
    """Lay out packed matrices of one form, an expert each. ValueError where there are none or they differ in form."""
    forms = {(each.words.shape, each.scale.dtype, each.zero is None, each.columns, each.bits, each.group_size)
             for each in matrices}  # fmt: skip
    if len(forms) != 1:
        raise ValueError(f"weights of experts must have one shape and form, and these have {len(forms)}")
    first = matrices[0]
    zeros = [each.zero for each in matrices if each.zero is not None]
    return GpuExperts(
        words=torch.stack([each.words for each in matrices]),
        scale=torch.stack([each.scale for each in matrices]),
        zero=torch.stack(zeros) if zeros else None,
        columns=first.columns,
        bits=first.bits,
        group_size=first.group_size,
    )


def pad_experts(weight: Tensor) -> GpuExperts:
    """Lay out float16 weights `[E, N, K]`. ValueError for another type or number of dimensions."""
    if weight.dtype != torch.float16 or weight.dim() != 3:
        raise ValueError(f"weights must be float16 [E, N, K], not {weight.dtype} {list(weight.shape)}")
    padded = functional.pad(weight, (0, -weight.shape[2] % PADDING)).contiguous()
    return GpuExperts(padded, None, None, weight.shape[2], 16, 0)
