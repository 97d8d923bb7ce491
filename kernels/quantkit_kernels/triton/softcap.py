"""Softcap of the logits, in place (Gemma Team 2024, section 2): `c · tanh(x / c) = c · (2σ(2x / c) − 1)`.

Apart from the head's product, which is split over programs that each hold a part of the sum. Computed in FP32.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.triton.operands import FLOATS, expect
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

WARPS = 4
BLOCK = 8 * 32 * WARPS
"""Columns a program: eight a thread, one 16-byte load of FP16."""


@triton.jit
def softcap_kernel(out, softcap, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Programs (row, columns)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = out + tl.program_id(0).to(tl.int64) * WIDTH + column
    value = tl.load(at, mask=column < WIDTH, other=0.0).to(tl.float32)
    value = softcap * (2.0 * tl.sigmoid(value * (2.0 / softcap)) - 1.0)
    tl.store(at, value.to(out.dtype.element_ty), mask=column < WIDTH)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """`cap · tanh(logits / cap)`, written over the logits: float16, bfloat16 or float32 `[R, V]`; cap > 0.

    Returns them. Raises ValueError for another shape or type, or a cap that is not above 0.
    """
    if not cap > 0:
        raise ValueError(f"a softcap is above 0, not {cap}")
    rows, width = logits.shape
    expect("logits", logits, (rows, width), FLOATS)
    if rows:
        softcap_kernel[(rows, triton.cdiv(width, BLOCK))](logits, cap, width, BLOCK, num_warps=WARPS)
    return logits


def _refusal(facts: Facts) -> str | None:
    return None


def _signature(facts: Facts) -> Signature:
    arguments: dict[str, str | int | float] = {"out": f"*{facts['dtype']}", "softcap": float(facts["softcap"])}
    return Signature(arguments, {"WIDTH": int(facts["width"]), "BLOCK": BLOCK}, num_warps=WARPS)


def _grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return (sizes["rows"], triton.cdiv(int(str(signature.constants["WIDTH"])), BLOCK), 1)


SPECS = (KernelSpec("softcap", "softcap", softcap_kernel, _refusal, _signature, _grid),)
