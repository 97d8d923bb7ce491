"""Matrix product of every pair of a token and an expert with that expert's weight."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """Row p: `x[p // share] @ weight[experts[p]].T`, computed in float32.

    x: float `[T, K]`, a row a token (share is top_k), or `[T · top_k, K]`, a row a pair (share is 1); weight: float
    `[E, N, K]`; experts: int `[T, top_k]`, -1 for padding. Returns float32 `[T · top_k, N]`, padding zero.
    """
    chosen = experts.flatten()
    rows = x.to(torch.float32).repeat_interleave(chosen.numel() // max(x.shape[0], 1), 0)
    out = rows.new_zeros(chosen.numel(), weight.shape[1])
    for expert in range(weight.shape[0]):
        at = (chosen == expert).nonzero()[:, 0]
        out = out.index_copy(0, at, rows[at] @ weight[expert].to(torch.float32).T)
    return out
