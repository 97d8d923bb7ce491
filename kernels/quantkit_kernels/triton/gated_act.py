"""Gated activation of one fused projection whose first half is the gate: `act(gate) · up`.

    silu(g)      = g · σ(g)
    gelu_tanh(g) = g/2 · (1 + tanh u) = g · σ(2u),   u = √(2/π) · (g + 0.044715 g³)     (Hendrycks and Gimpel 2016)

The second form of GELU loses no digits where tanh u nears -1. Computed in FP32, rounded once at the end.

`gated_act_quant` holds a whole row in a program and quantizes the result as it would be stored (`quantize_row`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.triton.operands import FLOATS, expect
from quantkit_kernels.triton.quantize import (
    WIDEST,
    outputs,
    quant_pointers,
    quant_refusal,
    quantize_row,
    row_constants,
    row_grid,
    row_warps,
)
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

ACTIVATIONS = ("silu", "gelu_tanh")
WARPS = 4
BLOCK = 8 * 32 * WARPS
"""Columns a program: eight a thread, one 16-byte load of FP16 from each half."""


@triton.jit
def _gated(at, inside, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):
    """act(gate) · up as float32; the gate lies `at`, and up WIDTH behind it."""
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    steep = gate
    if ACTIVATION == "gelu_tanh":
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(steep) * up


@triton.jit
def gated_act_kernel(gate_up, out, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Programs (row, columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    product = _gated(gate_up + row * (2 * WIDTH) + column, inside, WIDTH, ACTIVATION)
    tl.store(out + row * WIDTH + column, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_act_quant_kernel(
    gate_up, out, codes, scale, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """Programs (row): codes and scale, and out where it is not None."""
    at = tl.program_id(0)
    row = at.to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    product = _gated(gate_up + row * (2 * WIDTH) + column, inside, WIDTH, ACTIVATION).to(gate_up.dtype.element_ty)
    if out is not None:
        tl.store(out + row * WIDTH + column, product, mask=inside)
    quantize_row(product.to(tl.float32), codes, scale, at, column, inside, WIDTH)


def gated_act(gate_up: Tensor, activation: str, out: Tensor | None = None) -> Tensor:
    """`act(gate_up[:, :I]) · gate_up[:, I:]`.

    gate_up: float16, bfloat16 or float32 `[T, 2·I]`; activation: `silu` or `gelu_tanh`. Returns `[T, I]` in the type of
    gate_up (written to `out` where given). Raises ValueError for other shapes or another activation.
    """
    rows, width = _expect(gate_up, activation)
    out = gate_up.new_empty(rows, width) if out is None else out
    expect("out", out, (rows, width), FLOATS)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        gated_act_kernel[grid](gate_up, out, width, activation, BLOCK, num_warps=WARPS)
    return out


def gated_act_quant(
    gate_up: Tensor,
    activation: str,
    *,
    dtype: torch.dtype = torch.int8,
    out: Tensor | None = None,
    codes: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gated_act` whose result comes as codes, int8 or float8_e4m3fn `[T, I]`, I ≤ 32768, and scales, float32 `[T]`.

    Returns `(codes, scale)`; out is written too where it is given. ValueError as above.
    """
    rows, width = _expect(gate_up, activation)
    if width > WIDEST:
        raise ValueError(f"rows of {width} columns are wider than the quantization kernel's {WIDEST}")
    codes, scale = outputs(gate_up, rows, width, dtype, codes, scale)
    if out is not None:
        expect("out", out, (rows, width), FLOATS)
    if rows:
        constants = {**row_constants(width), "ACTIVATION": activation}
        gated_act_quant_kernel[(rows,)](gate_up, out, codes, scale, **constants, num_warps=row_warps(width))
    return codes, scale


def _expect(gate_up: Tensor, activation: str) -> tuple[int, int]:
    """Rows and width of the result."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: known are {', '.join(ACTIVATIONS)}")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    expect("gate_up", gate_up, (rows, 2 * width), FLOATS)
    return rows, width


def _refusal(facts: Facts) -> str | None:
    if facts["activation"] not in ACTIVATIONS:
        return f"no kernel for activation {facts['activation']!r}"
    return "its output is not quantized" if facts.get("quant") else None


def _quant_refusal(facts: Facts) -> str | None:
    if facts["activation"] not in ACTIVATIONS:
        return f"no kernel for activation {facts['activation']!r}"
    if not facts.get("quant"):
        return "its output is quantized"
    if int(facts["width"]) > WIDEST:
        return f"rows of {facts['width']} columns are wider than {WIDEST}"
    return quant_refusal(facts)


def _signature(facts: Facts) -> Signature:
    pointer = f"*{facts['dtype']}"
    constants: dict[str, int | str] = {
        "WIDTH": int(facts["width"]),
        "ACTIVATION": str(facts["activation"]),
        "BLOCK": BLOCK,
    }
    return Signature({"gate_up": pointer, "out": pointer}, constants, num_warps=WARPS)


def _quant_signature(facts: Facts) -> Signature:
    pointer, width = f"*{facts['dtype']}", int(facts["width"])
    pointers = {"gate_up": pointer, "out": pointer if facts.get("keep") else None, **quant_pointers(facts)}
    constants: dict[str, int | str | None] = {**row_constants(width), "ACTIVATION": str(facts["activation"])}
    constants |= {name: None for name, type_ in pointers.items() if type_ is None}
    arguments = {name: type_ for name, type_ in pointers.items() if type_ is not None}
    return Signature(arguments, constants, num_warps=row_warps(width))


def _grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return (sizes["rows"], triton.cdiv(int(str(signature.constants["WIDTH"])), BLOCK), 1)


SPECS = (
    KernelSpec("gated_act", "gated_act", gated_act_kernel, _refusal, _signature, _grid),
    KernelSpec("gated_act_quant", "gated_act", gated_act_quant_kernel, _quant_refusal, _quant_signature, row_grid),
)
