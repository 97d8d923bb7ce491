"""Decode attention over the paged cache: one query token a sequence, softmax(q·kᵀ·scale)·v, split along the keys.

    s_n = q · k_n · scale            with a softcap c: c · tanh(s_n / c)
    out = Σ_n exp(s_n − m) v_n / Σ_n exp(s_n − m),   m = max_n s_n       over the last `window` positions, or all

The heads that read one KV head are packed to 16 rows of one matrix product, so that a key or value is read once. The
softmax is online within a split (Milakov and Gimelshein 2018, alg. 3); `paged_attention_reduce` joins the splits by
their log-sum-exp (flash-decoding, Dao et al. 2023) in a fixed order.

Which keys form a split follows from the sequence's length alone and is decided on the device, so a launch captured once
stays right as sequences grow, and a sequence gets the same bits whatever runs beside it. The grid only says how many
programs share a sequence's splits: each takes every `programs`-th.

An INT8 cache holds codes of one static scale a head and channel (docs/decisions/0003): k's scale is folded into the
query once, v's into the output once. The bits of c + 128 are, as they stand, the subnormal FP16 number (c + 128)·2⁻²⁴,
which matrix instructions take like any other (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores"): one
logical operation makes a pair of operands. What 128 adds to a row's scores is taken off where their sum starts; what
it adds to the output is 128 itself, since the weights sum to the total that divides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit_kernels.triton.operands import CACHES, FLOATS, expect, expect_cache
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

SPLIT = 256
"""Keys of the smallest split. Splits of a long sequence grow, so that it has at most MOST_SPLITS."""
MOST_SPLITS = 32
PROGRAMS = 4096
"""About so many programs are launched where the splits allow: some waves of any GPU, so that early leavers even out."""
TILE_BYTES = 8192
"""Keys, and again values, that a program has on their way to it: 64 bytes a thread of its four warps."""
WARPS = 4
WIDEST_HEAD = 256
MOST_WORDS = 2**31 - 1
"""Words of 32 bits of one cache, 8 GiB: offsets in it are of 32 bits."""
ROWS = 16
"""Query heads of one program: the fewest rows of a matrix product."""
NO_WINDOW = 2**31 - 1
LOG2E = tl.constexpr(1.4426950408889634)
"""Scores carry it, for exp2 is the hardware's exponential."""
ZERO_CODE = tl.constexpr(128.0)
UNIT = tl.constexpr(2.0**-24)


