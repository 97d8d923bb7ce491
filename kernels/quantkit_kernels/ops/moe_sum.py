"""The weighted sum of what a token's experts made of it."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(y: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """`sum over j of weights[t, j] · y[t · top_k + j]`, added in the order of j, in float32.

    y: float `[T · top_k, H]`; experts: int `[T, top_k]`, -1 for padding, whose rows of y are not looked at; weights:
    float32 `[T, top_k]`. Returns float32 `[T, H]`, padding zero.
    """
    tokens, top_k = experts.shape
    rows = y.to(torch.float32).view(tokens, top_k, -1)
    total = rows.new_zeros(tokens, rows.shape[2])
    for j in range(top_k):
        total = total + torch.where((experts[:, j] >= 0)[:, None], weights[:, j, None] * rows[:, j], 0.0)
    return total
