"""Routing of tokens to experts, and the order in which a product of many matrices wants their rows.

A token and one of its experts are a *pair*: pair t·top_k + j is token t with its j-th expert. The experts of a token
are those of its largest logits, the lowest expert first among equals, in descending order. Their weights are

    softmax over all experts                      Qwen2-MoE
    renormalized to a sum of 1                    Mixtral, Qwen3-MoE

A softmax over the chosen logits alone is the second in other words: exp(x) / sum exp(x) of the chosen, either way.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference(logits: Tensor, slot_mapping: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Experts int32 `[T, top_k]` of each token, all different, and their weights float32 `[T, top_k]`.

    logits: float `[T, E]`; slot_mapping: int `[T]`, -1 for padding, whose experts are -1 and whose weights are 0. A row
    that holds NaN or +infinity, or nothing but -infinity, has weights of NaN. Raises ValueError unless 1 ≤ top_k ≤ E.
    """
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"a token cannot have {top_k} of {logits.shape[1]} experts")
    x = logits.to(torch.float32)
    comparable = torch.where(x.isnan(), float("-inf"), x)
    experts = comparable.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = x.gather(1, experts).softmax(-1) if renormalize else x.softmax(-1).gather(1, experts)
    weights = torch.where(x.isnan().any(-1, keepdim=True), torch.nan, chosen)
    live = (slot_mapping >= 0)[:, None]
    return torch.where(live, experts, -1).to(torch.int32), torch.where(live, weights, 0.0)


def most_blocks(tokens: int, top_k: int, num_experts: int, block_rows: int) -> int:
    """Blocks of `block_rows` pairs, one expert each, that so many tokens fill at most.

    Every expert that has pairs leaves less than a block empty, and none has more pairs than there are tokens.
    """
    pairs = tokens * top_k
    busy = min(pairs, num_experts)
    return min((pairs + busy * (block_rows - 1)) // block_rows, busy * -(-tokens // block_rows))


def blocks_of(experts: Tensor, num_experts: int, block_rows: int) -> tuple[Tensor, Tensor]:
    """Pairs sorted by expert, every expert's padded to whole blocks: `(order, block_expert)`.

    experts: int `[T, top_k]`, -1 for padding. order: int32 `[blocks · block_rows]`, pairs by expert and then ascending,
    -1 where a block is not filled. block_expert: int32 `[blocks]`, the expert of each block, -1 for what is left over
    of `most_blocks`.
    """
    tokens, top_k = experts.shape
    blocks = most_blocks(tokens, top_k, num_experts, block_rows)
    order = experts.new_full((blocks, block_rows), -1, dtype=torch.int32)
    block_expert = experts.new_full((blocks,), -1, dtype=torch.int32)
    used = 0
    for expert in range(num_experts):
        for pairs in (experts.flatten() == expert).nonzero()[:, 0].split(block_rows):
            if pairs.numel():
                order[used, : pairs.numel()] = pairs.to(torch.int32)
                block_expert[used] = expert
                used += 1
    return order.flatten(), block_expert
