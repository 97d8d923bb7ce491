"""Residual add and RMS norm (Zhang and Sennrich 2019, eq. 4), one program a row.

    s = x + residual                        stored as residual_out, in the residual's own type
    y = s · rsqrt(mean(s²) + eps) · (weight + offset)

The norm reads `s` as it was stored, so the fused op and the two apart give the same bits; sums run in FP32 whatever
the types. Without a residual the same kernel is `rms_norm`. y may be x and residual_out may be residual: every column
is read before it is written.

With `codes` and `scale` the program, which holds its row, quantizes y as it would be stored (`quantize_row`); y itself
is then written only for who else reads it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.triton.operands import FLOATS, expect
from quantkit_kernels.triton.quantize import (
    outputs,
    quant_pointers,
    quant_refusal,
    quantize_row,
    row_constants,
    row_grid,
    row_warps,
)
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

WIDEST = 16384
"""Columns of the widest row: a program holds its row in registers."""


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, y, residual_out, codes, scale, eps, offset, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Programs (row): y, codes and scale, and residual_out where there is a residual; outputs left out are None."""
    at = tl.program_id(0)
    row = at.to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
        stored = value.to(residual_out.dtype.element_ty)
        tl.store(residual_out + row + column, stored, mask=inside)
        value = stored.to(tl.float32)
    # Asked for before the sum's barrier, so that it does not wait behind it.
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    normed = (value * inverse * gain).to(x.dtype.element_ty)
    if y is not None:
        tl.store(y + row + column, normed, mask=inside)
    if codes is not None:
        quantize_row(normed.to(tl.float32), codes, scale, at, column, inside, WIDTH)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    y: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`residual_out = x + residual`, `y = rms_norm(residual_out)`.

    x: float16, bfloat16 or float32 `[T, H]`, H ≤ 16384; residual: the same shape, of its own type; weight: `[H]`.
    Returns `(y, residual_out)` in the types of x and of residual; pass y or residual_out to have them written in
    place. Raises ValueError for tensors of other shapes or types.
    """
    expect("residual", residual, tuple(x.shape), FLOATS)
    y = torch.empty_like(x) if y is None else y
    residual_out = torch.empty_like(residual) if residual_out is None else residual_out
    expect("residual_out", residual_out, tuple(x.shape), FLOATS)
    _launch(x, residual, weight, y, residual_out, eps, offset)
    return y, residual_out


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, y: Tensor | None = None) -> Tensor:
    """`x · rsqrt(mean(x²) + eps) · (weight + offset)` for each row; x, y: `[T, H]`, weight `[H]`, as above."""
    y = torch.empty_like(x) if y is None else y
    _launch(x, None, weight, y, None, eps, offset)
    return y


def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    *,
    dtype: torch.dtype = torch.int8,
    y: Tensor | None = None,
    residual_out: Tensor | None = None,
    codes: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_rms_norm` whose y comes as codes, int8 or float8_e4m3fn `[T, H]`, with scales, float32 `[T]`.

    Returns `(codes, scale, residual_out)`; y is written too where it is given. ValueError as above.
    """
    expect("residual", residual, tuple(x.shape), FLOATS)
    codes, scale = outputs(x, x.shape[0], x.shape[1], dtype, codes, scale)
    residual_out = torch.empty_like(residual) if residual_out is None else residual_out
    expect("residual_out", residual_out, tuple(x.shape), FLOATS)
    _launch(x, residual, weight, y, residual_out, eps, offset, codes, scale)
    return codes, scale, residual_out


def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float = 0.0,
    *,
    dtype: torch.dtype = torch.int8,
    y: Tensor | None = None,
    codes: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm` whose result comes as `(codes, scale)`, as in `add_rms_norm_quant`."""
    codes, scale = outputs(x, x.shape[0], x.shape[1], dtype, codes, scale)
    _launch(x, None, weight, y, None, eps, offset, codes, scale)
    return codes, scale


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    y: Tensor | None,
    residual_out: Tensor | None,
    eps: float,
    offset: float,
    codes: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    rows, width = x.shape
    if width > WIDEST:
        raise ValueError(f"rows of {width} columns are wider than the norm kernel's {WIDEST}")
    expect("x", x, (None, width), FLOATS)
    expect("weight", weight, (width,), FLOATS)
    if y is not None:
        expect("y", y, (rows, width), FLOATS)
    if rows:
        add_rms_norm_kernel[(rows,)](
            x, residual, weight, y, residual_out, codes, scale, eps, offset,
            **row_constants(width), num_warps=row_warps(width),
        )  # fmt: skip


def _refusal(facts: Facts) -> str | None:
    if int(facts["width"]) > WIDEST:
        return f"rows of {facts['width']} columns are wider than {WIDEST}"
    return quant_refusal(facts)


def _signature(facts: Facts) -> Signature:
    """dtype is the type of x and y; residual_dtype (where given) that of the residual stream; the weight is FP32."""
    width = int(facts["width"])
    activation = f"*{facts['dtype']}"
    stream = f"*{facts.get('residual_dtype', facts['dtype'])}" if facts["op"] == "add_rms_norm" else None
    whole = not facts.get("quant") or bool(facts.get("keep"))
    pointers = {
        "x": activation, "weight": "*fp32", "y": activation if whole else None,
        "residual": stream, "residual_out": stream, **quant_pointers(facts),
    }  # fmt: skip
    arguments: dict[str, str | float] = {name: type_ for name, type_ in pointers.items() if type_ is not None}
    arguments |= {"eps": float(facts["eps"]), "offset": float(facts["offset"])}
    absent = {name: None for name, type_ in pointers.items() if type_ is None}
    return Signature(arguments, {**row_constants(width), **absent}, num_warps=row_warps(width))


SPECS = tuple(
    KernelSpec(op, op, add_rms_norm_kernel, _refusal, _signature, row_grid) for op in ("add_rms_norm", "rms_norm")
)
