"""Where an executor's weights come from: a checkpoint, an artifact, or a quantizer on the fly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quantkit.program.ir import Weight

if TYPE_CHECKING:
    from quantkit.formats.matrix import QuantizedMatrix
    from quantkit_kernels.arrays import Array


class WeightProvider(Protocol):
    """Anything that can load a Program's weights one at a time."""

    def load(self, weight: Weight) -> Array | QuantizedMatrix:
        """The weight as its kind and scheme say.

        A quantized matrix comes as QuantizedMatrix `[N, K]`, another matrix or table as an array of the source's type,
        a vector `[N]` or KV scales `[num_kv_heads, head_dim]` as float32.
        """
        ...
