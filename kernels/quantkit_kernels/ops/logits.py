"""The language-model head over the rows whose next token is wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.ops import linear


def reference(hidden: Tensor, logits_rows: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
    """`softcap(hidden[logits_rows] @ weight.T)` with softcap(y) = c·tanh(y / c).

    hidden: float32 `[T, H]`; logits_rows: int `[R]`; weight: `[V, H]`. Returns float32 `[R, V]`.
    """
    y = linear.reference(hidden[logits_rows.long()], weight)
    return y if softcap is None else softcap * torch.tanh(y / softcap)
