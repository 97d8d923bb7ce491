"""Rotary position embedding (Su et al. 2021) in the rotate-half layout of Hugging Face checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading `rd` channels of each head; channel i pairs with i + rd/2, the rest pass through.

    x: float32 `[T, heads, D]`; positions: int `[T]`; cos, sin: float32 `[P, rd/2]` by position.
    Returns float32 `[T, heads, D]`.
    """
    half = cos.shape[-1]
    index = positions.long()
    c = cos[index].unsqueeze(1)
    s = sin[index].unsqueeze(1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1)
