"""QuantizedMatrix: one fused group's weight as integer codes with scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import CheckpointError
from quantkit.formats import integer
from quantkit.formats.schemes import Scheme
from quantkit_kernels.arrays import Array


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight `[N, K]` stored by `scheme`: w = (code - zero) · scale.

    codes: int8 `[N, K]` (4-bit codes in -8..7). scale: float32 `[N, G]`, every value representable in 16 bits.
    zero: int8 `[N, G]` for an asymmetric scheme, else None. Shapes that disagree raise CheckpointError.
    """

    scheme: Scheme
    codes: Array
    scale: Array
    zero: Array | None = None

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.dtype != np.int8:
            raise CheckpointError(f"codes must be int8 [N, K], not {self.codes.dtype} {list(self.codes.shape)}")
        rows, columns = self.codes.shape
        wanted = (rows, integer.group_count(columns, self.scheme.group_size))
        if self.scale.shape != wanted or self.scale.dtype != np.float32:
            raise CheckpointError(
                f"scales of a {rows}x{columns} {self.scheme.name} weight must be float32 {list(wanted)}, "
                f"not {self.scale.dtype} {list(self.scale.shape)}"
            )
        if (self.zero is None) != self.scheme.symmetric:
            raise CheckpointError(f"{self.scheme.name} {'has no' if self.scheme.symmetric else 'needs'} zero points")
        if self.zero is not None and (self.zero.shape != wanted or self.zero.dtype != np.int8):
            raise CheckpointError(
                f"zero points must be int8 {list(wanted)}, not {self.zero.dtype} {list(self.zero.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> NDArray[np.float32]:
        """float32 `[N, K]`."""
        return integer.dequantize(self.codes, self.scale, self.zero)

    def rows(self, start: int, stop: int) -> QuantizedMatrix:
        """Rows `[start, stop)` as views."""
        zero = None if self.zero is None else self.zero[start:stop]
        return QuantizedMatrix(self.scheme, self.codes[start:stop], self.scale[start:stop], zero)


def concatenate(parts: list[QuantizedMatrix]) -> QuantizedMatrix:
    """Matrices of one scheme and width stacked by rows: the q, k and v parts of a fused `qkv` group."""
    if len(parts) == 1:
        return parts[0]
    zeros = [part.zero for part in parts if part.zero is not None]
    return QuantizedMatrix(
        parts[0].scheme,
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate(zeros) if zeros else None,
    )
