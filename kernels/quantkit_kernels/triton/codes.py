"""Codes out of words: 32 neighbouring columns of a block at once, as exact float16 integers (`layout/packing.py`).

The bits of a code, put into the mantissa of 1024.0 (0x6400, whose last bit counts 1), are the number 1024 + code: no
conversion instruction is needed. (Kim et al., "Who Says Elephants Can't Run", 2022.)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def raw_columns(words, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """int32 words `[R, 16]` -> float16 `[R, 32]`: 1024 + the masked bits of both halves of each word, in pairs."""
    both = ((words >> SHIFT) & (MASK * 0x10001)) | 0x64006400
    low = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, high).reshape(words.shape[0], 32)


@triton.jit
def codes_int4(words, zero, PLANE: tl.constexpr):
    """Columns 32·PLANE and on of a 4-bit block as float16 `[R, 32]`: code − zero (float16 `[R, 1]` or None).

    Odd planes leave the code four bits higher (1024 + 16·code) and divide by 16, which saves every second shift.
    """
    if PLANE % 2 == 0:
        raw = raw_columns(words, 4 * PLANE, 0xF)
        return raw - 1032.0 if zero is None else raw - (zero + 1032.0)
    raw = raw_columns(words, 4 * PLANE - 4, 0xF0) * 0.0625
    return raw - 72.0 if zero is None else raw - (zero + 72.0)


@triton.jit
def codes_int8(words, PLANE: tl.constexpr):
    """Columns 32·PLANE and on of an 8-bit block as float16 `[R, 32]`."""
    return raw_columns(words, 8 * PLANE, 0xFF) - 1152.0
