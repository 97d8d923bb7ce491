"""Weighted sum of what a token's experts made of it: out = Σ weight · y over its pairs, in their order.

Summed in FP32 and rounded once. Rows of padding, which no product has written, are not read: their sum is zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.triton.operands import expect
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

WARPS = 4
BLOCK = 8 * 32 * WARPS
"""Columns of a program: eight a thread, one 16-byte load of FP16."""


@triton.jit
def moe_sum_kernel(y, experts, weights, out, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Programs (token, columns)."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        width = tl.where(tl.load(experts + pair) >= 0, WIDTH, 0)
        value = tl.load(y + pair.to(tl.int64) * WIDTH + column, mask=column < width, other=0.0)
        total += tl.load(weights + pair) * value.to(tl.float32)
    tl.store(out + token.to(tl.int64) * WIDTH + column, total.to(tl.float16), mask=column < WIDTH)


def moe_sum(y: Tensor, experts: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """`ops.moe_sum.reference`.

    y: float16 `[T · top_k, H]`; experts: int32 `[T, top_k]`, -1 for padding; weights: float32 `[T, top_k]`. Returns
    float16 `[T, H]` (written to `out` where given). Raises ValueError for other shapes or types.
    """
    (tokens, top_k), width = experts.shape, y.shape[1]
    out = y.new_empty(tokens, width) if out is None else out
    expect("y", y, (tokens * top_k, width), (torch.float16,))
    expect("experts", experts, (tokens, top_k), (torch.int32,))
    expect("weights", weights, (tokens, top_k), (torch.float32,))
    expect("out", out, (tokens, width), (torch.float16,))
    if out.numel():
        grid = (tokens, triton.cdiv(width, BLOCK))
        moe_sum_kernel[grid](y, experts, weights, out, WIDTH=width, TOP_K=top_k, BLOCK=BLOCK, num_warps=WARPS)
    return out


def _refusal(facts: Facts) -> str | None:
    return None


def _signature(facts: Facts) -> Signature:
    arguments: dict[str, str | int | float] = {
        "y": "*fp16", "experts": "*i32", "weights": "*fp32", "out": "*fp16",
    }  # fmt: skip
    constants: dict[str, int] = {"WIDTH": int(facts["width"]), "TOP_K": int(facts["top_k"]), "BLOCK": BLOCK}
    return Signature(arguments, constants, num_warps=WARPS)


def _grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return (sizes["rows"], triton.cdiv(int(str(signature.constants["WIDTH"])), BLOCK), 1)


SPECS = (KernelSpec("moe_sum", "moe_sum", moe_sum_kernel, _refusal, _signature, _grid),)
