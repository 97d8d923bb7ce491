"""K in parts, for few rows: a matrix that is too small to keep a GPU busy by its rows alone is cut along K too.

A `few` kernel's program then takes one part of K and writes its sums to `partial`, float32 or int32 `[splits, 16, N]`;
`split_k_reduce`, launched behind it, adds the parts up in their order and does what is due after the sum. Nothing is
added atomically, and how K is cut depends on the matrix alone: a row's bits depend neither on chance nor on its batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature
from quantkit_kernels.triton.tiles import FEW_ROWS, few_block

PROGRAMS = {80: 256, 90: 256, 100: 256}
"""Programs of a `few` kernel, by target, which K is cut for: about two for each of the 108 to 148 processors of GPUs
whose memory, at 2 to 8 TB/s, waits for more loads than one program each keeps under way."""
PROGRAMS_ELSEWHERE = 128
"""About one for each processor of cards whose memory brings 1 TB/s or two."""
MOST_SPLITS = 16
LEAST_BLOCKS = 4
"""Blocks of 128 columns that a part has at least: as many as are under way at once."""
WARPS = 4
BLOCK = 4 * 32 * WARPS
"""Columns a program of `split_k_reduce` adds up: four a thread, a 16-byte load from every part."""


def splits(facts: Facts) -> int:
    """Parts that K is cut into, as was measured (`tuning`), else by the matrix; 1: the linear kernel writes the output.

    Groups of 32 stay whole: their loop leaves no registers for a part's bounds (it spills with Triton 3.7.1).
    """
    if facts["rows"] != "few" or facts["group_size"] == 32:
        return 1
    if facts.get("splits"):
        return int(facts["splits"])
    n, blocks, parts = int(facts["n"]), triton.cdiv(int(facts["k"]), 128), 1
    tiles, wanted = triton.cdiv(n, few_block(facts)), PROGRAMS.get(int(facts["sm"]), PROGRAMS_ELSEWHERE)
    while parts < MOST_SPLITS and parts * tiles < wanted and blocks >= 2 * parts * LEAST_BLOCKS:
        parts *= 2
    return parts


def split_constant(facts: Facts) -> dict[str, int]:
    """The constant SPLITS of a linear kernel for few rows."""
    return {"SPLITS": splits(facts)} if facts["rows"] == "few" else {}


def sums_go(facts: Facts, type_: str, after: Mapping[str, str | None]) -> dict[str, str | None]:
    """Pointer types of a linear kernel's `out`, of `partial` (of sums of type_) in one for few rows, and of `after`,
    what comes after the sum, which `split_k_reduce` reads where K is cut."""
    if facts["rows"] != "few":
        return {**after, "out": "*fp16"}
    if splits(facts) == 1:
        return {**after, "out": "*fp16", "partial": None}
    return {**dict.fromkeys(after), "out": None, "partial": type_}


@triton.jit
def split_blocks(k, SPLITS: tl.constexpr):
    """First and last (excluded) block of 128 columns of this program's part, its third number."""
    blocks = tl.cdiv(k, 128)
    part = tl.cdiv(blocks, SPLITS)
    first = tl.minimum(tl.program_id(2) * part, blocks)
    return first, tl.minimum(first + part, blocks)


@triton.jit
def store_part(partial, total, row, at, n, wanted):
    """Sums `[16, BLOCK_N]` of x's rows `row` and the weight's rows `at`, where `wanted`, of this program's part."""
    tl.store(partial + (tl.program_id(2) * 16 + row)[:, None] * n + at[None, :], total, mask=wanted)


@triton.jit
def split_k_reduce_kernel(partial, x_scale, scale, bias, out, n, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Programs (columns, row): out = (sum of parts) · x_scale · scale + bias; None for what is left out."""
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(partial + row * n + at, mask=inside, other=0)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(partial + (part * 16 + row) * n + at, mask=inside, other=0)
    value = total.to(tl.float32)
    if x_scale is not None:
        value = value * tl.load(x_scale + row)
        value *= tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * n + at, value.to(tl.float16), mask=inside)


def _refusal(facts: Facts) -> str | None:
    return None if splits(facts) > 1 else "K is in one part"


def _signature(facts: Facts) -> Signature:
    quant = facts.get("quant")
    pointers = {
        "partial": "*i32" if quant == "int8" else "*fp32",
        "x_scale": "*fp32" if quant else None,
        "scale": f"*{facts['scale']}" if quant else None,
        "bias": "*fp16" if facts["bias"] else None,
        "out": "*fp16",
    }
    arguments: dict[str, str | int] = {name: type_ for name, type_ in pointers.items() if type_ is not None}
    return Signature(
        {**arguments, "n": int(facts["n"])},
        {
            **{name: None for name, type_ in pointers.items() if type_ is None},
            "SPLITS": splits(facts),
            "BLOCK": BLOCK,
        },
        num_warps=WARPS,
    )


def _grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return triton.cdiv(sizes["n"], BLOCK), min(sizes["rows"], FEW_ROWS), 1


SPECS = (
    KernelSpec("split_k_reduce", "linear", split_k_reduce_kernel, _refusal, _signature, _grid, launch=1, optional=True),
)
