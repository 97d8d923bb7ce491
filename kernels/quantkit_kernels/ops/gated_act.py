"""Gated activation of one fused projection whose first half is the gate."""

from __future__ import annotations

from torch import Tensor

from quantkit_kernels.ops import act_mul


def reference(gate_up: Tensor, activation: str) -> Tensor:
    """`act(gate_up[:, :I]) * gate_up[:, I:]`.

    gate_up: float32 `[T, 2·I]`; activation: `silu` or `gelu_tanh`. Returns float32 `[T, I]`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return act_mul.reference(gate, up, activation)
