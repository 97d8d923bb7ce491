"""Codes out of words: 32 neighbouring columns of a block at once, as float16 numbers (`layout/packing.py`).

The bits of an unsigned code, taken as a float16, are the subnormal number code · 2⁻²⁴: no conversion is needed, and the
one constant of the mask fits into the instruction. Offsets are taken off exactly in that unit; who sums products scales
the sum by `UNIT`. Half-precision arithmetic and the matrix units of every target honour subnormals (Fasi, Higham,
Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021).
"""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(2.0**24)
"""What a sum of products with these codes is to be multiplied by."""
_ULP = tl.constexpr(2.0**-24)


@triton.jit
def raw_columns(words, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """int32 words `[R, 16]` -> float16 `[R, 32]`: the masked bits of both halves of each word, in pairs, · 2⁻²⁴."""
    both = (words >> SHIFT) & (MASK * 0x10001)
    low = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, high).reshape(words.shape[0], 32)


@triton.jit
def codes_int4(words, offset, PLANE: tl.constexpr):
    """Columns 32·PLANE and on of a 4-bit block as float16 `[R, 32]`: (unsigned code) · 2⁻²⁴ − offset.

    offset: float16 `[R, 1]`, as `offset_int4` makes it, or None for symmetric codes. Odd planes leave the code four
    bits higher and divide by 16 in the instruction that takes the offset off, which saves every second shift.
    """
    raw = raw_columns(words, 8 * (PLANE // 2), 0xF0 if PLANE % 2 else 0xF)
    if PLANE % 2:
        raw *= 0.0625
    return raw - 8.0 * _ULP if offset is None else raw - offset


@triton.jit
def offset_int4(zero):
    """What to take off unsigned codes for a zero point (float16, a whole number), · 2⁻²⁴."""
    return (zero + 8.0) * _ULP


@triton.jit
def codes_int8(words, PLANE: tl.constexpr):
    """Columns 32·PLANE and on of an 8-bit block as float16 `[R, 32]`, · 2⁻²⁴."""
    return raw_columns(words, 8 * PLANE, 0xFF) - 128.0 * _ULP
