"""What a case is: inputs, what the reference makes of them, bytes and operations; and random numbers for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.triton.layout import GpuMatrix, pack_matrix

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Case:
    """A case: values by argument, launch sizes, the arguments that it writes, and what they must be.

    bound: name -> (relative, absolute) tolerance. before: what arguments hold that are written in part. numbers: name
    -> what an output stands for, where that is not its elements. moved: bytes that must be read and written.
    operations: additions and multiplications. baseline: the same in plain torch FP16, where there is one.
    """

    values: dict[str, Any]
    sizes: dict[str, int]
    expected: dict[str, Tensor]
    bound: dict[str, tuple[float, float]]
    before: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    operations: float = 0.0
    baseline: Callable[[], Any] | None = None
    also_moved: int = 0
    unread: frozenset[str] = field(default_factory=frozenset)

    @property
    def moved(self) -> int:
        """Bytes of all tensors that are read or written, but for those not counted (caches count what is seen)."""
        tensors = {name: value for name, value in self.values.items() if isinstance(value, Tensor)}
        return self.also_moved + sum(t.nbytes for name, t in tensors.items() if name not in self.unread)

    def poison(self) -> None:
        """Fill what is written with what no kernel writes, or what stood there before."""
        for name in self.expected:
            out = self.values[name]
            if name in self.before:
                out.copy_(self.before[name])
            else:
                out.fill_(float("nan") if out.is_floating_point() else -77)

    def errors(self) -> dict[str, float]:
        """By output: the largest difference, as a share of what the bound allows; above 1 is wrong."""
        found = {}
        for name, expected in self.expected.items():
            relative, absolute = self.bound[name]
            read = self.numbers.get(name, Tensor.float)
            out, want = read(self.values[name]), read(expected)
            share = (out - want).abs() / (relative * want.abs() + absolute)
            share = torch.where((out == want) | (out.isnan() & want.isnan()), torch.zeros_like(share), share)
            worst = float(share.nan_to_num(nan=float("inf")).max())
            found[name] = worst
        return found


def random_half(*shape: int, device: str, spread: float = 1.0) -> Tensor:
    """Random float16 numbers."""
    return (torch.randn(*shape, device=device) * spread).half()


def random_matrix(n: int, k: int, bits: int, group: int, *, symmetric: bool, scale: str) -> tuple[GpuMatrix, Tensor]:
    """A weight of random codes as the kernels read it, and dequantized in float32; on the CPU."""
    if bits not in (4, 8):
        raise ValueError(f"this check packs no {bits}-bit weights")
    top, groups = 1 << (bits - 1), k // group if group else 1
    codes = torch.randint(-top, top, (n, k), dtype=torch.int8)
    scales = (torch.rand(n, groups) * 0.02 + 0.001).to(TYPES[scale])
    zero = None if symmetric else torch.randint(-top, top, (n, groups), dtype=torch.int8)
    shifted = codes.float() - (0.0 if zero is None else zero.float().repeat_interleave(k // groups, 1))
    dense = shifted * scales.float().repeat_interleave(k // groups, 1)
    return pack_matrix(codes, scales, zero, bits=bits, group_size=group), dense
