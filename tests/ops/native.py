"""What the op tests share: native calls over tensors, poisoned outputs, weights, a paged cache filled at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels import cpu
from quantkit_kernels.cache_formats import CACHE_FORMATS
from quantkit_kernels.ops import kv_cells
from quantkit_kernels.tensors import as_array

GUARD = 3
"""Rows beyond the counts, which no call may touch."""


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"))


def int32(values: list[int] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def between(low: int, high: int) -> int:
    """A random size, both ends included, of the test's own seed."""
    return int(torch.randint(low, high + 1, ()))


class TensorCalls:
    """A `cpu.CallList` that takes tensors, as references make them."""

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        self.list = cpu.CallList(threads, isa)

    def __len__(self) -> int:
        return len(self.list)

    def __getattr__(self, name: str) -> Callable[..., None]:
        method = getattr(self.list, name)
        return lambda *given, **named: method(*map(_array, given), **{key: _array(x) for key, x in named.items()})


def pack(weight: Tensor, **options: Any) -> cpu.PackedMatrix:
    """`cpu.pack_matrix` of tensors."""
    return cpu.pack_matrix(_array(weight), **{name: _array(option) for name, option in options.items()})


def _array(given: Any) -> Any:
    return as_array(given) if isinstance(given, Tensor) else given


def run(
    isa: str, add: Callable[[TensorCalls], None], tokens: int, sequences: int = 1, rows: int = 1, threads: int = 2
) -> None:
    calls = TensorCalls(threads, isa)
    add(calls)
    calls.run(tokens, sequences, rows)


def assert_rows(out: Tensor, expected: Tensor, *, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """`out` equals `expected` in its leading rows and is still poison beyond."""
    count = expected.shape[0]
    torch.testing.assert_close(out[:count], expected, rtol=rtol, atol=atol)
    assert out[count:].isnan().all()


@dataclass
class Weight:
    """A packed weight and the float32 matrix it stands for."""

    packed: cpu.PackedMatrix
    dense: Tensor
    codes: tuple[Tensor, Tensor, Tensor | None] | None = None
    """int8 `[N, K]`, scale `[N, G]`, zero `[N, G]` or None; None for a float weight."""


def weight(form: str, rows: int, columns: int) -> Weight:
    """form: f32, f16, bf16, or int4/int8 with an optional group and asymmetry: `int4:g64`, `int8:g32:asym`."""
    floats = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    if form in floats:
        dense = torch.randn(rows, columns).to(floats[form])
        return Weight(pack(dense), dense.to(torch.float32))
    kind, *rest = form.split(":")
    bits = int(kind[3:])
    group = next((int(part[1:]) for part in rest if part.startswith("g")), columns)
    groups = columns // group
    top = 1 << (bits - 1)
    codes = torch.randint(-top, top, (rows, columns), dtype=torch.int8)
    scale = torch.rand(rows, groups) * 0.01 + 0.001
    if "half" in rest:
        scale = scale.half().float()
    zero = torch.randint(-top, top, (rows, groups), dtype=torch.int8) if "asym" in rest else None
    shifted = codes.float().view(rows, groups, group) - (0 if zero is None else zero.float().unsqueeze(-1))
    dense = (shifted * scale.unsqueeze(-1)).view(rows, columns)
    return Weight(pack(codes, bits=bits, scale=scale, zero=zero), dense, (codes, scale, zero))


@dataclass
class Cache:
    """A paged cache of one layer whose blocks of each sequence are scattered; unused cells hold garbage."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    table: Tensor
    form: str
    """A name of CACHE_FORMATS."""

    def slots(self, sequence: int, positions: Tensor) -> Tensor:
        size = self.k.shape[2]
        return self.table[sequence].long()[positions // size] * size + positions % size


def cache(form: str, lengths: list[int], heads: int, head_dim: int, block_size: int = 16) -> Cache:
    blocks = [-(-length // block_size) for length in lengths]
    total = sum(blocks) + 2
    order = torch.randperm(total)
    table = torch.full((len(lengths), max(blocks, default=1) + 1), 0, dtype=torch.int32)
    used = 0
    for b, count in enumerate(blocks):
        table[b, :count] = order[used : used + count]
        used += count
    kind = CACHE_FORMATS[form]
    shape = (total, heads, block_size, kind.cell(head_dim))
    if form == "INT8":
        k, v = (torch.randint(-128, 128, shape, dtype=torch.int8) for _ in range(2))
        scales = [torch.rand(heads, head_dim) * 0.02 + 0.005 for _ in range(2)]
        return Cache(k, v, *scales, table, form)
    unset = kv_cells.store(torch.full((heads, head_dim), float("nan")), torch.ones(heads, head_dim), form)
    garbage = unset.unsqueeze(1).expand(shape).contiguous()
    scale = [torch.rand(heads, head_dim) * 2 / kind.top + 1 / kind.top for _ in range(2)] if kind.top else [None, None]
    filled = Cache(garbage, garbage.clone(), *scale, table, form)
    for b, length in enumerate(lengths):
        slots = filled.slots(b, torch.arange(length))
        for side, by in ((filled.k, scale[0]), (filled.v, scale[1])):
            side[slots // block_size, :, slots % block_size] = kv_cells.store(
                torch.randn(length, heads, head_dim), by, form
            )
    return filled
