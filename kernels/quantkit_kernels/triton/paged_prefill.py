"""Attention of chunks of prompts over the paged cache, which holds their own keys and values already.

    out_p = Σ_n softmax_n(q_p · k_n · scale) v_n        over positions n ≤ p, the last `window` of them, or all

Sequences bring any number of new tokens each, so that a step can mix chunks of prompts with tokens of decode. A program
takes BLOCK rows of one sequence and KV head, a row being a token and a query head, and goes over their keys in tiles
that lie at multiples of TILE. A tile in which a row sees nothing leaves it as it was, to the bit: what a token gets
depends on its own keys alone, not on how its prompt was cut into chunks or on who runs beside it. (Values of NaN or
infinity that a row must not see may still reach it from the tile of its own position.)

Keys and values are read as the cache stores them (`kv_cells`), so a prompt sees what later tokens will see of it.
Online softmax: Milakov and Gimelshein 2018, alg. 3; tiles of queries over tiles of keys: Dao 2023 (FlashAttention-2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.cache_formats import CACHE_FORMATS
from quantkit_kernels.triton import kv_cells
from quantkit_kernels.triton.kv_cells import find_cells, load_cells, tile
from quantkit_kernels.triton.operands import expect
from quantkit_kernels.triton.paged_attention import (
    NO_WINDOW,
    capped,
    checked_out,
    folded_query,
    mean,
    score_start,
    unfit,
)
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature


@triton.jit
def _sequence_of(query_start_loc, sequences, tile_at, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The sequence of a tile of rows, and the tile's place among its own.

    Sequence b's tiles start at ⌊start · GROUP / BLOCK⌋ + b, which leaves each as many as its rows need or one more.
    What lies behind the last sequence is one too, number `sequences`.
    """
    low = tile_at * 0
    high = sequences
    while low < high:
        middle = (low + high + 1) // 2
        fits = tl.load(query_start_loc + middle) * GROUP // BLOCK + middle <= tile_at
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    return low, tile_at - (tl.load(query_start_loc + low) * GROUP // BLOCK + low)


@triton.jit(do_not_specialize=["window", "table_width", "sequences", "tokens"])
def paged_prefill_kernel(
    q, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, out, scale, softcap, window,
    table_width, sequences, tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr, FORMAT: tl.constexpr, SHARING: tl.constexpr,
):  # fmt: skip
    """Programs (KV head, tile of rows)."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TYPE: tl.constexpr = tl.bfloat16 if FORMAT == "BF16" else tl.float16
    kv_head = tl.program_id(0)
    sequence, tile_at = _sequence_of(query_start_loc, sequences, tl.program_id(1), GROUP, BLOCK)
    behind = sequence == sequences
    start = tl.load(query_start_loc + sequence)
    stop = tl.load(query_start_loc + sequence + 1, mask=sequence < sequences, other=0)
    stop = tl.where(behind, tokens, stop)
    token = tile_at * BLOCK // GROUP
    if start + token < stop:
        flat = tile_at * BLOCK + tl.arange(0, BLOCK)
        channel = tl.arange(0, DIM_BLOCK)
        row = start + flat // GROUP
        used = (row < stop)[:, None] & (channel < HEAD_DIM)[None, :]
        at = (row.to(tl.int64) * HEADS + kv_head * GROUP + flat % GROUP)[:, None] * HEAD_DIM + channel[None, :]
        length = tl.load(seq_lens + sequence, mask=sequence < sequences, other=0)
        position = length - stop + row
        last = tl.minimum(length, length - stop + start + (tile_at * BLOCK + BLOCK - 1) // GROUP + 1)
        begin = tl.maximum(length - stop + start + token - window + 1, 0) // TILE * TILE
        table = block_table + sequence.to(tl.int64) * table_width
        keep = tl.where(length < 0, 0, 0x00FF00FF)

        query = tl.load(q + at, mask=used, other=0.0)
        query = folded_query(query, k_scale, kv_head, channel, HEAD_DIM, FORMAT, SHARING, TYPE)
        bias = score_start(query, FORMAT)
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        sums = tl.zeros((BLOCK, DIM_BLOCK), tl.float32)
        key = begin + tl.arange(0, TILE)
        cell = find_cells(table, kv_head, key, key < last, KV_HEADS, PAGE)
        k, k_levels = load_cells(k_cache, cell, key < last, FORMAT, HEAD_DIM, SHARING, DIM_BLOCK)
        v, v_levels = load_cells(v_cache, cell, key < last, FORMAT, HEAD_DIM, SHARING, DIM_BLOCK)
        for _ in range(begin, last, TILE):
            # The next keys are fetched as soon as these are used, and so are the values.
            later = key + TILE
            cell = find_cells(table, kv_head, later, later < last, KV_HEADS, PAGE)
            keys = tile(k, k_levels, keep, FORMAT, SHARING, TYPE)
            scores = tl.dot(query, tl.trans(keys), tl.broadcast_to(bias[:, None], (BLOCK, TILE)))
            k, k_levels = load_cells(k_cache, cell, later < last, FORMAT, HEAD_DIM, SHARING, DIM_BLOCK)
            scores = capped(scores, scale, softcap, FORMAT, CAPPED)
            seen = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(scores - level[:, None])
            fade = tl.exp2(top - level)
            weight = weight.to(TYPE)
            total = total * fade + tl.sum(weight.to(tl.float32), axis=1)
            sums = tl.dot(weight, tile(v, v_levels, keep, FORMAT, SHARING, TYPE), sums * fade[:, None])
            v, v_levels = load_cells(v_cache, cell, later < last, FORMAT, HEAD_DIM, SHARING, DIM_BLOCK)
            top = higher
            key = later
        result = mean(sums, tl.where(total > 0.0, total, 1.0), FORMAT, SHARING)
        result = tl.where((total > 0.0)[:, None], result, 0.0)
        if v_scale is not None:
            fold = tl.load(v_scale + kv_head * HEAD_DIM + channel, mask=channel < HEAD_DIM, other=0.0)
            result *= fold[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=used)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cache_format: str,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`ops.paged_attention.reference` of a step's new tokens, whose keys and values are in the cache already.

    q: float16, bfloat16 or float32 `[T, Hq·D]`; query_start_loc: int32 `[B + 1]`, ascending, at most T; seq_lens:
    int32 `[B]`, new tokens included; the rest as `paged_attention` takes it. Tokens of no sequence get zeros. Returns
    `[T, Hq·D]` in the type of q (written to `out` where given). Raises ValueError for other shapes or types.
    """
    tokens, sequences, block_size = q.shape[0], seq_lens.shape[0], k_cache.shape[2]
    out = checked_out(q, k_cache, v_cache, k_scale, v_scale, num_heads, num_kv_heads, head_dim, cache_format, out)
    expect("block_table", block_table, (sequences, None), (torch.int32,))
    expect("query_start_loc", query_start_loc, (sequences + 1,), (torch.int32,))
    expect("seq_lens", seq_lens, (sequences,), (torch.int32,))
    if not tokens:
        return out
    constants = _constants(cache_format, softcap is not None, num_heads, num_kv_heads, head_dim, block_size)
    block, warps = _shape(head_dim, cache_format)
    paged_prefill_kernel[(num_kv_heads, _tiles(tokens, sequences, num_heads // num_kv_heads, block))](
        q, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, out, scale, softcap or 1.0,
        NO_WINDOW if window is None else window, block_table.shape[1], sequences, tokens,
        **constants, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return out


def _shape(head_dim: int, cache_format: str) -> tuple[int, int]:
    """Rows of a program and its warps: 64 rows, the fewest that the widest matrix instructions take, or 32 of what
    would spill on some target."""
    if head_dim <= 64:
        return 64, 4
    if head_dim <= 128:
        return (32, 4) if cache_format == "INT8" else (64, 8)
    return {"FP8": (32, 4), "INT4": (64, 8)}.get(cache_format, (32, 8))


def _tiles(tokens: int, sequences: int, group: int, block: int) -> int:
    return tokens * group // block + sequences + 1


def _constants(
    cache_format: str, capped: bool, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> dict[str, Any]:
    return {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE": block_size,
        "BLOCK": _shape(head_dim, cache_format)[0],
        "DIM_BLOCK": max(32, triton.next_power_of_2(head_dim)),
        "TILE": 64 if head_dim <= 64 else 32,
        "CAPPED": capped,
        **kv_cells.constants(cache_format, head_dim),
    }


def _refusal(facts: Facts) -> str | None:
    return unfit(*(int(facts[name]) for name in ("num_heads", "num_kv_heads", "head_dim"))) or kv_cells.refusal(facts)


def _signature(facts: Facts) -> Signature:
    activation, cache = f"*{facts['dtype']}", kv_cells.POINTERS[str(facts["cache"])]
    names = ("num_heads", "num_kv_heads", "head_dim", "block_size")
    constants = _constants(str(facts["cache"]), bool(facts["softcap"]), *(int(facts[name]) for name in names))
    arguments: dict[str, str | int | float] = {
        "q": activation, "k_cache": cache, "v_cache": cache, "block_table": "*i32", "query_start_loc": "*i32",
        "seq_lens": "*i32", "out": activation, "scale": float(facts["scale"]),
        "softcap": float(facts["softcap"]) or 1.0,
        "window": NO_WINDOW, "table_width": NO_WINDOW, "sequences": NO_WINDOW, "tokens": NO_WINDOW,
    }  # fmt: skip
    scaled = CACHE_FORMATS[str(facts["cache"])].scaled
    for name in ("k_scale", "v_scale"):
        if scaled:
            arguments[name] = "*fp32"
        else:
            constants[name] = None
    _, warps = _shape(int(facts["head_dim"]), str(facts["cache"]))
    return Signature(arguments, constants, num_warps=warps, num_stages=1)


def _grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    heads, kv_heads, block = (int(str(signature.constants[name])) for name in ("HEADS", "KV_HEADS", "BLOCK"))
    return (kv_heads, _tiles(sizes["rows"], sizes["sequences"], heads // kv_heads, block), 1)


SPECS = (
    KernelSpec(
        "paged_prefill", "paged_attention", paged_prefill_kernel, _refusal, _signature, _grid, phases=("prefill",)
    ),
)
