"""Weights as the native kernels read them: panels of 32 output rows, packed once, after which the source can go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit_kernels.cpu.library import library
from quantkit_kernels.cpu.memory import Allocate, streamed_tensor

PANEL = 32
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
"""Dtype numbers of the C ABI; 4 is int4, which torch has no type for."""
INT4 = 4
_MOST_ZERO = 120  # so that a 4-bit code less its zero point is a byte


@dataclass(frozen=True)
class PackedMatrix:
    """A `[N, K]` weight in panels; scale and zero are `[ceil(N / 32), G, 32]` or None. w = (code - zero)·scale."""

    data: Tensor
    scale: Tensor | None
    zero: Tensor | None
    dtype: int
    out_features: int
    in_features: int
    groups: int

    @property
    def holds_codes(self) -> bool:
        """Whether the weight is quantized, so that its products may be taken in integers."""
        return self.dtype in (INT4, DTYPE_CODES[torch.int8])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in (self.data, self.scale, self.zero) if part is not None)


def _panels(values: Tensor) -> Tensor:
    """`[N, G]` to `[ceil(N / 32), G, 32]`, padded with zeros."""
    rows, groups = values.shape
    padded = values.new_zeros(-(-rows // PANEL) * PANEL, groups)
    padded[:rows] = values
    return padded.view(-1, PANEL, groups).transpose(1, 2).contiguous()


def _narrowed(scale: Tensor) -> Tensor:
    """The scales in 16 bits where that loses nothing, else in float32."""
    for dtype in (torch.float16, torch.bfloat16):
        short = scale.to(dtype)
        if torch.equal(short.to(torch.float32), scale):
            return short
    return scale


def _checked_groups(weight: Tensor, bits: int, scale: Tensor | None, zero: Tensor | None) -> int:
    rows, columns = weight.shape
    if weight.dtype != torch.int8 or scale is None:
        raise ValueError(f"a {bits}-bit weight is int8 codes [N, K] with a scale [N, G], not {weight.dtype}")
    if scale.ndim != 2 or scale.shape[0] != rows or scale.shape[1] == 0 or columns % scale.shape[1]:
        raise ValueError(f"scale {list(scale.shape)} does not divide a weight {list(weight.shape)} into groups")
    if zero is not None and bits == 4 and zero.numel() and int(zero.to(torch.int16).abs().max()) > _MOST_ZERO:
        raise ValueError(f"zero points of 4-bit codes lie within -{_MOST_ZERO}..{_MOST_ZERO}")
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"zero {list(zero.shape)} has not the shape of scale {list(scale.shape)}")
    return int(scale.shape[1])


def placed(tensor: Tensor, allocate: Allocate) -> Tensor:
    """A contiguous copy of `tensor` where `allocate` puts it."""
    return allocate(*tensor.shape, dtype=tensor.dtype).copy_(tensor)


def pack_matrix(
    weight: Tensor,
    *,
    bits: int = 16,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    allocate: Allocate = streamed_tensor,
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
        code = INT4 if bits == 4 else DTYPE_CODES[torch.int8]
    elif bits in (16, 32):
        if not weight.is_floating_point() or weight.dtype not in DTYPE_CODES or scale is not None or zero is not None:
            raise ValueError(f"a {bits}-bit weight is float32, float16 or bfloat16 without scales, not {weight.dtype}")
        weight = weight.to(torch.float32) if bits == 32 else weight
        groups, code = 1, DTYPE_CODES[weight.dtype]
    else:
        raise ValueError(f"weights of {bits} bits are not supported: 4, 8, 16 and 32 are")
    source = weight.detach().contiguous()
    rows, columns = source.shape
    data = allocate(library().qk_packed_bytes(code, rows, columns, groups), dtype=torch.uint8)
    library().qk_pack(code, source.data_ptr(), rows, columns, groups, data.data_ptr())
    return PackedMatrix(
        data=data,
        scale=None if scale is None else placed(_narrowed(_panels(scale.detach().to(torch.float32))), allocate),
        zero=None if zero is None else placed(_panels(zero.to(torch.int8)), allocate),
        dtype=code,
        out_features=rows,
        in_features=columns,
        groups=groups,
    )
