"""Token embedding: a row of the table for each token id, scaled (Gemma multiplies by the root of the hidden size).

Scaled in FP32 and rounded once. Padding has an id like any other; what is gathered for it is read by nobody.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.triton.operands import FLOATS, expect
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

WARPS = 4
BLOCK = 8 * 32 * WARPS
"""Columns of a program: eight a thread, one 16-byte load of FP16."""


@triton.jit
def embedding_kernel(token_ids, table, out, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Programs (token, columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    token = tl.load(token_ids + row).to(tl.int64)
    value = tl.load(table + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def embedding(token_ids: Tensor, table: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """`table[token_ids] · scale`.

    token_ids: int32 `[T]`, trusted to lie in the table; table: float16, bfloat16 or float32 `[V, H]`. Returns `[T, H]`
    in the type of the table (written to `out`, of any of the three types, where given). Raises ValueError for other
    shapes or types.
    """
    tokens, width = token_ids.shape[0], table.shape[1]
    out = table.new_empty(tokens, width) if out is None else out
    expect("token_ids", token_ids, (tokens,), (torch.int32,))
    expect("table", table, (None, width), FLOATS)
    expect("out", out, (tokens, width), FLOATS)
    if tokens:
        grid = (tokens, triton.cdiv(width, BLOCK))
        embedding_kernel[grid](token_ids, table, out, scale, WIDTH=width, BLOCK=BLOCK, num_warps=WARPS)
    return out


def _refusal(facts: Facts) -> str | None:
    return None


def _signature(facts: Facts) -> Signature:
    arguments: dict[str, str | int | float] = {
        "token_ids": "*i32", "table": f"*{facts['table']}", "out": f"*{facts['dtype']}",
        "scale": float(facts["scale"]),
    }  # fmt: skip
    return Signature(arguments, {"WIDTH": int(facts["width"]), "BLOCK": BLOCK}, num_warps=WARPS)


def _grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return (sizes["rows"], triton.cdiv(int(str(signature.constants["WIDTH"])), BLOCK), 1)


SPECS = (KernelSpec("embedding", "embedding", embedding_kernel, _refusal, _signature, _grid),)
