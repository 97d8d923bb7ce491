"""Grouped linear: each pair of a token and an expert times that expert's weight, out[pair] = x[pair // share] · wᵀ.

x: float16, a row a token (share is top_k, before the experts' activation) or a row a pair (share is 1, behind it); out:
float16, a row a pair; weights: 4-bit, 8-bit or float16, as `layout/experts.py` lays them out. Which pairs a program
takes, all of one expert, `moe_route.py` says. The sums are those of `linear_w4a16.py` and `linear_w8a16.py`, over one
expert's weight and scattered rows of x. Within a class of rows, a pair's bits depend neither on where its block puts it
nor on what is beside it. Rows of padding are not written.

A block that is left over has no columns to sum and no pair to write. K is never cut: experts that are busy at once
bring programs enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.triton.codes import UNIT
from quantkit_kernels.triton.layout import GpuExperts
from quantkit_kernels.triton.linear_w4a16 import sum_int4_few, sum_int4_many
from quantkit_kernels.triton.linear_w4a16 import unfit as unfit_int4
from quantkit_kernels.triton.linear_w8a16 import sum_int8_few, sum_int8_many
from quantkit_kernels.triton.linear_w8a16 import unfit as unfit_int8
from quantkit_kernels.triton.moe_route import BLOCK_ROWS, Routing
from quantkit_kernels.triton.operands import expect
from quantkit_kernels.triton.spec import Fact, Facts, KernelSpec, Signature
from quantkit_kernels.triton.tiles import few_block, form_refusal

MANY_BLOCK = 64
"""Rows of an expert's weight that a program of a `many` kernel takes: the fewest that Hopper's matrix unit does."""


@triton.jit
def _sum_f16_few(
    x,
    weight,
    live,
    inside,
    k,
    blocks,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x · wᵀ over `blocks` of 128 columns: float32 `[BLOCK_M, BLOCK_N]`, of pointers x `[BLOCK_M, 128]` and weight
    `[BLOCK_N, 128]`."""
    column = tl.arange(0, 128)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        wanted = live if WHOLE_BLOCKS else live & (block * 128 + column < k)[None, :]
        right = tl.load(weight, mask=inside[:, None], other=0.0).T
        total = tl.dot(tl.load(x, mask=wanted, other=0.0), right, total)
        x += 128
        weight += 128
    return total


@triton.jit
def _sum_f16_many(
    x,
    weight,
    live,
    inside,
    k,
    blocks,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """w · xᵀ, float32 `[BLOCK_N, BLOCK_M]`: as `_sum_f16_few`, but for x, whose pointers are `[128, BLOCK_M]`."""
    column = tl.arange(0, 128)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        wanted = live if WHOLE_BLOCKS else live & (block * 128 + column < k)[:, None]
        left = tl.load(weight, mask=inside[:, None], other=0.0)
        total = tl.dot(left, tl.load(x, mask=wanted, other=0.0), total)
        x += 128
        weight += 128
    return total


@triton.jit
def _block(order, block_expert, k, BLOCK_M: tl.constexpr):
    """This program's expert (int64), its pairs `[BLOCK_M]`, -1 for none, and the blocks of 128 columns to sum."""
    block = tl.program_id(1)
    expert = tl.load(block_expert + block)
    pair = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M))
    blocks = tl.where(expert >= 0, tl.cdiv(k, 128), 0)
    return tl.maximum(expert, 0).to(tl.int64), pair, blocks


