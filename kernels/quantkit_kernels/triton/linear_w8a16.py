"""Linear with 8-bit weights, one scale a row, and float16 activations: out = (x · codesᵀ) · scale + bias.

x: float16 `[rows, K]`; weights as `layout/packing.py` lays them out; out: float16 `[rows, N]`. Products of exact
float16 codes are summed in float32 over all of K and scaled once. `few` and `many` as in `linear_w4a16`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from quantkit_kernels.triton.codes import UNIT, codes_int8
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature
from quantkit_kernels.triton.split_k import split_blocks, split_constant, store_part, sums_go
from quantkit_kernels.triton.tiles import form_refusal, linear_grid, linear_signature


@triton.jit
def sum_int8_few(
    x,
    words,
    live,
    inside,
    k,
    first,
    last,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x · codesᵀ · 2⁻²⁴ over the blocks of 128 columns `first` .. `last` (excluded): float32 `[BLOCK_M, BLOCK_N]`.

    Pointers to block `first`: x `[BLOCK_M, 32]`, words `[BLOCK_N, 16]`. What is not live, `[BLOCK_M, 1]`, or not
    inside, `[BLOCK_N]`, is not read.
    """
    column = tl.arange(0, 32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        for half in tl.static_range(2):
            packed = tl.load(words + half * 16, mask=inside[:, None], other=0)
            for i in tl.static_range(2):
                start = half * 64 + i * 32
                wanted = live if WHOLE_BLOCKS else live & (block * 128 + start + column < k)[None, :]
                total = tl.dot(tl.load(x + start, mask=wanted, other=0.0), codes_int8(packed, i).T, total)
        words += 32
        x += 128
    return total


@triton.jit(do_not_specialize=["rows"])
def linear_w8a16_few(
    x,
    words,
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
    """At most BLOCK_M (16) rows; WHOLE_BLOCKS: K is a multiple of 128. More SPLITS than one go to `partial`."""
    row = tl.arange(0, BLOCK_M)
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live, inside = (row < rows)[:, None], at < n
    first, last = split_blocks(k, SPLITS)
    words += at[:, None] * (tl.cdiv(k, 128) * 32) + first * 32 + tl.arange(0, 16)[None, :]
    x += row[:, None] * k + first * 128 + tl.arange(0, 32)[None, :]
    total = sum_int8_few(x, words, live, inside, k, first, last, WHOLE_BLOCKS, BLOCK_M, BLOCK_N, STAGES)
    total *= tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)[None, :] * UNIT
    wanted = live & inside[None, :]
    if SPLITS > 1:
        store_part(partial, total, row, at, n, wanted)
    else:
        if bias is not None:
            total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out + row[:, None] * n + at[None, :], total.to(tl.float16), mask=wanted)


@triton.jit
def sum_int8_many(
    x,
    words,
    live,
    inside,
    k,
    blocks,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """codes · xᵀ · 2⁻²⁴ over the first `blocks` of 128 columns: float32 `[BLOCK_N, BLOCK_M]`.

    As `sum_int8_few`, but for x, whose pointers are `[32, BLOCK_M]`, and live, `[1, BLOCK_M]`.
    """
    column = tl.arange(0, 32)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        for half in tl.static_range(2):
            packed = tl.load(words + half * 16, mask=inside[:, None], other=0)
            for i in tl.static_range(2):
                first = half * 64 + i * 32
                wanted = live if WHOLE_BLOCKS else live & (block * 128 + first + column < k)[:, None]
                total = tl.dot(codes_int8(packed, i), tl.load(x + first, mask=wanted, other=0.0), total)
        words += 32
        x += 128
    return total


@triton.jit(do_not_specialize=["rows"])
def linear_w8a16_many(
    x,
    words,
    scale,
    bias,
    out,
    rows,
    n,
    k,
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
    words += at[:, None] * (blocks * 32) + tl.arange(0, 16)[None, :]
    x += row.to(tl.int64)[None, :] * k + tl.arange(0, 32)[:, None]
    total = sum_int8_many(x, words, live, inside, k, blocks, WHOLE_BLOCKS, BLOCK_M, BLOCK_N, STAGES)
    total *= tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)[:, None] * UNIT
    if bias is not None:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)[:, None]
    target = out + row.to(tl.int64)[None, :] * n + at[:, None]
    tl.store(target, total.to(tl.float16), mask=live & inside[:, None])


def unfit(facts: Facts) -> str | None:
    """Why the facts' weights and activations are none that this arithmetic takes, if so."""
    if reason := form_refusal(facts, 8):
        return reason
    if facts["group_size"] or not facts["symmetric"]:
        return "8-bit weights must be symmetric, with one scale a row"
    return None


def _refusal(facts: Facts, rows: str) -> str | None:
    return unfit(facts) or (None if facts["rows"] == rows else f"serves {rows} rows")


def _signature(facts: Facts) -> Signature:
    pointers = {
        "x": "*fp16",
        "words": "*i32",
        "scale": f"*{facts['scale']}",
        **sums_go(facts, "*fp32", {"bias": "*fp16" if facts["bias"] else None}),
    }
    return linear_signature(facts, pointers, split_constant(facts))


def _spec(function: Any, rows: str) -> KernelSpec:
    return KernelSpec(
        f"linear_w8a16_{rows}", "linear", function, lambda facts: _refusal(facts, rows), _signature, linear_grid
    )


SPECS = (_spec(linear_w8a16_few, "few"), _spec(linear_w8a16_many, "many"))
