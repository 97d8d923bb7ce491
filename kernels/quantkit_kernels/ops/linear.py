"""Matrix product with an optional bias, in float32 whatever type the weight is stored in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, computed in float32.

    x: `[T, K]`; weight: `[N, K]`, any float type (quantized ones dequantized first); bias: `[N]` or None.
    Returns float32 `[T, N]`.
    """
    return functional.linear(
        x.to(torch.float32), weight.to(torch.float32), None if bias is None else bias.to(torch.float32)
    )
