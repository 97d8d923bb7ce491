"""The layout of weights that are multiplied as they stand: rows of 8-bit codes, padded to a multiple of 128 columns.

Matrix instructions take 8-bit codes from a tile whose rows run along K, as they lie on disk: nothing is reordered.
Codes are padded with zeros, so that a kernel loads whole blocks; one scale a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quantkit_kernels.triton.layout.packing import PADDING


@dataclass(frozen=True)
class CodeRows:
    """A weight `[N, K]` as the kernels read it.

    codes: int8 or float8_e4m3fn `[N, K padded]`. scale: float16, bfloat16 or float32 `[N]`. columns: K.
    """

    codes: Tensor
    scale: Tensor
    columns: int


def pad_rows(codes: Tensor, scale: Tensor) -> CodeRows:
    """Lay out codes `[N, K]`, int8 or float8_e4m3fn, with scales `[N]` of any float type of 16 or 32 bits.

    ValueError for other shapes or types.
    """
    if codes.dtype not in (torch.int8, torch.float8_e4m3fn) or codes.dim() != 2:
        raise ValueError(f"codes must be int8 or float8_e4m3fn [N, K], not {codes.dtype} {list(codes.shape)}")
    rows, columns = codes.shape
    if scale.dtype not in (torch.float16, torch.bfloat16, torch.float32) or tuple(scale.shape) != (rows,):
        raise ValueError(f"scales must be floats [{rows}], not {scale.dtype} {list(scale.shape)}")
    padded = functional.pad(codes.view(torch.int8), (0, -columns % PADDING)).contiguous()
    return CodeRows(padded.view(codes.dtype), scale.contiguous(), columns)
