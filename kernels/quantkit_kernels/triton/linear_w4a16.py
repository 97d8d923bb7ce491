"""Linear with 4-bit weights and float16 activations: out = x · wᵀ + bias, w = (code − zero) · scale.

x: float16 `[rows, K]`; weights as `layout/packing.py` lays them out; out: float16 `[rows, N]`. Products of exact
float16 codes are summed in float32 over a group, and the sum is scaled once: a dequantized weight is never rounded.

`few` serves decode, where reading the weights is all that counts: up to 16 rows of x are one side of a matrix
instruction, and where rows of the weight alone leave a GPU idle, K is cut too (`split_k.py`). `many` tiles rows of x,
with the weights as the instruction's left side: they stay in registers on every target.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from quantkit_kernels.triton.codes import UNIT, codes_int4, offset_int4
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature
from quantkit_kernels.triton.split_k import split_blocks, split_constant, store_part, sums_go
from quantkit_kernels.triton.tiles import form_refusal, linear_grid, linear_signature

GROUP_SIZES = (32, 64, 128)


@triton.jit
def sum_int4_few(
    x,
    words,
    scale,
    zero,
    live,
    inside,
    n,
    k,
    first,
    last,
    GROUP: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x · wᵀ over the blocks of 128 columns `first` .. `last` (excluded): float32 `[BLOCK_M, BLOCK_N]`.

    Pointers to block `first`: x `[BLOCK_M, 32]`, words `[BLOCK_N, 16]`, scale and zero (or None) `[BLOCK_N]`. What is
    not live, `[BLOCK_M, 1]`, or not inside, `[BLOCK_N]`, is not read.
    """
    column = tl.arange(0, 32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        packed = tl.load(words, mask=inside[:, None], other=0)
        for group in tl.static_range(128 // GROUP):
            group_scale = tl.load(scale + group * n, mask=inside, other=0.0).to(tl.float32)
            offset = None
            if zero is not None:
                offset = offset_int4(tl.load(zero + group * n, mask=inside, other=0.0))[:, None]
            part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for i in tl.static_range(group * GROUP // 32, (group + 1) * GROUP // 32):
                wanted = live if WHOLE_BLOCKS else live & (block * 128 + i * 32 + column < k)[None, :]
                part = tl.dot(tl.load(x + i * 32, mask=wanted, other=0.0), codes_int4(packed, offset, i).T, part)
            total += part * group_scale[None, :]
        words += 16
        x += 128
        scale += (128 // GROUP) * n
        if zero is not None:
            zero += (128 // GROUP) * n
    return total * UNIT


@triton.jit(do_not_specialize=["rows"])
def linear_w4a16_few(
    x,
    words,
    scale,
    zero,
    bias,
    out,
    partial,
    rows,
    n,
    k,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """At most BLOCK_M (16) rows; WHOLE_BLOCKS: K is a multiple of 128. More SPLITS than one go to `partial`."""
    row = tl.arange(0, BLOCK_M)
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live, inside = (row < rows)[:, None], at < n
    if SPLITS > 1:
        first, last = split_blocks(k, SPLITS)
    else:
        first, last = 0, tl.cdiv(k, 128)
    words = words + first * 16 + (at[:, None] * (tl.cdiv(k, 128) * 16) + tl.arange(0, 16)[None, :])
    x = x + first * 128 + (row[:, None] * k + tl.arange(0, 32)[None, :])
    scale = scale + first * (128 // GROUP) * n + at
    if zero is not None:
        zero = zero + first * (128 // GROUP) * n + at
    total = sum_int4_few(
        x, words, scale, zero, live, inside, n, k, first, last, GROUP, WHOLE_BLOCKS, BLOCK_M, BLOCK_N, STAGES
    )
    wanted = live & inside[None, :]
    if SPLITS > 1:
        store_part(partial, total, row, at, n, wanted)
    else:
        if bias is not None:
            total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out + row[:, None] * n + at[None, :], total.to(tl.float16), mask=wanted)


@triton.jit
def sum_int4_many(
    x,
    words,
    scale,
    zero,
    live,
    inside,
    n,
    k,
    blocks,
    GROUP: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """w · xᵀ over the first `blocks` of 128 columns: float32 `[BLOCK_N, BLOCK_M]`.

    As `sum_int4_few`, but for x, whose pointers are `[32, BLOCK_M]`, and live, `[1, BLOCK_M]`.
    """
    column = tl.arange(0, 32)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        packed = tl.load(words, mask=inside[:, None], other=0)
        for group in tl.static_range(128 // GROUP):
            group_scale = tl.load(scale + group * n, mask=inside, other=0.0).to(tl.float32)
            offset = None
            if zero is not None:
                offset = offset_int4(tl.load(zero + group * n, mask=inside, other=0.0))[:, None]
            part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for i in tl.static_range(group * GROUP // 32, (group + 1) * GROUP // 32):
                wanted = live if WHOLE_BLOCKS else live & (block * 128 + i * 32 + column < k)[:, None]
                part = tl.dot(codes_int4(packed, offset, i), tl.load(x + i * 32, mask=wanted, other=0.0), part)
            total += part * group_scale[:, None]
        words += 16
        x += 128
        scale += (128 // GROUP) * n
        if zero is not None:
            zero += (128 // GROUP) * n
    return total * UNIT


@triton.jit(do_not_specialize=["rows"])
def linear_w4a16_many(
    x,
    words,
    scale,
    zero,
    bias,
    out,
    rows,
    n,
    k,
    GROUP: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Any number of rows, BLOCK_M at a time; WHOLE_BLOCKS: K is a multiple of 128."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live, inside = (row < rows)[None, :], at < n
    blocks = tl.cdiv(k, 128)
    words += at[:, None] * (blocks * 16) + tl.arange(0, 16)[None, :]
    x += row.to(tl.int64)[None, :] * k + tl.arange(0, 32)[:, None]
    scale += at
    if zero is not None:
        zero += at
    total = sum_int4_many(
        x, words, scale, zero, live, inside, n, k, blocks, GROUP, WHOLE_BLOCKS, BLOCK_M, BLOCK_N, STAGES
    )
    if bias is not None:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[:, None]
    target = out + row.to(tl.int64)[None, :] * n + at[:, None]
    tl.store(target, total.to(tl.float16), mask=live & inside[:, None])


def unfit(facts: Facts) -> str | None:
    """Why the facts' weights and activations are none that this arithmetic takes, if so."""
    group, k = int(facts["group_size"]), int(facts["k"])
    if reason := form_refusal(facts, 4):
        return reason
    if group not in GROUP_SIZES or k % group:
        return f"a group size of {group} on {k} columns: it must be 32, 64 or 128 and divide them"
    return None


def _refusal(facts: Facts, rows: str) -> str | None:
    return unfit(facts) or (None if facts["rows"] == rows else f"serves {rows} rows")


def _signature(facts: Facts) -> Signature:
    pointers = {
        "x": "*fp16",
        "words": "*i32",
        "scale": f"*{facts['scale']}",
        "zero": None if facts["symmetric"] else "*fp16",
        **sums_go(facts, "*fp32", {"bias": "*fp16" if facts["bias"] else None}),
    }
    return linear_signature(facts, pointers, {"GROUP": int(facts["group_size"]), **split_constant(facts)})


def _spec(function: Any, rows: str) -> KernelSpec:
    return KernelSpec(
        f"linear_w4a16_{rows}", "linear", function, lambda facts: _refusal(facts, rows), _signature, linear_grid
    )


SPECS = (_spec(linear_w4a16_few, "few"), _spec(linear_w4a16_many, "many"))
