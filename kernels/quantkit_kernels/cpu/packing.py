"""Weights as the native kernels read them: panels of 32 output rows, packed once, after which the source can go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit_kernels.arrays import BFLOAT16, Array, cast
from quantkit_kernels.cpu.library import library
from quantkit_kernels.cpu.memory import Allocate, streamed

PANEL = 32
INT8, FLOAT32 = np.dtype(np.int8), np.dtype(np.float32)
FLOATS = (FLOAT32, np.dtype(np.float16), BFLOAT16)
DTYPE_CODES: dict[np.dtype[Any], int] = dict(zip((*FLOATS, INT8), range(4), strict=True))
"""Dtype numbers of the C ABI; 4 is int4, which numpy has no type for."""
INT4 = 4
_MOST_ZERO = 120  # so that a 4-bit code less its zero point is a byte


@dataclass(frozen=True)
class PackedMatrix:
    """A `[N, K]` weight in panels; scale and zero are `[ceil(N / 32), G, 32]` or None. w = (code - zero)·scale."""

    data: Array
    scale: Array | None
    zero: Array | None
    dtype: int
    out_features: int
    in_features: int
    groups: int

    @property
    def holds_codes(self) -> bool:
        """Whether the weight is quantized, so that its products may be taken in integers."""
        return self.dtype in (INT4, DTYPE_CODES[INT8])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in (self.data, self.scale, self.zero) if part is not None)


def _panels(values: Array) -> Array:
    """`[N, G]` to `[ceil(N / 32), G, 32]`, padded with zeros."""
    rows, groups = values.shape
    padded = np.zeros((-(-rows // PANEL) * PANEL, groups), values.dtype)
    padded[:rows] = values
    return np.ascontiguousarray(padded.reshape(-1, PANEL, groups).swapaxes(1, 2))


def _narrowed(scale: Array) -> Array:
    """The scales in 16 bits where that loses nothing, else in float32."""
    for dtype in FLOATS[1:]:
        short = cast(scale, dtype)
        if np.array_equal(cast(short, FLOAT32), scale):
            return short
    return scale


def _checked_groups(weight: Array, bits: int, scale: Array | None, zero: Array | None) -> int:
    rows, columns = weight.shape
    if weight.dtype != INT8 or scale is None:
        raise ValueError(f"a {bits}-bit weight is int8 codes [N, K] with a scale [N, G], not {weight.dtype}")
    if scale.ndim != 2 or scale.shape[0] != rows or scale.shape[1] == 0 or columns % scale.shape[1]:
        raise ValueError(f"scale {list(scale.shape)} does not divide a weight {list(weight.shape)} into groups")
    if zero is not None and bits == 4 and zero.size and int(np.abs(zero.astype(np.int16)).max()) > _MOST_ZERO:
        raise ValueError(f"zero points of 4-bit codes lie within -{_MOST_ZERO}..{_MOST_ZERO}")
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"zero {list(zero.shape)} has not the shape of scale {list(scale.shape)}")
    return int(scale.shape[1])


def placed(array: Array, allocate: Allocate) -> Array:
    """A contiguous copy of `array` where `allocate` puts it."""
    copy = allocate(*array.shape, dtype=array.dtype)
    copy[...] = array
    return copy


def pack_matrix(
    weight: Array,
    *,
    bits: int = 16,
    scale: Array | None = None,
    zero: Array | None = None,
    allocate: Allocate = streamed,
) -> PackedMatrix:
    """Pack a weight for `CallList.linear` and `CallList.logits`.

    bits 16: weight float32, float16 or bfloat16 `[N, K]`, kept in its own type; bits 32: kept as float32;
    bits 8 or 4: weight int8 codes `[N, K]` (4-bit codes in -8..7), scale float32 `[N, G]`, zero int8 `[N, G]` or None,
    w = (code - zero) · scale, groups of K / G input channels. `allocate` says where the result lies. Raises ValueError
    on other shapes or types.
    """
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"a weight is [N, K], not {list(weight.shape)}")
    if bits in (4, 8):
        groups = _checked_groups(weight, bits, scale, zero)
        code = INT4 if bits == 4 else DTYPE_CODES[INT8]
    elif bits in (16, 32):
        if weight.dtype not in FLOATS or scale is not None or zero is not None:
            raise ValueError(f"a {bits}-bit weight is float32, float16 or bfloat16 without scales, not {weight.dtype}")
        weight = cast(weight, FLOAT32) if bits == 32 else weight
        groups, code = 1, DTYPE_CODES[weight.dtype]
    else:
        raise ValueError(f"weights of {bits} bits are not supported: 4, 8, 16 and 32 are")
    source = np.ascontiguousarray(weight)
    rows, columns = source.shape
    data = allocate(library().qk_packed_bytes(code, rows, columns, groups), dtype=np.dtype(np.uint8))
    library().qk_pack(code, source.ctypes.data, rows, columns, groups, data.ctypes.data)
    return PackedMatrix(
        data=data,
        scale=None if scale is None else placed(_narrowed(_panels(cast(scale, FLOAT32))), allocate),
        zero=None if zero is None else placed(_panels(cast(zero, INT8)), allocate),
        dtype=code,
        out_features=rows,
        in_features=columns,
        groups=groups,
    )
