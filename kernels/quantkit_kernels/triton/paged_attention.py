"""Decode attention over the paged cache: one query token a sequence, softmax(q·kᵀ·scale)·v, split along the keys.

    s_n = q · k_n · scale            with a softcap c: c · tanh(s_n / c)
    out = Σ_n exp(s_n − m) v_n / Σ_n exp(s_n − m),   m = max_n s_n       over the last `window` positions, or all

The heads that read one KV head are packed to 16 rows of one matrix product, so that a key or value is read once. The
softmax is online within a split (Milakov and Gimelshein 2018, alg. 3); `paged_attention_reduce` joins the splits by
their log-sum-exp (flash-decoding, Dao et al. 2023) in a fixed order.

Which keys form a split follows from the sequence's length alone and is decided on the device, so a launch captured once
stays right as sequences grow, and a sequence gets the same bits whatever runs beside it. The grid only says how many
programs share a sequence's splits: each takes every `programs`-th.

A quantized cache holds x over one static scale a head and channel (docs/decisions/0003, 0016): k's scale is folded
into the query once, v's into the output once. Codes of an INT8 cache come as code + 128 (`kv_cells`): what 128 adds to
a row's scores is taken off where their sum starts; what it adds to the output is 128 itself, since the weights sum to
the total that divides them.
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
from quantkit_kernels.triton.kv_cells import INT8_UNIT, INT8_ZERO, find_cells, from_tile, load_cells, tile, to_tile
from quantkit_kernels.triton.operands import FLOATS, expect, expect_cache
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

SPLIT = 256
"""Keys of the smallest split. Splits of a long sequence grow, so that it has at most MOST_SPLITS."""
MOST_SPLITS = 32
PROGRAMS = 4096
"""About so many programs are launched where the splits allow: some waves of any GPU, so that early leavers even out."""
TILE_BYTES = 8192
"""Keys, and again values, that a program has on their way to it at most: 64 bytes a thread of its four warps."""
WARPS = 4
WIDEST_HEAD = 256
MOST_WORDS = 2**31 - 1
"""Words of 32 bits of one cache, 8 GiB: offsets in it are of 32 bits."""
ROWS = 16
"""Query heads of one program: the fewest rows of a matrix product."""
NO_WINDOW = 2**31 - 1
LOG2E = tl.constexpr(1.4426950408889634)
"""Scores carry it, for exp2 is the hardware's exponential."""