@triton.jit
def moe_linear_few(
    x,
    words,
    scale,
    zero,
    order,
    block_expert,
    out,
    n,
    k,
    SHARE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs (rows of the weight, block of pairs), for at most 16 tokens; WHOLE_BLOCKS: K is a multiple of 128."""
    COLUMNS: tl.constexpr = 128 if BITS == 16 else 32
    WIDTH: tl.constexpr = 128 if BITS == 16 else 4 * BITS
    expert, pair, blocks = _block(order, block_expert, k, BLOCK_M)
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live, inside = (pair >= 0)[:, None], at < n
    width = tl.cdiv(k, 128) * WIDTH
    words += expert * n * width
    words += at[:, None] * width + tl.arange(0, 128 if BITS == 16 else 16)[None, :]
    x += (pair // SHARE)[:, None] * k + tl.arange(0, COLUMNS)[None, :]
    if BITS == 16:
        total = _sum_f16_few(x, words, live, inside, k, blocks, WHOLE_BLOCKS, BLOCK_M, BLOCK_N, STAGES)
    elif BITS == 8:
        total = sum_int8_few(x, words, live, inside, k, 0, blocks, WHOLE_BLOCKS, BLOCK_M, BLOCK_N, STAGES)
        total *= tl.load(scale + expert * n + at, mask=inside, other=0.0).to(tl.float32)[None, :] * UNIT
    else:
        groups = expert * (tl.cdiv(k, 128) * (128 // GROUP)) * n
        scale += groups
        scale += at
        if zero is not None:
            zero += groups
            zero += at
        total = sum_int4_few(
            x, words, scale, zero, live, inside, n, k, 0, blocks, GROUP, WHOLE_BLOCKS, BLOCK_M, BLOCK_N, STAGES
        )
    tl.store(out + pair[:, None] * n + at[None, :], total.to(tl.float16), mask=live & inside[None, :])


@triton.jit
def moe_linear_many(
    x,
    words,
    scale,
    zero,
    order,
    block_expert,
    out,
    n,
    k,
    SHARE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs (rows of the weight, block of pairs), for any number of tokens; WHOLE_BLOCKS: K is a multiple of 128."""
    COLUMNS: tl.constexpr = 128 if BITS == 16 else 32
    WIDTH: tl.constexpr = 128 if BITS == 16 else 4 * BITS
    expert, pair, blocks = _block(order, block_expert, k, BLOCK_M)
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live, inside = (pair >= 0)[None, :], at < n
    width = tl.cdiv(k, 128) * WIDTH
    words += expert * n * width
    words += at[:, None] * width + tl.arange(0, 128 if BITS == 16 else 16)[None, :]
    x += (pair // SHARE).to(tl.int64)[None, :] * k + tl.arange(0, COLUMNS)[:, None]
    if BITS == 16:
        total = _sum_f16_many(x, words, live, inside, k, blocks, WHOLE_BLOCKS, BLOCK_M, BLOCK_N, STAGES)
    elif BITS == 8:
        total = sum_int8_many(x, words, live, inside, k, blocks, WHOLE_BLOCKS, BLOCK_M, BLOCK_N, STAGES)
        total *= tl.load(scale + expert * n + at, mask=inside, other=0.0).to(tl.float32)[:, None] * UNIT
    else:
        groups = expert * (tl.cdiv(k, 128) * (128 // GROUP)) * n
        scale += groups
        scale += at
        if zero is not None:
            zero += groups
            zero += at
        total = sum_int4_many(
            x, words, scale, zero, live, inside, n, k, blocks, GROUP, WHOLE_BLOCKS, BLOCK_M, BLOCK_N, STAGES
        )
    target = out + pair.to(tl.int64)[None, :] * n + at[:, None]
    tl.store(target, total.to(tl.float16), mask=live & inside[:, None])


def moe_linear(x: Tensor, weights: GpuExperts, routing: Routing, out: Tensor | None = None) -> Tensor:
    """`ops.moe_linear.reference` with the experts of `routing`.

    x: contiguous float16 `[T, K]` or `[T · top_k, K]`. Returns float16 `[T · top_k, N]`, written to `out` where given;
    rows of padding are left as they are. Raises ValueError for other shapes or types and for weights that no kernel
    takes.
    """
    tokens, top_k = routing.experts.shape
    n, k = weights.words.shape[1], weights.columns
    expect("x", x, (None, k), (torch.float16,))
    if x.shape[0] not in (tokens, tokens * top_k):
        raise ValueError(f"x has {x.shape[0]} rows: {tokens} tokens with {top_k} experts each have as many or {top_k}x")
    out = x.new_empty(tokens * top_k, n) if out is None else out
    expect("out", out, (tokens * top_k, n), (torch.float16,))
    facts: dict[str, Fact] = {
        "op": "moe_linear", "rows": routing.rows, "dtype": "fp16", "n": n, "k": k, "bits": weights.bits,
        "group_size": weights.group_size, "symmetric": weights.zero is None,
        "share": top_k if x.shape[0] == tokens else 1,
        "scale": "bf16" if weights.scale is not None and weights.scale.dtype == torch.bfloat16 else "fp16",
    }  # fmt: skip
    refusals = {spec.name: spec.refusal(facts) for spec in SPECS}
    spec = next((spec for spec in SPECS if refusals[spec.name] is None), None)
    if spec is None:
        raise ValueError("; ".join(dict.fromkeys(filter(None, refusals.values()))))
    if out.numel():
        values: dict[str, Any] = {
            "x": x, "words": weights.words, "scale": weights.scale, "zero": weights.zero, "order": routing.order,
            "block_expert": routing.block_expert, "out": out, "n": n, "k": k,
        }  # fmt: skip
        how = spec.signature(facts)
        spec.function[spec.grid(how, {"n": n, "blocks": routing.block_expert.shape[0]})](
            **{name: values[name] for name in how.arguments},
            **how.constants,
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )
    return out


def _unfit_f16(facts: Facts) -> str | None:
    return form_refusal(facts, 16)


_UNFIT: dict[int, Callable[[Facts], str | None]] = {4: unfit_int4, 8: unfit_int8, 16: _unfit_f16}
"""By bits of the weights: why they or the activations are none that a kernel takes."""


def _signature(facts: Facts) -> Signature:
    n, k, bits = (int(facts[name]) for name in ("n", "k", "bits"))
    few = facts["rows"] == "few"
    block_n, stages = (few_block(facts), 4) if few else (MANY_BLOCK, 3)
    pointers = {
        "x": "*fp16",
        "words": "*fp16" if bits == 16 else "*i32",
        "scale": None if bits == 16 else f"*{facts['scale']}",
        "zero": None if facts["symmetric"] else "*fp16",
        "order": "*i32",
        "block_expert": "*i32",
        "out": "*fp16",
    }
    arguments: dict[str, str | int | float] = {name: type_ for name, type_ in pointers.items() if type_ is not None}
    return Signature(
        arguments={**arguments, "n": n, "k": k},
        constants={
            **{name: None for name, type_ in pointers.items() if type_ is None},
            "SHARE": int(facts["share"]),
            "BITS": bits,
            "GROUP": int(facts["group_size"]),
            "WHOLE_BLOCKS": k % 128 == 0,
            "BLOCK_M": BLOCK_ROWS[str(facts["rows"])],
            "BLOCK_N": block_n,
            "STAGES": stages,
        },
        num_warps=block_n // 16,
        num_stages=stages,
    )


def _grid(how: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return triton.cdiv(sizes["n"], int(str(how.constants["BLOCK_N"]))), sizes["blocks"], 1


def _spec(form: str, bits: int, rows: str, function: Any) -> KernelSpec:
    def refusal(facts: Facts) -> str | None:
        return _UNFIT[bits](facts) or (None if facts["rows"] == rows else f"serves {rows} rows")

    return KernelSpec(f"moe_linear_{form}_{rows}", "moe_linear", function, refusal, _signature, _grid)


SPECS: tuple[KernelSpec, ...] = tuple(
    _spec(form, bits, rows, function)
    for form, bits in (("w4a16", 4), ("w8a16", 8), ("f16", 16))
    for rows, function in (("few", moe_linear_few), ("many", moe_linear_many))
)
