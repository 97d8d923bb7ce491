"""Matrix product with an optional bias: in float32 whatever type the weight is stored in, or of codes with codes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quantkit_kernels.ops import quantize

BLOCK = 128
"""Channels of a row that share a scale when it is quantized on the fly, at most; a block never spans two groups."""


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, computed in float32.

    x: `[T, K]`; weight: `[N, K]`, any float type (quantized ones dequantized first); bias: `[N]` or None.
    Returns float32 `[T, N]`.
    """
    return functional.linear(
        x.to(torch.float32), weight.to(torch.float32), None if bias is None else bias.to(torch.float32)
    )


def codes_of(x: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Integers (as float32) `[..., n]` and what one stands for, float32 `[..., 1]`; the largest of a row is `most`.

    Ties round to even. A row that is not finite gets zeros and NaN.
    """
    values, unit = quantize.spread(x, most)
    return values.round(), unit


def of_codes(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """`x @ ((codes - zero) * scale).T + bias` with x quantized on the fly in blocks; products are exact integers.

    x: float `[T, K]`; codes: int8 `[N, K]`; scale: float32 `[N, G]` for groups of K / G channels; zero: int8 `[N, G]`
    or None; bias: `[N]` or None. A group is cut into blocks of BLOCK channels, the last may be shorter. Returns float32
    `[T, N]`: blocks are added in order, each an integer times (scale of the output times scale of the row).
    """
    rows, columns = codes.shape
    groups = scale.shape[1]
    group = columns // groups
    total = x.new_zeros(x.shape[0], rows, dtype=torch.float32)
    for g in range(groups):
        weights = codes[:, g * group : (g + 1) * group].double()
        if zero is not None:
            weights = weights - zero[:, g : g + 1].double()
        for start in range(0, group, BLOCK):
            at = g * group + start
            held, x_scale = codes_of(x[:, at : min(at + BLOCK, (g + 1) * group)], 127.0)
            dots = held.double() @ weights[:, start : start + BLOCK].T
            factor = scale[:, g].to(torch.float32) * x_scale
            total = torch.addcmul(total.double(), dots, factor.double()).to(torch.float32)
    return total if bias is None else total + bias.to(torch.float32)


def of_token_codes(x: Tensor, x_scale: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`(x · x_scale) @ (codes · scale).T + bias` where rows of both sides are codes with one scale a row.

    x: int8 or float8_e4m3fn `[T, K]`; x_scale: float32 `[T]`; codes: of the same type, `[N, K]`; scale: any float
    `[N]`; bias: `[N]` or None. Returns float32 `[T, N]`: the sum of products (of integers: exact) times x_scale, times
    scale.
    """
    dots = (x.double() @ codes.double().T).to(torch.float32)
    total = dots * x_scale[:, None] * scale.to(torch.float32)
    return total if bias is None else total + bias.to(torch.float32)