@triton.jit
def _splits(length, window, TILE: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """The first tile's position, the keys of a split and the number of splits of a sequence."""
    first = tl.maximum(length - window, 0) // TILE * TILE
    keys = length - first
    fair = tl.cdiv(tl.cdiv(keys, MOST_SPLITS), TILE) * TILE
    each = tl.maximum(fair, SPLIT)
    return first, each, tl.cdiv(keys, each)


@triton.jit
def folded_query(
    query, k_scale, kv_head, channel,
    HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr, SHARING: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Query rows `[R, channels]` with the key scales of their KV head folded in, for a product with tiles of TYPE."""
    if k_scale is not None:
        fold = tl.load(k_scale + kv_head * HEAD_DIM + channel, mask=channel < HEAD_DIM, other=0.0)
        query = query.to(tl.float32) * fold[None, :]
    return to_tile(query.to(TYPE), FORMAT, SHARING)


@triton.jit
def score_start(query, FORMAT: tl.constexpr):
    """Where a row's scores start, float32 `[R]`: what a tile of keys holds too much is taken off."""
    if FORMAT == "INT8":
        start = -INT8_ZERO * INT8_UNIT * tl.sum(query.to(tl.float32), axis=1)
    else:
        start = tl.zeros((query.shape[0],), tl.float32)
    return start


@triton.jit
def capped(scores, scale, softcap, FORMAT: tl.constexpr, CAPPED: tl.constexpr):
    """Scores as products give them -> softmax's exponents, to base 2."""
    unit = scale / INT8_UNIT if FORMAT == "INT8" else scale
    if CAPPED:
        # c · tanh x = c · (2σ(2x) − 1)
        scores = softcap * LOG2E * (2.0 * tl.sigmoid(scores * (2.0 * unit / softcap)) - 1.0)
    else:
        scores *= unit * LOG2E
    return scores


@triton.jit
def mean(out, total, FORMAT: tl.constexpr, SHARING: tl.constexpr):
    """Weighted sums of tiles of values `[R, channels]` over their weights' sum `[R]`, by ascending channel."""
    if FORMAT == "INT8":
        out = out / (total * INT8_UNIT)[:, None] - INT8_ZERO
    else:
        out /= total[:, None]
    return from_tile(out, FORMAT, SHARING)


@triton.jit(do_not_specialize=["window", "table_width"])
def paged_attention_kernel(
    q, k_cache, v_cache, k_scale, block_table, seq_lens, partial, log_sum, scale, softcap, window, table_width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    DIM_BLOCK: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, CAPPED: tl.constexpr,
    FORMAT: tl.constexpr, SHARING: tl.constexpr,
):  # fmt: skip
    """Programs (KV head and some of its query heads, share of the splits, sequence): each split apart."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    TYPE: tl.constexpr = tl.bfloat16 if FORMAT == "BF16" else tl.float16
    kv_head = tl.program_id(0) // TILES
    sequence = tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + sequence)
    first, each, splits = _splits(length, window, TILE, SPLIT, MOST_SPLITS)
    table = block_table + sequence * table_width
    # 0x00FF00FF, but not as a constant: an instruction holds one, and the other would be made anew for each.
    keep = tl.where(length < 0, 0, 0x00FF00FF)

    row = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, DIM_BLOCK)
    head = sequence * HEADS + kv_head * GROUP + row
    used = (row < GROUP)[:, None] & (channel < HEAD_DIM)[None, :]
    query = tl.load(q + head[:, None] * HEAD_DIM + channel[None, :], mask=used, other=0.0)
    query = folded_query(query, k_scale, kv_head, channel, HEAD_DIM, FORMAT, SHARING, TYPE)
    start = tl.broadcast_to(score_start(query, FORMAT)[:, None], (ROWS, TILE))

    for split in range(tl.program_id(1), splits, tl.num_programs(1)):
        begin = first + split * each
        end = tl.minimum(begin + each, length)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        out = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
        key = begin + tl.arange(0, TILE)
        seen = (key < end) & (key >= length - window)
        cell = find_cells(table, kv_head, key, seen, KV_HEADS, PAGE)
        k, k_levels = load_cells(k_cache, cell, seen, FORMAT, HEAD_DIM, SHARING, DIM_BLOCK)
        v, v_levels = load_cells(v_cache, cell, seen, FORMAT, HEAD_DIM, SHARING, DIM_BLOCK)
        for _ in range(begin, end, TILE):
            # The next keys are fetched as soon as these are used, and so are the values.
            key += TILE
            later = key < end
            cell = find_cells(table, kv_head, key, later, KV_HEADS, PAGE)
            keys = tile(k, k_levels, keep, FORMAT, SHARING, TYPE)
            scores = tl.dot(query, tl.trans(keys), start)
            k, k_levels = load_cells(k_cache, cell, later, FORMAT, HEAD_DIM, SHARING, DIM_BLOCK)
            scores = capped(scores, scale, softcap, FORMAT, CAPPED)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            weight = tl.exp2(scores - higher[:, None])
            fade = tl.exp2(top - higher)
            weight = weight.to(TYPE)
            total = total * fade + tl.sum(weight.to(tl.float32), axis=1)
            values = tile(v, v_levels, keep, FORMAT, SHARING, TYPE)
            out = tl.dot(weight, values, out * fade[:, None])
            v, v_levels = load_cells(v_cache, cell, later, FORMAT, HEAD_DIM, SHARING, DIM_BLOCK)
            top = higher
            seen = later
        place = head * MOST_SPLITS + split
        tl.store(partial + place[:, None] * HEAD_DIM + channel[None, :], mean(out, total, FORMAT, SHARING), mask=used)
        tl.store(log_sum + place, top + tl.log2(total), mask=row < GROUP)


@triton.jit(do_not_specialize=["window"])
def paged_attention_reduce_kernel(
    partial, log_sum, v_scale, seq_lens, out, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr,
):  # fmt: skip
    """Programs (query head, sequence): the splits' outputs, each with its share of the whole sum."""
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    _, _, splits = _splits(tl.load(seq_lens + sequence), window, TILE, SPLIT, MOST_SPLITS)
    channel = tl.arange(0, DIM_BLOCK)
    real = channel < HEAD_DIM
    split = tl.arange(0, MOST_SPLITS)
    place = (sequence * HEADS + head) * MOST_SPLITS + split
    share = tl.load(log_sum + place, mask=split < splits, other=float("-inf"))
    # A padding row has no splits and no maximum: the bound keeps its weights zero instead of NaN.
    weight = tl.exp2(share - tl.maximum(tl.max(share, axis=0), -3.0e38))
    total = tl.sum(weight, axis=0)
    at = partial + place[:, None] * HEAD_DIM + channel[None, :]
    part = tl.load(at, mask=(split < splits)[:, None] & real[None, :], other=0.0)
    result = tl.sum(part * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    if v_scale is not None:
        result *= tl.load(v_scale + head // (HEADS // KV_HEADS) * HEAD_DIM + channel, mask=real, other=0.0)
    at = out + (sequence * HEADS + head) * HEAD_DIM + channel
    tl.store(at, result.to(out.dtype.element_ty), mask=real)


def workspace(sequences: int, num_heads: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the two kernels hand over: float32 partial outputs `[B, Hq, splits, D]`, log-sum-exps `[B, Hq, splits]`."""
    shape = (sequences, num_heads, MOST_SPLITS)
    return torch.empty(*shape, head_dim, device=device), torch.empty(shape, device=device)


def checked_out(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cache_format: str,
    out: Tensor | None,
) -> Tensor:
    """Where attention's result `[T, Hq·D]` goes: `out`, or a new one like q. ValueError where operands do not fit."""
    refused = unfit(num_heads, num_kv_heads, head_dim) or kv_cells.unknown(cache_format, head_dim)
    if refused:
        raise ValueError(refused)
    out = torch.empty_like(q) if out is None else out
    for name, tensor in (("q", q), ("out", out)):
        expect(name, tensor, (q.shape[0], num_heads * head_dim), FLOATS)
    for name, cache, scales in (("k", k_cache, k_scale), ("v", v_cache, v_scale)):
        expect_cache(name, cache, scales, num_kv_heads, k_cache.shape[2], head_dim, cache_format)
    expect_reachable(k_cache)
    return out


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cache_format: str,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    parts: tuple[Tensor, Tensor] | None = None,
    programs: int | None = None,
) -> Tensor:
    """softmax(q·kᵀ·scale)·v of each sequence's newest token, whose key and value are in the cache already.

    q: float16, bfloat16 or float32 `[B, Hq·D]`; caches: `[num_blocks, Hkv, block_size, cell]` in `cache_format`, one of
    `kv_cells.POINTERS`; k_scale, v_scale: float32 `[Hkv, D]` for a quantized format, else None; block_table: int32
    `[B, M]`; seq_lens: int32 `[B]`, the new token included; a sequence of length 0 (padding) gets zeros. window and
    softcap as in `ops.paged_attention`. D ≤ 256, a multiple of 4, of 8 for INT4. parts: a `workspace` to use; programs:
    how many share a sequence's splits, which changes no bit.
    Returns `[B, Hq·D]` in the type of q (written to `out` where given). Block
    tables and lengths are trusted, since the host does not see them. Raises ValueError for other shapes or types.
    """
    sequences, block_size = q.shape[0], k_cache.shape[2]
    out = checked_out(q, k_cache, v_cache, k_scale, v_scale, num_heads, num_kv_heads, head_dim, cache_format, out)
    expect("block_table", block_table, (sequences, None), (torch.int32,))
    expect("seq_lens", seq_lens, (sequences,), (torch.int32,))
    partial, log_sum = workspace(sequences, num_heads, head_dim, q.device) if parts is None else parts
    expect("parts[0]", partial, (sequences, num_heads, MOST_SPLITS, head_dim), (torch.float32,))
    expect("parts[1]", log_sum, (sequences, num_heads, MOST_SPLITS), (torch.float32,))
    if not sequences:
        return out
    shared = _shared(num_heads, num_kv_heads, head_dim, cache_format)
    seen = NO_WINDOW if window is None else window
    tiles = _tiles(num_heads, num_kv_heads)
    paged_attention_kernel[(tiles, programs or _programs(tiles, sequences), sequences)](
        q, k_cache, v_cache, k_scale, block_table, seq_lens, partial, log_sum, scale, softcap or 1.0, seen,
        block_table.shape[1], **shared, PAGE=block_size, ROWS=ROWS, CAPPED=softcap is not None,
        **kv_cells.constants(cache_format, head_dim), num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    paged_attention_reduce_kernel[(num_heads, sequences)](
        partial, log_sum, v_scale, seq_lens, out, seen, **shared, num_warps=WARPS
    )
    return out


def expect_reachable(cache: Tensor) -> None:
    """Raise ValueError unless offsets of 32 bits reach every word of a cache."""
    if cache.nbytes > 4 * MOST_WORDS:
        raise ValueError(f"a cache of {list(cache.shape)} is larger than the 8 GiB that the kernel's offsets reach")


def unfit(num_heads: int, num_kv_heads: int, head_dim: int) -> str | None:
    """Why no attention kernel serves these heads, or None."""
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly"
    if head_dim > WIDEST_HEAD:
        return f"heads of {head_dim} channels are wider than the kernel's {WIDEST_HEAD}"
    if head_dim % 4:
        return f"heads of {head_dim} channels: the cache is read in words of four codes"
    return None


def _tiles(num_heads: int, num_kv_heads: int) -> int:
    return num_kv_heads * triton.cdiv(num_heads // num_kv_heads, ROWS)


def _programs(tiles: int, sequences: int) -> int:
    return min(MOST_SPLITS, triton.cdiv(PROGRAMS, tiles * sequences))


def _shared(num_heads: int, num_kv_heads: int, head_dim: int, cache_format: str) -> dict[str, int]:
    """Constants of both kernels, which must agree about what a split is."""
    width = max(32, triton.next_power_of_2(head_dim))
    element_bytes = CACHE_FORMATS[cache_format].itemsize
    return {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": width,
        "TILE": min(64, max(16, TILE_BYTES // (width * element_bytes))),
        "SPLIT": SPLIT,
        "MOST_SPLITS": MOST_SPLITS,
    }


def _refusal(facts: Facts) -> str | None:
    return unfit(*_sizes(facts)) or kv_cells.refusal(facts)


def _sizes(facts: Facts) -> tuple[int, int, int]:
    return int(facts["num_heads"]), int(facts["num_kv_heads"]), int(facts["head_dim"])


def _shared_of(facts: Facts) -> dict[str, int]:
    return _shared(*_sizes(facts), str(facts["cache"]))


def _signature(facts: Facts) -> Signature:
    activation, cache = f"*{facts['dtype']}", kv_cells.POINTERS[str(facts["cache"])]
    arguments: dict[str, str | int | float] = {
        "q": activation, "k_cache": cache, "v_cache": cache, "block_table": "*i32", "seq_lens": "*i32",
        "partial": "*fp32", "log_sum": "*fp32",
        "scale": float(facts["scale"]), "softcap": float(facts["softcap"]) or 1.0,
        "window": NO_WINDOW, "table_width": NO_WINDOW,
    }  # fmt: skip
    constants: dict[str, int | str | bool | None] = {
        **_shared_of(facts),
        **kv_cells.constants(str(facts["cache"]), int(facts["head_dim"])),
        "PAGE": int(facts["block_size"]),
        "ROWS": ROWS,
        "CAPPED": bool(facts["softcap"]),
    }
    _scale("k_scale", facts, arguments, constants)
    return Signature(arguments, constants, num_warps=WARPS, num_stages=1)


def _reduce_signature(facts: Facts) -> Signature:
    arguments: dict[str, str | int | float] = {
        "partial": "*fp32", "log_sum": "*fp32", "seq_lens": "*i32", "out": f"*{facts['dtype']}", "window": NO_WINDOW,
    }  # fmt: skip
    constants: dict[str, int | str | bool | None] = {**_shared_of(facts)}
    _scale("v_scale", facts, arguments, constants)
    return Signature(arguments, constants, num_warps=WARPS)


def _scale(name: str, facts: Facts, arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    if CACHE_FORMATS[str(facts["cache"])].scaled:
        arguments[name] = "*fp32"
    else:
        constants[name] = None


def _grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    tiles = _tiles(*(int(str(signature.constants[name])) for name in ("HEADS", "KV_HEADS")))
    return (tiles, _programs(tiles, sizes["sequences"]), sizes["sequences"])


def _reduce_grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return (int(str(signature.constants["HEADS"])), sizes["sequences"], 1)


DECODE = ("decode",)
SPECS = (
    KernelSpec("paged_attention", "paged_attention", paged_attention_kernel, _refusal, _signature, _grid, 0, DECODE),
    KernelSpec(
        "paged_attention_reduce", "paged_attention", paged_attention_reduce_kernel, _refusal, _reduce_signature,
        _reduce_grid, 1, DECODE,
    ),
)  # fmt: skip
