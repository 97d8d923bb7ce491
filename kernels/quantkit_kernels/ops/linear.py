"""Matrix product with an optional bias: in float32 whatever type the weight is stored in, or of codes with codes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
"""Channels of a row that share a scale when it is quantized on the fly, at most; a block never spans two groups."""
SMALLEST = 1e-30
"""A block whose largest magnitude is below this is all zero."""


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

    Ties round to even. A row that is not finite gets NaN.
    """
    x = x.to(torch.float32)
    top = x.abs().amax(-1, keepdim=True)
    live = top >= SMALLEST
    bound = torch.full_like(top, most)  # torch takes a number over a tensor by way of the reciprocal: another rounding
    codes = torch.where(live, x * (bound / torch.where(live, top, 1.0)), 0.0).round()
    unit = torch.where(live, top / most, 0.0)
    broken = ~torch.isfinite(x).all(-1, keepdim=True)
    return torch.where(broken, 0.0, codes), torch.where(broken, torch.nan, unit)


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
