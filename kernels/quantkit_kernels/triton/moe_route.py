"""Routing of tokens to experts in two launches: `moe_topk` chooses and weighs, `moe_order` sorts pairs by expert.

`ops/moe_route.py` has the rules and the names. Both work on what one program holds and share nothing: no atomics, no
sort. `moe_topk` takes the largest logit top_k times over. `moe_order` has a program an expert, which counts every
expert's pairs to learn where its own begin, and then places those by a running sum over all pairs: as many reads as
there are experts, of numbers that lie in the cache. So the order is that of the pairs, whatever runs when.

A grouped product's programs serve a block of pairs of one expert each. A launch is sized for the most blocks there can
be, as the host does not know the counts; a block that is left over has expert -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.ops.moe_route import most_blocks
from quantkit_kernels.triton.operands import FLOATS, expect
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature
from quantkit_kernels.triton.tiles import FEW_ROWS

BLOCK_ROWS = {"few": FEW_ROWS, "many": 32}
"""Pairs of a block, by the class of the number of tokens. Experts get few tokens each, so that larger blocks would be
padding; no more than 16 tokens are one block an expert."""
MOST_EXPERTS = 1024
MOST_CHOSEN = 32
"""Experts of a token: each is a turn of `moe_topk`'s unrolled loop."""
PLACED = 1024
"""Pairs that a program of `moe_order` places together."""
COUNTED = 2048
"""Comparisons of a pair with an expert that it makes together."""
WARPS = 4


@dataclass(frozen=True)
class Routing:
    """What grouped products and the sum behind them need to know.

    experts: int32 `[T, top_k]`, -1 for padding. weights: float32 `[T, top_k]`. order: int32 `[blocks · block_rows]`,
    pairs by expert, -1 where a block is not filled. block_expert: int32 `[blocks]`. rows: "few" or "many", by T.
    """

    experts: Tensor
    weights: Tensor
    order: Tensor
    block_expert: Tensor
    rows: str


