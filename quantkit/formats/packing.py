"""Packed storage: compressed-tensors' `pack-quantized` layout, bit for bit.

Element i of a row starts at bit i·bits of the row's int32 words, little end first, stored as code + 2^(bits-1); the
last word is padded with zero bits. Zero points are packed the same way down the rows (`dim=0`).
(compressed_tensors/compressors/pack_quantized/helpers.py, version 0.20)
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import CheckpointError, PreflightError
from quantkit.formats.integer import code_range
from quantkit_kernels.arrays import Array

if sys.byteorder != "little":  # pragma: no cover - no such machine is supported
    raise PreflightError("quantkit packs weights on little-endian machines only")


def words(columns: int, bits: int) -> int:
    """Number of int32 words that hold `columns` elements of `bits` bits."""
    return -(-columns * bits // 32)


def pack_int32(codes: Array, bits: int, *, dim: int = 1) -> NDArray[np.int32]:
    """int8 codes `[N, K]` -> int32 `[N, ceil(K·bits/32)]` (`dim=0`: `[ceil(N·bits/32), K]`).

    CheckpointError for codes that are not int8, not two-dimensional or do not fit `bits` (4 or 8).
    """
    low, high = code_range(bits, symmetric=False)
    if codes.dtype != np.int8 or codes.ndim != 2:
        raise CheckpointError(f"packing takes int8 [N, K] codes, not {codes.dtype} {list(codes.shape)}")
    if bits < 8 and codes.size and (codes.min() < low or codes.max() > high):
        raise CheckpointError(f"codes outside {low}..{high} do not fit {bits} bits")
    if dim == 0:
        return np.ascontiguousarray(pack_int32(codes.T, bits).T)
    rows, columns = codes.shape
    padded = words(columns, bits) * (32 // bits)
    # uint8 arithmetic is modulo 256, so a negative code plus its offset comes out right; padding stays zero bits.
    raw: NDArray[np.uint8] = np.zeros((rows, padded), np.uint8)
    raw[:, :columns] = codes.view(np.uint8) + np.uint8(1 << (bits - 1))
    if bits == 4:
        raw = raw[:, 0::2] | raw[:, 1::2] << np.uint8(4)
    return raw.view(np.int32)


def unpack_int32(packed: Array, bits: int, shape: tuple[int, int], *, dim: int = 1) -> NDArray[np.int8]:
    """int32 words -> int8 codes of `shape` `[N, K]`; the inverse of `pack_int32`.

    CheckpointError when the words are not the number that `shape` needs.
    """
    low, _ = code_range(bits, symmetric=False)
    if dim == 0:
        return np.ascontiguousarray(unpack_int32(packed.T, bits, (shape[1], shape[0])).T)
    rows, columns = shape
    if packed.dtype != np.int32 or packed.shape != (rows, words(columns, bits)):
        raise CheckpointError(
            f"{bits}-bit {rows}x{columns} takes int32 {[rows, words(columns, bits)]}, "
            f"not {packed.dtype} {list(packed.shape)}"
        )
    raw = np.ascontiguousarray(packed).view(np.uint8)
    if bits == 4:  # a byte's two nibbles, the low one first, become the bytes of 16 bits
        pairs = raw.astype(np.uint16)
        raw = ((pairs | pairs << 4) & 0x0F0F).view(np.uint8)
    return (raw[:, :columns] + np.uint8(low % 256)).view(np.int8)  # modulo 256, as the packing was
