"""The language-model head over the rows whose next token is wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.ops import linear


def reference(hidden: Tensor, logits_rows: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
    """`softcap(hidden[logits_rows] @ weight.T)` with softcap(y) = c·tanh(y / c).

    hidden: float32 `[T, H]`; logits_rows: int `[R]`; weight: `[V, H]`. Returns float32 `[R, V]`.
    """
    return capped(linear.reference(hidden[logits_rows.long()], weight), softcap)


def of_codes(
    hidden: Tensor,
    logits_rows: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The same with the rows quantized on the fly; codes, scale and zero as `linear.of_codes` takes them."""
    return capped(linear.of_codes(hidden[logits_rows.long()], codes, scale, zero), softcap)


def capped(y: Tensor, softcap: float | None) -> Tensor:
    """`c·tanh(y / c)` (Gemma Team 2024, section 2), y where there is no cap."""
    return y if softcap is None else softcap * torch.tanh(y / softcap)
