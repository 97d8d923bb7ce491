"""Gated activation of two separate tensors: `act(gate) * up`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`act(gate) * up`, float32 `[T, I]`.

    activation: `silu`, or `gelu_tanh` (the tanh form of GELU, Hendrycks and Gimpel 2016).
    Raises ValueError for another name.
    """
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    raise ValueError(f"unknown activation {activation!r}: known are silu, gelu_tanh")