@triton.jit
def moe_topk_kernel(
    logits,
    slot_mapping,
    experts,
    weights,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Programs (token)."""
    token = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    place = tl.arange(0, CHOSEN)
    free = expert < EXPERTS
    x = tl.load(logits + token.to(tl.int64) * EXPERTS + expert, mask=free, other=float("-inf")).to(tl.float32)
    spoiled = tl.max((x != x).to(tl.int32), axis=0) > 0
    x = tl.where(x != x, float("-inf"), x)
    largest = tl.max(x, axis=0)
    chosen = tl.zeros((CHOSEN,), tl.int32)
    share = tl.zeros((CHOSEN,), tl.float32)
    for j in tl.static_range(TOP_K):
        top = tl.max(tl.where(free, x, float("-inf")), axis=0)
        who = tl.min(tl.where(free & (x == top), expert, BLOCK), axis=0)
        free = free & (expert != who)
        chosen = tl.where(place == j, who, chosen)
        share = tl.where(place == j, tl.exp(top - largest), share)
    total = tl.sum(share, axis=0) if RENORMALIZE else tl.sum(tl.exp(x - largest), axis=0)
    share = tl.where(spoiled, float("nan"), share / total)
    live = tl.load(slot_mapping + token) >= 0
    at = token * TOP_K + place
    tl.store(experts + at, tl.where(live, chosen, -1), mask=place < TOP_K)
    tl.store(weights + at, tl.where(live, share, 0.0), mask=place < TOP_K)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def moe_order_kernel(
    experts,
    order,
    block_expert,
    pairs,
    blocks,
    BLOCK_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
    PLACED: tl.constexpr,
):
    """Programs (expert); blocks: how many `block_expert` holds."""
    mine = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    found = tl.zeros((COUNTED, BLOCK), tl.int32)
    for begin in tl.range(0, pairs, COUNTED):
        at = begin + tl.arange(0, COUNTED)
        given = tl.load(experts + at, mask=at < pairs, other=-1)
        found += (given[:, None] == expert[None, :]).to(tl.int32)
    filled = (tl.sum(found, axis=0) + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(expert < mine, filled, 0), axis=0)
    last = first + tl.sum(tl.where(expert == mine, filled, 0), axis=0)
    placed = first * BLOCK_M
    for begin in tl.range(0, pairs, PLACED):
        at = begin + tl.arange(0, PLACED)
        here = (tl.load(experts + at, mask=at < pairs, other=-1) == mine).to(tl.int32)
        tl.store(order + placed + tl.cumsum(here, axis=0) - 1, at, mask=here > 0)
        placed += tl.sum(here, axis=0)
    rest = placed + tl.arange(0, BLOCK_M)
    tl.store(order + rest, -1, mask=rest < last * BLOCK_M)
    for begin in tl.range(first, last, BLOCK_M):
        at = begin + tl.arange(0, BLOCK_M)
        tl.store(block_expert + at, mine, mask=at < last)
    for block in tl.range(tl.sum(filled, axis=0) + mine, blocks, EXPERTS):
        tl.store(order + block * BLOCK_M + tl.arange(0, BLOCK_M), -1)
        tl.store(block_expert + block, -1)


def moe_route(
    logits: Tensor, slot_mapping: Tensor, top_k: int, *, renormalize: bool, rows: str | None = None
) -> Routing:
    """`ops.moe_route.reference`, and `blocks_of` what it chose.

    logits: float16, bfloat16 or float32 `[T, E]`; slot_mapping: int32 `[T]`, -1 for padding; rows: `few` (at most 16)
    or `many`, by T if absent. Raises ValueError for other shapes or types, and for numbers of experts that no kernel
    takes.
    """
    tokens, num_experts = logits.shape
    reason = _unfit(num_experts, top_k)
    if reason is not None:
        raise ValueError(reason)
    rows = rows or ("few" if tokens <= FEW_ROWS else "many")
    if tokens > FEW_ROWS and rows == "few":
        raise ValueError(f"{tokens} rows are more than the {FEW_ROWS} that a kernel for few rows takes")
    expect("logits", logits, (tokens, num_experts), FLOATS)
    expect("slot_mapping", slot_mapping, (tokens,), (torch.int32,))
    block_rows = BLOCK_ROWS[rows]
    blocks = most_blocks(tokens, top_k, num_experts, block_rows)
    experts = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    order = experts.new_empty(blocks * block_rows)
    block_expert = experts.new_empty(blocks)
    if tokens:
        moe_topk_kernel[(tokens,)](
            logits, slot_mapping, experts, weights, **_topk_constants(num_experts, top_k, renormalize), num_warps=1
        )
        moe_order_kernel[(num_experts,)](
            experts, order, block_expert, tokens * top_k, blocks, **_order_constants(num_experts, block_rows),
            num_warps=WARPS,
        )  # fmt: skip
    return Routing(experts, weights, order, block_expert, rows)


def _topk_constants(num_experts: int, top_k: int, renormalize: bool) -> dict[str, int | bool]:
    return {
        "EXPERTS": num_experts, "TOP_K": top_k, "RENORMALIZE": renormalize,
        "BLOCK": triton.next_power_of_2(num_experts), "CHOSEN": triton.next_power_of_2(top_k),
    }  # fmt: skip


def _order_constants(num_experts: int, block_rows: int) -> dict[str, int]:
    block = triton.next_power_of_2(num_experts)
    return {
        "BLOCK_M": block_rows, "EXPERTS": num_experts, "BLOCK": block, "COUNTED": COUNTED // max(block, 4),
        "PLACED": PLACED,
    }  # fmt: skip


def _unfit(num_experts: int, top_k: int) -> str | None:
    if num_experts > MOST_EXPERTS:
        return f"{num_experts} experts are more than the {MOST_EXPERTS} that the routing kernels take"
    if not 1 <= top_k <= min(num_experts, MOST_CHOSEN):
        return f"a token cannot have {top_k} of {num_experts} experts: 1 to {min(num_experts, MOST_CHOSEN)} can be had"
    return None


def _refusal(facts: Facts) -> str | None:
    return _unfit(int(facts["experts"]), int(facts["top_k"]))


def _topk_signature(facts: Facts) -> Signature:
    arguments: dict[str, str | int | float] = {
        "logits": f"*{facts['dtype']}", "slot_mapping": "*i32", "experts": "*i32", "weights": "*fp32",
    }  # fmt: skip
    constants = _topk_constants(int(facts["experts"]), int(facts["top_k"]), bool(facts["renormalize"]))
    return Signature(arguments, constants, num_warps=1)


def _topk_grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return (sizes["rows"], 1, 1)


def _order_signature(facts: Facts) -> Signature:
    arguments: dict[str, str | int | float] = {
        "experts": "*i32", "order": "*i32", "block_expert": "*i32", "pairs": FEW_ROWS, "blocks": FEW_ROWS,
    }  # fmt: skip
    constants = _order_constants(int(facts["experts"]), BLOCK_ROWS[str(facts["rows"])])
    return Signature(arguments, constants, num_warps=WARPS)


def _order_grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return (int(str(signature.constants["EXPERTS"])), 1, 1)


SPECS = (
    KernelSpec("moe_topk", "moe_route", moe_topk_kernel, _refusal, _topk_signature, _topk_grid),
    KernelSpec("moe_order", "moe_route", moe_order_kernel, _refusal, _order_signature, _order_grid, launch=1),
)