@triton.jit
def _splits(length, window, TILE: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """The first tile's position, the keys of a split and the number of splits of a sequence."""
    first = tl.maximum(length - window, 0) // TILE * TILE
    keys = length - first
    fair = tl.cdiv(tl.cdiv(keys, MOST_SPLITS), TILE) * TILE
    each = tl.maximum(fair, SPLIT)
    return first, each, tl.cdiv(keys, each)


@triton.jit
def _pairs(words, TYPE: tl.constexpr):
    """int32 words `[T, W]` -> the two numbers of 16 bits in each, `[T, 2·W]`."""
    low = (words & 0xFFFF).to(tl.uint16).to(TYPE, bitcast=True)
    high = (words >> 16).to(tl.uint16).to(TYPE, bitcast=True)
    return tl.join(low, high).reshape(words.shape[0], 2 * words.shape[1])


@triton.jit
def _codes(words, keep, SHIFT: tl.constexpr):
    """Words of four INT8 codes -> (code + ZERO_CODE) · UNIT, float16 `[T, 2·W]`, of bytes SHIFT/8 and SHIFT/8 + 2."""
    return _pairs(((words >> SHIFT) & keep) ^ 0x00800080, tl.float16)


@triton.jit
def _cells(table, kv_head, key, seen, lane, LANES: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr):
    """Offsets `[T, lanes]` of the words of positions `key` in the caches, and which of them hold something seen."""
    page = tl.load(table + key // PAGE, mask=seen, other=0)
    at = ((page * KV_HEADS + kv_head) * PAGE + key % PAGE)[:, None] * LANES + lane[None, :]
    return at, seen[:, None] & (lane < LANES)[None, :]


@triton.jit(do_not_specialize=["window", "table_width"])
def paged_attention_kernel(
    q, k_cache, v_cache, k_scale, block_table, seq_lens, partial, log_sum, scale, softcap, window, table_width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    DIM_BLOCK: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Programs (KV head and some of its query heads, share of the splits, sequence): each split apart."""
    CODES: tl.constexpr = k_scale is not None
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    # The cache is read as words of 32 bits. A word of codes gives its even and its odd channels two at a time, and the
    # two kinds go through products of their own.
    PLANES: tl.constexpr = 2 if CODES else 1
    LANES: tl.constexpr = HEAD_DIM // 4 if CODES else HEAD_DIM // 2
    LANE_BLOCK: tl.constexpr = DIM_BLOCK // 4 if CODES else DIM_BLOCK // 2
    TYPE: tl.constexpr = tl.float16 if CODES else k_cache.dtype.element_ty
    # Codes need no zeros where nothing is loaded: whatever the bits, they are finite, and their weight is zero.
    UNSEEN: tl.constexpr = None if CODES else 0
    kv_head = tl.program_id(0) // TILES
    sequence = tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + sequence)
    first, each, splits = _splits(length, window, TILE, SPLIT, MOST_SPLITS)
    table = block_table + sequence * table_width
    k_words = k_cache.to(tl.pointer_type(tl.int32))
    v_words = v_cache.to(tl.pointer_type(tl.int32))
    # 0x00FF00FF, but not as a constant: an instruction holds one, and the other would be made anew for each.
    keep = tl.where(length < 0, 0, 0x00FF00FF)

    row = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANE_BLOCK)
    channel = tl.arange(0, DIM_BLOCK // PLANES) * PLANES
    head = sequence * HEADS + kv_head * GROUP + row
    used = (row < GROUP)[:, None] & (channel < HEAD_DIM)[None, :]
    q_at = q + head[:, None] * HEAD_DIM + channel[None, :]
    query = tl.load(q_at, mask=used, other=0.0)
    if CODES:
        scale_at = k_scale + kv_head * HEAD_DIM + channel
        fold = tl.load(scale_at, mask=channel < HEAD_DIM, other=0.0)[None, :]
        odd_fold = tl.load(scale_at + 1, mask=channel < HEAD_DIM, other=0.0)[None, :]
        odd_query = (tl.load(q_at + 1, mask=used, other=0.0).to(tl.float32) * odd_fold).to(tl.float16)
        query = (query.to(tl.float32) * fold).to(tl.float16)
        score_unit = scale / UNIT
        bias = -ZERO_CODE * UNIT * (tl.sum(query.to(tl.float32), axis=1) + tl.sum(odd_query.to(tl.float32), axis=1))
    else:
        query = query.to(TYPE)
        score_unit = scale

    for split in range(tl.program_id(1), splits, tl.num_programs(1)):
        begin = first + split * each
        end = tl.minimum(begin + each, length)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        out = tl.zeros((ROWS, DIM_BLOCK // PLANES), tl.float32)
        odd_out = tl.zeros((ROWS, DIM_BLOCK // PLANES), tl.float32)
        key = begin + tl.arange(0, TILE)
        seen = (key < end) & (key >= length - window)
        at, fits = _cells(table, kv_head, key, seen, lane, LANES, KV_HEADS, PAGE)
        k = tl.load(k_words + at, mask=fits, other=UNSEEN)
        v = tl.load(v_words + at, mask=fits, other=UNSEEN)
        for _ in range(begin, end, TILE):
            # The next keys are fetched as soon as these are used, and so are the values.
            key += TILE
            later = key < end
            at, fits = _cells(table, kv_head, key, later, lane, LANES, KV_HEADS, PAGE)
            if CODES:
                scores = tl.dot(query, tl.trans(_codes(k, keep, 0)), tl.broadcast_to(bias[:, None], (ROWS, TILE)))
                scores = tl.dot(odd_query, tl.trans(_codes(k, keep, 8)), scores)
            else:
                scores = tl.dot(query, tl.trans(_pairs(k, TYPE)))
            k = tl.load(k_words + at, mask=fits, other=UNSEEN)
            if CAPPED:
                # c · tanh x = c · (2σ(2x) − 1)
                scores = softcap * LOG2E * (2.0 * tl.sigmoid(scores * (2.0 * score_unit / softcap)) - 1.0)
            else:
                scores *= score_unit * LOG2E
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            weight = tl.exp2(scores - higher[:, None])
            fade = tl.exp2(top - higher)
            weight = weight.to(TYPE)
            total = total * fade + tl.sum(weight.to(tl.float32), axis=1)
            if CODES:
                out = tl.dot(weight, _codes(v, keep, 0), out * fade[:, None])
                odd_out = tl.dot(weight, _codes(v, keep, 8), odd_out * fade[:, None])
            else:
                out = tl.dot(weight, _pairs(v, TYPE), out * fade[:, None])
            v = tl.load(v_words + at, mask=fits, other=UNSEEN)
            top = higher
            seen = later
        place = head * MOST_SPLITS + split
        out_at = partial + place[:, None] * HEAD_DIM + channel[None, :]
        if CODES:
            tl.store(out_at, out / (total * UNIT)[:, None] - ZERO_CODE, mask=used)
            tl.store(out_at + 1, odd_out / (total * UNIT)[:, None] - ZERO_CODE, mask=used)
        else:
            tl.store(out_at, out / total[:, None], mask=used)
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
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    parts: tuple[Tensor, Tensor] | None = None,
    programs: int | None = None,
) -> Tensor:
    """softmax(q·kᵀ·scale)·v of each sequence's newest token, whose key and value are in the cache already.

    q: float16, bfloat16 or float32 `[B, Hq·D]`; caches: `[num_blocks, Hkv, block_size, D]`, int8, float16 or bfloat16;
    k_scale, v_scale: float32 `[Hkv, D]` for int8, else None; block_table: int32 `[B, M]`; seq_lens: int32 `[B]`, the
    new token included; a sequence of length 0 (padding) gets zeros. window and softcap as in `ops.paged_attention`.
    D ≤ 256, a multiple of 4. parts: a `workspace` to use; programs: how many share a
    sequence's splits, which changes no bit. Returns `[B, Hq·D]` in the type of q (written to `out` where given). Block
    tables and lengths are trusted, since the host does not see them. Raises ValueError for other shapes or types.
    """
    sequences, block_size = q.shape[0], k_cache.shape[2]
    refused = _unfit(num_heads, num_kv_heads, head_dim)
    if refused:
        raise ValueError(refused)
    out = torch.empty_like(q) if out is None else out
    for name, tensor in (("q", q), ("out", out)):
        expect(name, tensor, (sequences, num_heads * head_dim), FLOATS)
    for name, cache, scales in (("k", k_cache, k_scale), ("v", v_cache, v_scale)):
        expect_cache(name, cache, scales, num_kv_heads, block_size, head_dim)
    if k_cache.numel() * k_cache.element_size() > 4 * MOST_WORDS:
        raise ValueError(f"k_cache {list(k_cache.shape)} is larger than the 8 GiB that the kernel's offsets reach")
    expect("block_table", block_table, (sequences, None), (torch.int32,))
    expect("seq_lens", seq_lens, (sequences,), (torch.int32,))
    partial, log_sum = workspace(sequences, num_heads, head_dim, q.device) if parts is None else parts
    expect("parts[0]", partial, (sequences, num_heads, MOST_SPLITS, head_dim), (torch.float32,))
    expect("parts[1]", log_sum, (sequences, num_heads, MOST_SPLITS), (torch.float32,))
    if not sequences:
        return out
    shared = _shared(num_heads, num_kv_heads, head_dim, k_cache.element_size())
    seen = NO_WINDOW if window is None else window
    tiles = _tiles(num_heads, num_kv_heads)
    paged_attention_kernel[(tiles, programs or _programs(tiles, sequences), sequences)](
        q, k_cache, v_cache, k_scale, block_table, seq_lens, partial, log_sum, scale, softcap or 1.0, seen,
        block_table.shape[1], **shared, PAGE=block_size, ROWS=ROWS, CAPPED=softcap is not None,
        num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    paged_attention_reduce_kernel[(num_heads, sequences)](
        partial, log_sum, v_scale, seq_lens, out, seen, **shared, num_warps=WARPS
    )
    return out


def _unfit(num_heads: int, num_kv_heads: int, head_dim: int) -> str | None:
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


def _shared(num_heads: int, num_kv_heads: int, head_dim: int, element_bytes: int) -> dict[str, int]:
    """Constants of both kernels, which must agree about what a split is."""
    width = max(32, triton.next_power_of_2(head_dim))
    return {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": width,
        "TILE": min(128, max(16, TILE_BYTES // (width * element_bytes))),
        "SPLIT": SPLIT,
        "MOST_SPLITS": MOST_SPLITS,
    }


def _refusal(facts: Facts) -> str | None:
    if facts.get("phase") == "prefill":
        return "the attention kernel decodes: one token a sequence"
    if facts["cache"] not in CACHES:
        return f"no kernel for a cache in {facts['cache']}: {', '.join(CACHES)} have"
    return _unfit(*_sizes(facts))


def _sizes(facts: Facts) -> tuple[int, int, int]:
    return int(facts["num_heads"]), int(facts["num_kv_heads"]), int(facts["head_dim"])


def _shared_of(facts: Facts) -> dict[str, int]:
    return _shared(*_sizes(facts), 1 if facts["cache"] == "INT8" else 2)


def _signature(facts: Facts) -> Signature:
    activation, cache = f"*{facts['dtype']}", f"*{CACHES[str(facts['cache'])]}"
    arguments: dict[str, str | int | float] = {
        "q": activation, "k_cache": cache, "v_cache": cache, "block_table": "*i32", "seq_lens": "*i32",
        "partial": "*fp32", "log_sum": "*fp32",
        "scale": float(facts["scale"]), "softcap": float(facts["softcap"]) or 1.0,
        "window": NO_WINDOW, "table_width": NO_WINDOW,
    }  # fmt: skip
    constants: dict[str, int | bool | None] = {
        **_shared_of(facts),
        "PAGE": int(facts["block_size"]),
        "ROWS": ROWS,
        "CAPPED": bool(facts["softcap"]),
    }
    _scale("k_scale", cache, arguments, constants)
    return Signature(arguments, constants, num_warps=WARPS, num_stages=1)


def _reduce_signature(facts: Facts) -> Signature:
    arguments: dict[str, str | int | float] = {
        "partial": "*fp32", "log_sum": "*fp32", "seq_lens": "*i32", "out": f"*{facts['dtype']}", "window": NO_WINDOW,
    }  # fmt: skip
    constants: dict[str, int | bool | None] = {**_shared_of(facts)}
    _scale("v_scale", f"*{CACHES[str(facts['cache'])]}", arguments, constants)
    return Signature(arguments, constants, num_warps=WARPS)


def _scale(name: str, cache: str, arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    if cache == "*i8":
        arguments[name] = "*fp32"
    else:
        constants[name] = None


def _grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    tiles = _tiles(*(int(str(signature.constants[name])) for name in ("HEADS", "KV_HEADS")))
    return (tiles, _programs(tiles, sizes["sequences"]), sizes["sequences"])


def _reduce_grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return (int(str(signature.constants["HEADS"])), sizes["sequences"], 1)


SPECS = (
    KernelSpec("paged_attention", "paged_attention", paged_attention_kernel, _refusal, _signature, _grid, launch=0),
    KernelSpec(
        "paged_attention_reduce", "paged_attention", paged_attention_reduce_kernel, _refusal, _reduce_signature,
        _reduce_grid, launch=1,
    ),
)  # fmt: skip
