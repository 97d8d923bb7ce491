"""Token embedding: rows of a table, optionally scaled (Gemma multiplies by sqrt(hidden size))."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding


def reference(token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """`table[token_ids] * scale` in float32.

    token_ids: int `[T]`; table: float32, float16 or bfloat16 `[V, H]`. Returns float32 `[T, H]`.
    """
    rows = embedding(token_ids.long(), table).to(torch.float32)
    return rows if scale == 1.0 else rows * scale
