"""Packed storage: compressed-tensors' `pack-quantized` layout, bit for bit.

Element i of a row starts at bit i·bits of the row's int32 words, little end first, stored as code + 2^(bits-1); the
last word is padded with zero bits. Zero points are packed the same way down the rows (`dim=0`).
(compressed_tensors/compressors/pack_quantized/helpers.py, version 0.20)
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, PreflightError
from quantkit.formats.integer import code_range

if sys.byteorder != "little":  # pragma: no cover - no such machine is supported
    raise PreflightError("quantkit packs weights on little-endian machines only")


def words(columns: int, bits: int) -> int:
    """Number of int32 words that hold `columns` elements of `bits` bits."""
    return -(-columns * bits // 32)


def pack_int32(codes: Tensor, bits: int, *, dim: int = 1) -> Tensor:
    """int8 codes `[N, K]` -> int32 `[N, ceil(K·bits/32)]` (`dim=0`: `[ceil(N·bits/32), K]`).

    CheckpointError for codes that are not int8, not two-dimensional or do not fit `bits` (4 or 8).
    """
    low, high = code_range(bits, symmetric=False)
    if codes.dtype != torch.int8 or codes.dim() != 2:
        raise CheckpointError(f"packing takes int8 [N, K] codes, not {codes.dtype} {list(codes.shape)}")
    if bits < 8 and codes.numel() and (int(codes.min()) < low or int(codes.max()) > high):
        raise CheckpointError(f"codes outside {low}..{high} do not fit {bits} bits")
    if dim == 0:
        return pack_int32(codes.T, bits).T.contiguous()
    rows, columns = codes.shape
    padded = words(columns, bits) * (32 // bits)
    # uint8 arithmetic is modulo 256, so a negative code plus its offset comes out right; padding stays zero bits.
    raw = torch.zeros(rows, padded, dtype=torch.uint8)
    raw[:, :columns] = codes.contiguous().view(torch.uint8) + (1 << (bits - 1))
    if bits == 4:
        raw = raw[:, 0::2] | (raw[:, 1::2] << 4)
    return raw.contiguous().view(torch.int32)


def unpack_int32(packed: Tensor, bits: int, shape: tuple[int, int], *, dim: int = 1) -> Tensor:
    """int32 words -> int8 codes of `shape` `[N, K]`; the inverse of `pack_int32`.

    CheckpointError when the words are not the number that `shape` needs.
    """
    low, _ = code_range(bits, symmetric=False)
    if dim == 0:
        return unpack_int32(packed.T, bits, (shape[1], shape[0])).T.contiguous()
    rows, columns = shape
    if packed.dtype != torch.int32 or tuple(packed.shape) != (rows, words(columns, bits)):
        raise CheckpointError(
            f"{bits}-bit {rows}x{columns} takes int32 {[rows, words(columns, bits)]}, "
            f"not {packed.dtype} {list(packed.shape)}"
        )
    # A copy: `contiguous()` keeps the odd strides of a transposed single row or column.
    raw = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:
        raw = torch.stack((raw & 0xF, raw >> 4), dim=-1).flatten(-2)
    return raw[:, :columns].contiguous().view(torch.int8) + low  # modulo 256, as the packing was
