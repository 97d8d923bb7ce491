"""The layout of quantized weights on a GPU: word-planar, in pairs.

A row is padded to a multiple of 128 columns with zero weights and cut into blocks of 16 words; a block of b-bit codes
holds 512 / b columns (4 bits: 128, 8 bits: 64). Word j of a block holds the columns

    32·i + 2·j + h      in bits  b·i + 16·h ..      for i = 0 .. 16/b − 1 and h = 0, 1

so one mask and one shift take columns 2j and 2j+1 of 32 neighbouring columns out of every word at once, as the two
halves of a register: just what a matrix instruction wants, without a shuffle. Codes are stored unsigned (code + 8 or
code + 128). Scales and zero points are stored group by group, rows running fastest, so that a tile of rows reads
neighbouring bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_WORDS = 16
PADDING = 128
"""Columns that rows are padded to a multiple of."""


@dataclass(frozen=True)
class GpuMatrix:
    """A weight `[N, K]` as the kernels read it.

    words: int32 `[N, 16 · blocks]`. scale: float16 or bfloat16 `[G, N]`, groups of padding included (scale 0); one
    group where a row has one scale. zero: float16 `[G, N]`, whole numbers, or None for symmetric codes. columns: K.
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    columns: int
    bits: int
    group_size: int


def pack_matrix(
    codes: Tensor, scale: Tensor, zero: Tensor | None = None, *, bits: int, group_size: int = 0
) -> GpuMatrix:
    """Lay out int8 codes `[N, K]`, scales `[N, G]` (a 16-bit float type) and int8 zero points `[N, G]`.

    group_size 0 means one scale a row. ValueError for another number of bits than 4 or 8, a group size other than
    32, 64, 128 or that does not divide K, and shapes or types that disagree.
    """
    if bits not in (4, 8):
        raise ValueError(f"{bits}-bit codes have no GPU layout: 4 and 8 have")
    if codes.dtype != torch.int8 or codes.dim() != 2:
        raise ValueError(f"codes must be int8 [N, K], not {codes.dtype} {list(codes.shape)}")
    rows, columns = codes.shape
    if group_size and (columns % group_size or PADDING % group_size or group_size % 32):
        raise ValueError(f"a group size of {group_size} must divide {columns} columns and be 32, 64 or 128")
    groups = columns // group_size if group_size else 1
    if scale.dtype not in (torch.float16, torch.bfloat16) or tuple(scale.shape) != (rows, groups):
        raise ValueError(f"scales must be 16-bit floats {[rows, groups]}, not {scale.dtype} {list(scale.shape)}")
    if zero is not None and (zero.dtype != torch.int8 or zero.shape != scale.shape):
        raise ValueError(f"zero points must be int8 {[rows, groups]}, not {zero.dtype} {list(zero.shape)}")
    padded = -(-columns // PADDING) * PADDING
    fields = 16 // bits
    unsigned = torch.full((rows, padded), 1 << (bits - 1), dtype=torch.int32)
    unsigned[:, :columns] += codes.to(torch.int32)
    planes = unsigned.view(rows, -1, fields, BLOCK_WORDS, 2)
    shifts = torch.arange(fields, dtype=torch.int32)[:, None, None] * bits + torch.tensor([0, 16], dtype=torch.int32)
    words = (planes << shifts).sum(dim=(2, 4), dtype=torch.int64).to(torch.int32)
    return GpuMatrix(
        words=words.view(rows, -1),
        scale=_by_group(scale, padded, group_size),
        zero=None if zero is None else _by_group(zero.to(torch.float16), padded, group_size),
        columns=columns,
        bits=bits,
        group_size=group_size,
    )


def _by_group(table: Tensor, padded: int, group_size: int) -> Tensor:
    groups = padded // group_size if group_size else 1
    out = torch.zeros(groups, table.shape[0], dtype=table.dtype)
    out[: table.shape[1]] = table.T
    return out


def unpack_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """int32 `[N, W]` -> int8 codes `[N, columns]`; the inverse of `pack_matrix` for its words."""
    rows, fields = words.shape[0], 16 // bits
    shifts = torch.arange(fields)[:, None, None] * bits + torch.tensor([0, 16])
    planes = (words.view(rows, -1, 1, BLOCK_WORDS, 1).to(torch.int64) >> shifts) & ((1 << bits) - 1)
    return (planes.reshape(rows, -1)[:, :columns] - (1 << (bits - 1))).to(torch.int8)
