"""Residual add and RMS norm (Zhang and Sennrich 2019, eq. 4), one program a row.

    s = x + residual                        stored as residual_out, in the residual's own type
    y = s · rsqrt(mean(s²) + eps) · (weight + offset)

The norm reads `s` as it was stored, so the fused op and the two apart give the same bits; sums run in FP32 whatever
the types. Without a residual the same kernel is `rms_norm`. y may be x and residual_out may be residual: every column
is read before it is written.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.triton.operands import FLOATS, expect
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

WIDEST = 16384
"""Columns of the widest row: a program holds its row in registers."""


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, y, residual_out, eps, offset, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Programs (row): y, and residual_out where there is a residual."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
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
    tl.store(y + row + column, (value * inverse * gain).to(y.dtype.element_ty), mask=inside)


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


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    y: Tensor,
    residual_out: Tensor | None,
    eps: float,
    offset: float,
) -> None:
    rows, width = x.shape
    if width > WIDEST:
        raise ValueError(f"rows of {width} columns are wider than the norm kernel's {WIDEST}")
    expect("x", x, (None, width), FLOATS)
    expect("weight", weight, (width,), FLOATS)
    expect("y", y, (rows, width), FLOATS)
    if rows:
        add_rms_norm_kernel[(rows,)](
            x, residual, weight, y, residual_out, eps, offset, **_constants(width), num_warps=_warps(width)
        )


def _constants(width: int) -> dict[str, int]:
    return {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)}


def _warps(width: int) -> int:
    """Eight columns a thread where the row allows: one 16-byte load of FP16."""
    return min(16, max(1, triton.next_power_of_2(width) // 256))


def _refusal(facts: Facts) -> str | None:
    if int(facts["width"]) > WIDEST:
        return f"rows of {facts['width']} columns are wider than {WIDEST}"
    return None


def _signature(facts: Facts) -> Signature:
    """dtype is the type of x and y; residual_dtype (where given) that of the residual stream; the weight is FP32."""
    width = int(facts["width"])
    activation = f"*{facts['dtype']}"
    arguments: dict[str, str | float] = {"x": activation, "weight": "*fp32", "y": activation}
    constants: dict[str, int | None] = {**_constants(width)}
    for name in ("residual", "residual_out"):
        if facts["op"] == "add_rms_norm":
            arguments[name] = f"*{facts.get('residual_dtype', facts['dtype'])}"
        else:
            constants[name] = None
    arguments |= {"eps": float(facts["eps"]), "offset": float(facts["offset"])}
    return Signature(arguments, constants, num_warps=_warps(width))


def _grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return (sizes["rows"], 1, 1)


SPECS = tuple(
    KernelSpec(op, op, add_rms_norm_kernel, _refusal, _signature, _grid) for op in ("add_rms_norm", "rms_norm")
)
