"""Causal attention of a step's new tokens over the paged key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.cache_formats import CACHE_FORMATS
from quantkit_kernels.ops import kv_cells
from quantkit_kernels.ops.linear import codes_of

CODE_TOP = 16256.0
"""Over an int8 cache q, its scales folded in, and a tile's weights are integers of 15 bits: 127 · 128 at most."""
TILE = 64
"""Positions whose weights share a scale: their own largest is CODE_TOP. Tiles lie at multiples of it."""


def _tile_weights(scores: Tensor) -> Tensor:
    """softmax of `[..., L]` with the weights of each tile rounded to CODE_TOP parts of the tile's largest."""
    length = scores.shape[-1]
    padded = torch.nn.functional.pad(scores, (0, -length % TILE), value=float("-inf"))
    tiles = padded.unflatten(-1, (-1, TILE))
    top = tiles.amax(-1, keepdim=True)
    held = torch.where(top == float("-inf"), 0.0, tiles - torch.where(top == float("-inf"), 0.0, top)).exp()
    codes = torch.where(top == float("-inf"), 0.0, (held * CODE_TOP).round())
    weights = codes.double() * (top - top.amax(-2, keepdim=True)).double().exp()
    weights = weights.flatten(-2)[..., :length]
    return (weights / weights.sum(-1, keepdim=True)).to(torch.float32)


def _gather(cache: Tensor, blocks: Tensor, length: int, cache_format: str, head_dim: int) -> Tensor:
    """The first `length` positions of a sequence from its blocks, without their scales: float32 `[Hkv, length, D]`."""
    pages = cache[blocks.long()]
    cells = pages.transpose(0, 1).reshape(cache.shape[1], -1, cache.shape[3])[:, :length]
    return kv_cells.load(cells, cache_format, head_dim)


def reference(
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
) -> Tensor:
    """softmax(q·kᵀ·scale)·v for each sequence's newest tokens, reading k and v from the cache only.

    Over an INT8 cache q·k_scale·scale is taken in integers of 15 bits (`linear.codes_of`), as are the weights of a tile
    of TILE positions, and both are multiplied with the cache's codes. Every other format is read as floats.

    q: float32 `[T, Hq·D]`; caches: `[num_blocks, Hkv, block_size, cell]` in `cache_format`; k_scale, v_scale: float32
    `[Hkv, D]` for a quantized format, else None;
    block_table: int32 `[B, M]`; query_start_loc: int32 `[B + 1]`; seq_lens: int32 `[B]`, new tokens included.
    Sequence b's queries are its last `query_start_loc[b+1] - query_start_loc[b]` positions. A position p sees
    0..p, with a window w only p-w+1..p. softcap c: scores become c·tanh(scores / c). Query head h reads
    KV head h // (Hq / Hkv). Returns float32 `[T, Hq·D]`; tokens of no sequence are zero.
    """
    block_size = k_cache.shape[2]
    in_integers = CACHE_FORMATS[cache_format].in_integers
    group = num_heads // num_kv_heads
    starts = query_start_loc.tolist()
    pieces: list[Tensor] = []
    for b, length in enumerate(seq_lens.tolist()):
        count = starts[b + 1] - starts[b]
        if count == 0:
            continue
        blocks = block_table[b, : -(-length // block_size)]
        k, v = (_gather(cache, blocks, length, cache_format, head_dim) for cache in (k_cache, v_cache))
        rows = q[starts[b] : starts[b + 1]].view(count, num_kv_heads, group, head_dim) * scale
        if k_scale is not None:
            rows = rows * k_scale.view(1, num_kv_heads, 1, head_dim)
        if not in_integers:
            scores = torch.einsum("thgd,hld->hgtl", rows, k)
        else:
            codes, unit = codes_of(rows, CODE_TOP)
            dots = torch.einsum("thgd,hld->hgtl", codes.double(), k.double()).to(torch.float32)
            scores = dots * unit.permute(1, 2, 0, 3)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        key = torch.arange(length, device=q.device)
        query = torch.arange(length - count, length, device=q.device).unsqueeze(1)
        hidden = key > query
        if window is not None:
            hidden = hidden | (key <= query - window)
        scores = scores.masked_fill(hidden, float("-inf"))
        weights = _tile_weights(scores) if in_integers else torch.softmax(scores, dim=-1)
        sums = torch.einsum("hgtl,hld->thgd", weights, v)
        if v_scale is not None:
            sums = sums * v_scale.view(1, num_kv_heads, 1, head_dim)
        pieces.append(sums.reshape(count, num_heads * head_dim))
    rest = q.shape[0] - sum(piece.shape[0] for piece in pieces)
    if rest:
        pieces.append(q.new_zeros(rest, num_heads * head_dim))
    return torch.cat(pieces)
