"""Linear with 8-bit weights and 8-bit activations: out = (x · codesᵀ) · x_scale · scale + bias.

x: codes `[rows, K]` with one scale a row (`quantize.py`); weights: codes with one scale a row (`layout/code_rows.py`);
out: float16 `[rows, N]`. Both sides are int8, summed as integers (exact, so that every tile gives the same bits), or
both FP8 e4m3, summed in float32.

`few` serves decode: 16 rows of x are one side of a matrix instruction, reading the weights is all that counts, and K is
cut where that leaves a GPU idle (`split_k.py`). On sm_90 and sm_100 it multiplies FP8 as float16, which is exact.
`many` tiles both sides evenly, as a compute-bound product wants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantkit_kernels.triton.quantize import FORMS, quant_refusal
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature
from quantkit_kernels.triton.split_k import split_blocks, splits, store_part, sums_go
from quantkit_kernels.triton.tiles import FEW_ROWS, form_refusal, linear_grid, tile

WIDEST = 131072
"""Columns up to which sums of int8 products, 127 · 128 each, stay inside int32."""


@triton.jit(do_not_specialize=["rows"])
def linear_a8_kernel(
    x,
    x_scale,
    codes,
    scale,
    bias,
    out,
    partial,
    rows,
    n,
    k,
    SPLITS: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs (rows of the weight, rows of x, parts of K); WHOLE_BLOCKS: K is a multiple of 128. More SPLITS than one
    go to `partial`, without scales."""
    FP8: tl.constexpr = x.dtype.element_ty == tl.float8e4nv
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, 128)
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live, inside = row < rows, at < n
    first, last = split_blocks(k, SPLITS)
    x += row.to(tl.int64)[:, None] * k + first * 128 + column[None, :]
    codes += at.to(tl.int64)[:, None] * (tl.cdiv(k, 128) * 128) + first * 128 + column[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if FP8 else tl.int32)
    for block in tl.range(first, last, num_stages=STAGES):
        wanted = live[:, None] if WHOLE_BLOCKS else live[:, None] & (block * 128 + column < k)[None, :]
        left = tl.load(x, mask=wanted, other=0.0)
        right = tl.load(codes, mask=inside[:, None], other=0.0).T
        if FP8:
            # Hopper sums FP8 products in fewer bits than float32 has: no more than a block of them.
            total = tl.dot(left, right, total, max_num_imprecise_acc=128)
        else:
            total = tl.dot(left, right, total, out_dtype=tl.int32)
        x += 128
        codes += 128
    stored = live[:, None] & inside[None, :]
    if SPLITS > 1:
        store_part(partial, total, row, at, n, stored)
    else:
        product = total.to(tl.float32) * tl.load(x_scale + row, mask=live, other=0.0)[:, None]
        product *= tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        if bias is not None:
            product += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out + row.to(tl.int64)[:, None] * n + at[None, :], product.to(tl.float16), mask=stored)


def _refusal(facts: Facts, quant: str, rows: str) -> str | None:
    unfit = form_refusal(facts, 8, quant)
    if unfit:
        return unfit
    if facts["group_size"] or not facts["symmetric"]:
        return "weights for 8-bit activations must have 8 bits, be symmetric, with one scale a row"
    if int(facts["k"]) > WIDEST:
        return f"rows of {facts['k']} columns are longer than {WIDEST}, and int32 cannot hold their sums"
    if facts["rows"] != rows:
        return f"serves {rows} rows"
    return quant_refusal(facts)


def _signature(facts: Facts) -> Signature:
    n, k = int(facts["n"]), int(facts["k"])
    few = facts["rows"] == "few"
    codes = FORMS[str(facts["quant"])]
    after = {"x_scale": "*fp32", "scale": f"*{facts['scale']}", "bias": "*fp16" if facts["bias"] else None}
    sums = sums_go(facts, "*i32" if facts["quant"] == "int8" else "*fp32", after)
    pointers = {"x": codes, "codes": codes, "partial": None, **sums}
    arguments: dict[str, str | int] = {name: type_ for name, type_ in pointers.items() if type_ is not None}
    block_n, stages = tile(facts, 128)
    return Signature(
        arguments={**arguments, "rows": FEW_ROWS, "n": n, "k": k},
        constants={
            **{name: None for name, type_ in pointers.items() if type_ is None},
            "SPLITS": splits(facts),
            "WHOLE_BLOCKS": k % 128 == 0,
            "BLOCK_M": FEW_ROWS if few else 64,
            "BLOCK_N": block_n,
            "STAGES": stages,
        },
        num_warps=block_n // 16 if few else 4,
        num_stages=stages,
    )


def _spec(form: str, quant: str, rows: str) -> KernelSpec:
    def refusal(facts: Facts) -> str | None:
        return _refusal(facts, quant, rows)

    return KernelSpec(f"linear_{form}_{rows}", "linear", linear_a8_kernel, refusal, _signature, linear_grid)


SPECS: tuple[KernelSpec, ...] = tuple(
    _spec(form, quant, rows) for form, quant in (("w8a8", "int8"), ("fp8", "fp8")) for rows in ("few", "many")
)
