"""Per-token dynamic quantization, one program a row: `ops/quantize.py` on a row that a program holds in registers.

    factor = top / max|x|     code = round_half_even(x · factor)     scale = max|x| / top     top: 127, FP8 e4m3: 448

Kernels that produce activations quantize them on the way out through `quantize_row`; `quantize_per_token` serves those
that attention has written. All of them quantize the value as the 16-bit output holds it, so fused or apart the codes
are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.triton.operands import FLOATS, expect
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

WIDEST = 32768
"""Columns of the widest row: a program holds its row in registers."""
FORMS = {"int8": "*i8", "fp8": "*fp8e4nv"}
"""What the fact `quant` may be, and the type of a pointer to such codes."""
CODES = (torch.int8, torch.float8_e4m3fn)
FP8_FROM = 89
"""Compute capability from which FP8 can be cast to and multiplied."""


@triton.jit
def round_e4m3(x):
    """float32 in [-448, 448] -> the nearest number that e4m3 has, half to even, still as float32.

    The cast that follows is then exact: in Triton's interpreter it loses the carry of a mantissa that rounds up.
    """
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)  # steps no longer shrink below 2⁻⁶
    magic = (exponent + ((20 << 23) | 0x400000)).to(tl.float32, bitcast=True)  # 1.5 · 2²³ steps of 2^(exponent − 3)
    return (x + magic) - magic


@triton.jit
def quantize_row(value, codes, scale, row, column, inside, WIDTH: tl.constexpr):
    """Store the codes and the scale of one row, float32 `[BLOCK]`, zero where not `inside`; see `ops/quantize.py`."""
    FP8: tl.constexpr = codes.dtype.element_ty == tl.float8e4nv
    TOP: tl.constexpr = 448.0 if FP8 else 127.0
    # Bits of magnitudes are in the order of the magnitudes, with infinity and NaN above all numbers.
    bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    top = bits.to(tl.float32, bitcast=True)
    finite = bits < 0x7F800000
    live = finite & (top >= 1e-30)
    factor = tl.where(live, tl.div_rn(TOP, tl.where(live, top, 1.0)), 0.0)
    steps = tl.clamp(tl.where(finite, value, 0.0) * factor, -TOP, TOP)
    # 1.5 · 2²³ leaves no bits for fractions: adding it rounds half to even.
    steps = round_e4m3(steps) if FP8 else (steps + 12582912.0) - 12582912.0
    tl.store(codes + row.to(tl.int64) * WIDTH + column, steps.to(codes.dtype.element_ty), mask=inside)
    unit = tl.where(live, tl.div_rn(top, TOP), 0.0)
    tl.store(scale + row, tl.where(finite, unit, float("nan")))


@triton.jit
def quantize_per_token_kernel(x, codes, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Programs (row)."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(x + row.to(tl.int64) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    quantize_row(value, codes, scale, row, column, inside, WIDTH)


def quantize_per_token(
    x: Tensor, dtype: torch.dtype = torch.int8, codes: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of each row: `x ≈ codes · scale`.

    x: float16, bfloat16 or float32 `[T, K]`, K ≤ 32768; dtype: int8 or float8_e4m3fn. Returns `(codes, scale)`, of that
    type `[T, K]` and float32 `[T]` (written to `codes` and `scale` where given). Raises ValueError for other shapes or
    types.
    """
    rows, width = x.shape
    if width > WIDEST:
        raise ValueError(f"rows of {width} columns are wider than the quantization kernel's {WIDEST}")
    expect("x", x, (None, width), FLOATS)
    codes, scale = outputs(x, rows, width, dtype, codes, scale)
    if rows:
        quantize_per_token_kernel[(rows,)](x, codes, scale, **row_constants(width), num_warps=row_warps(width))
    return codes, scale


def outputs(
    like: Tensor, rows: int, width: int, dtype: torch.dtype, codes: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Where codes `[rows, width]` and scales `[rows]` go: what is given, checked, or new tensors beside `like`."""
    codes = like.new_empty(rows, width, dtype=dtype) if codes is None else codes
    scale = like.new_empty(rows, dtype=torch.float32) if scale is None else scale
    expect("codes", codes, (rows, width), CODES)
    expect("scale", scale, (rows,), (torch.float32,))
    return codes, scale


def row_constants(width: int) -> dict[str, int]:
    """Constants of a kernel that holds a row of `width` columns."""
    return {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)}


def row_warps(width: int) -> int:
    """Eight columns a thread where the row allows: one 16-byte load of FP16."""
    return min(16, max(1, triton.next_power_of_2(width) // 256))


def quant_pointers(facts: Facts) -> dict[str, str | None]:
    """Pointer types of `codes` and `scale`; None where the facts ask for no quantized output."""
    form = facts.get("quant")
    return {"codes": FORMS[str(form)] if form else None, "scale": "*fp32" if form else None}


def quant_refusal(facts: Facts) -> str | None:
    """Why a target cannot hold the quantized form that the facts name, if so."""
    form = facts.get("quant")
    if not form:
        return None
    if form not in FORMS:
        return f"no kernel quantizes to {form}: {', '.join(FORMS)} do"
    if form == "fp8" and int(facts["sm"]) < FP8_FROM:
        return f"sm_{facts['sm']} has no FP8 arithmetic: it begins with sm_{FP8_FROM}"
    return None


def _refusal(facts: Facts) -> str | None:
    if not facts.get("quant"):
        return "nothing to quantize to"
    if int(facts["width"]) > WIDEST:
        return f"rows of {facts['width']} columns are wider than {WIDEST}"
    return quant_refusal(facts)


def _signature(facts: Facts) -> Signature:
    width = int(facts["width"])
    pointers = {"x": f"*{facts['dtype']}", **{name: str(type_) for name, type_ in quant_pointers(facts).items()}}
    return Signature(pointers, row_constants(width), num_warps=row_warps(width))


def row_grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """One block a row."""
    return (sizes["rows"], 1, 1)


SPECS = (
    KernelSpec("quantize_per_token", "quantize_per_token", quantize_per_token_kernel, _refusal, _signature, row_grid),
)
