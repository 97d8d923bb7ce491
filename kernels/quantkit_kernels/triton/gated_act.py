"""Gated activation of one fused projection whose first half is the gate: `act(gate) · up`.

    silu(g)      = g · σ(g)
    gelu_tanh(g) = g/2 · (1 + tanh u) = g · σ(2u),   u = √(2/π) · (g + 0.044715 g³)     (Hendrycks and Gimpel 2016)

The second form of GELU loses no digits where tanh u nears -1. Computed in FP32, rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.triton.operands import FLOATS, expect
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

ACTIVATIONS = ("silu", "gelu_tanh")
WARPS = 4
BLOCK = 8 * 32 * WARPS
"""Columns a program: eight a thread, one 16-byte load of FP16 from each half."""


@triton.jit
def gated_act_kernel(gate_up, out, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Programs (row, columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = gate_up + row * (2 * WIDTH) + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    steep = gate
    if ACTIVATION == "gelu_tanh":
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    act = gate * tl.sigmoid(steep)
    tl.store(out + row * WIDTH + column, (act * up).to(out.dtype.element_ty), mask=inside)


def gated_act(gate_up: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
    """`act(gate_up[:, :I]) · gate_up[:, I:]`.

    gate_up: float16, bfloat16 or float32 `[T, 2·I]`; activation: `silu` or `gelu_tanh`. Returns `[T, I]` in the type of
    gate_up (written to `out` where given). Raises ValueError for other shapes or another activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: known are {', '.join(ACTIVATIONS)}")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    expect("gate_up", gate_up, (rows, 2 * width), FLOATS)
    out = gate_up.new_empty(rows, width) if out is None else out
    expect("out", out, (rows, width), FLOATS)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        gated_act_kernel[grid](gate_up, out, **_constants(width, activation), num_warps=WARPS)
    return out


def _constants(width: int, activation: str) -> dict[str, int | str]:
    return {"WIDTH": width, "ACTIVATION": activation, "BLOCK": BLOCK}


def _refusal(facts: Facts) -> str | None:
    if facts["activation"] not in ACTIVATIONS:
        return f"no kernel for activation {facts['activation']!r}"
    return None


def _signature(facts: Facts) -> Signature:
    pointer = f"*{facts['dtype']}"
    constants = _constants(int(facts["width"]), str(facts["activation"]))
    return Signature({"gate_up": pointer, "out": pointer}, constants, num_warps=WARPS)


def _grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return (sizes["rows"], triton.cdiv(int(str(signature.constants["WIDTH"])), BLOCK), 1)


SPECS = (KernelSpec("gated_act", "gated_act", gated_act_kernel, _refusal, _signature, _grid),)
