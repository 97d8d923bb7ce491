"""Between the qkv projection and attention, in one launch: q/k norm, RoPE, and k and v into the paged cache.

    x ← x · rsqrt(mean(x²) + eps) · (norm + offset)                                 where the model norms q or k
    (a, b) ← (a·cos − b·sin, b·cos + a·sin)      channel i with i + rd/2, the rest pass    (Su et al. 2021, eq. 34)
    cells ← x as the cache's format stores it                                                        (`kv_cells`)

One program a token and a few heads of one kind (q, k or v), so that kinds never diverge inside a program. Slot −1
leaves the cache alone; q is written for every token. All arithmetic in FP32, each result rounded once.
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
from quantkit_kernels.triton.kv_cells import store_cells
from quantkit_kernels.triton.operands import FLOATS, expect, expect_cache
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

HEADS_A_PROGRAM = 8
WIDEST_HEAD = 256


@triton.jit
def _normed_rotated(
    source, norm, cos, sin, head, head_fits, channel, eps, offset, HEAD_DIM: tl.constexpr, HALF: tl.constexpr
):
    """float32 `[heads, channels]`: heads `head` `[heads, 1]` of `source`, normed where `norm` is given, and rotated."""
    real = channel < HEAD_DIM
    turns = channel < 2 * HALF
    first = channel < HALF
    partner = tl.where(first, channel + HALF, channel - HALF)
    at = source + head * HEAD_DIM
    value = tl.load(at + channel, mask=head_fits & real, other=0.0).to(tl.float32)
    other = tl.load(at + partner, mask=head_fits & turns, other=0.0).to(tl.float32)
    if norm is not None:
        inverse = tl.rsqrt(tl.sum(value * value, axis=1) / HEAD_DIM + eps)[:, None]
        value = value * inverse * (tl.load(norm + channel, mask=real, other=0.0) + offset)
        other = other * inverse * (tl.load(norm + partner, mask=turns, other=0.0) + offset)
    angle = tl.where(first, channel, partner)
    cosine = tl.load(cos + angle, mask=turns, other=1.0)
    sine = tl.load(sin + angle, mask=turns, other=0.0)
    return value * cosine + other * tl.where(first, -sine, sine)


@triton.jit
def qk_norm_rope_kv_write_kernel(
    qkv, positions, slot_mapping, cos, sin, q_norm, k_norm, k_scale, v_scale, k_cache, v_cache, q_out, eps, offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, CELL: tl.constexpr, FORMAT: tl.constexpr,
    SHARING: tl.constexpr,
):  # fmt: skip
    """Programs (token, HEAD_BLOCK heads of q, then of k, then of v)."""
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    Q_CHUNKS: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    KV_CHUNKS: tl.constexpr = (KV_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    lane = tl.arange(0, HEAD_BLOCK)[:, None]
    channel = tl.arange(0, DIM_BLOCK)[None, :]
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    angles = tl.load(positions + token).to(tl.int64) * HALF
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if chunk < Q_CHUNKS:
        head = chunk * HEAD_BLOCK + lane
        fits = head < HEADS
        value = _normed_rotated(
            row, q_norm, cos + angles, sin + angles, head, fits, channel, eps, offset, HEAD_DIM, HALF
        )
        at = q_out + token * (HEADS * HEAD_DIM) + head * HEAD_DIM + channel
        tl.store(at, value.to(q_out.dtype.element_ty), mask=fits & (channel < HEAD_DIM))
    elif slot >= 0:
        page = (slot // PAGE) * (KV_HEADS * PAGE * CELL) + (slot % PAGE) * CELL
        kv_chunk = chunk - Q_CHUNKS
        is_key = kv_chunk < KV_CHUNKS
        head = tl.where(is_key, kv_chunk, kv_chunk - KV_CHUNKS) * HEAD_BLOCK + lane
        head_fits = head < KV_HEADS
        fits = head_fits & (channel < HEAD_DIM)
        cells = page + head * (PAGE * CELL)
        if is_key:
            keys = row + HEADS * HEAD_DIM
            value = _normed_rotated(
                keys, k_norm, cos + angles, sin + angles, head, head_fits, channel, eps, offset, HEAD_DIM, HALF
            )
            store_cells(k_cache + cells, value, k_scale, head, channel, fits, FORMAT, HEAD_DIM, SHARING)
        else:
            values = row + (HEADS + KV_HEADS) * HEAD_DIM
            value = tl.load(values + head * HEAD_DIM + channel, mask=fits, other=0.0).to(tl.float32)
            store_cells(v_cache + cells, value, v_scale, head, channel, fits, FORMAT, HEAD_DIM, SHARING)


def qk_norm_rope_kv_write(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cache_format: str,
    q: Tensor | None = None,
) -> Tensor:
    """Split qkv, norm q and k by head where a weight is given, rotate both, write k and v; return q.

    qkv: float16, bfloat16 or float32 `[T, (Hq + 2·Hkv)·D]`, heads in the order q, k, v, D ≤ 256; positions,
    slot_mapping: int32 `[T]`; cos, sin: float32 `[P, rd/2]`; q_norm, k_norm: float32 `[D]` or None; caches:
    `[num_blocks, Hkv, block_size, cell]` in `cache_format`, one of `kv_cells.POINTERS`; scales: float32 `[Hkv, D]` for
    a quantized format, else None.
    Returns `[T, Hq·D]` in the type of qkv (written to `q` where given). Positions and slots are trusted, since the host
    does not see them. Raises ValueError for other shapes or types.
    """
    tokens, block_size = qkv.shape[0], k_cache.shape[2]
    refused = _unfit(head_dim) or kv_cells.unknown(cache_format, head_dim)
    if refused:
        raise ValueError(refused)
    constants = _constants(cache_format, num_heads, num_kv_heads, head_dim, 2 * cos.shape[-1], block_size)
    q = qkv.new_empty(tokens, num_heads * head_dim) if q is None else q
    expect("qkv", qkv, (tokens, (num_heads + 2 * num_kv_heads) * head_dim), FLOATS)
    expect("q", q, (tokens, num_heads * head_dim), FLOATS)
    for name, index in (("positions", positions), ("slot_mapping", slot_mapping)):
        expect(name, index, (tokens,), (torch.int32,))
    for name, table in (("cos", cos), ("sin", sin)):
        expect(name, table, (None, cos.shape[-1]), (torch.float32,))
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            expect(name, norm, (head_dim,), (torch.float32,))
    for name, cache, scale in (("k", k_cache, k_scale), ("v", v_cache, v_scale)):
        expect_cache(name, cache, scale, num_kv_heads, block_size, head_dim, cache_format)
    if tokens:
        qk_norm_rope_kv_write_kernel[(tokens, _chunks(constants))](
            qkv, positions, slot_mapping, cos, sin, q_norm, k_norm, k_scale, v_scale, k_cache, v_cache, q, eps, offset,
            **constants, num_warps=_warps(head_dim),
        )  # fmt: skip
    return q


def _constants(
    cache_format: str, num_heads: int, num_kv_heads: int, head_dim: int, rotary: int, block_size: int
) -> dict[str, Any]:
    return {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": rotary // 2,
        "PAGE": block_size,
        "HEAD_BLOCK": HEADS_A_PROGRAM,
        "DIM_BLOCK": triton.next_power_of_2(head_dim),
        "CELL": CACHE_FORMATS[cache_format].cell(head_dim),
        **kv_cells.constants(cache_format, head_dim),
    }


def _chunks(constants: Mapping[str, Any]) -> int:
    return triton.cdiv(constants["HEADS"], HEADS_A_PROGRAM) + 2 * triton.cdiv(constants["KV_HEADS"], HEADS_A_PROGRAM)


def _warps(head_dim: int) -> int:
    """Eight channels a thread: one 16-byte load of FP16 where the head is not split for rotation."""
    return max(1, triton.next_power_of_2(head_dim) * HEADS_A_PROGRAM // 256)


def _unfit(head_dim: int) -> str | None:
    if head_dim > WIDEST_HEAD:
        return f"heads of {head_dim} channels are wider than the kernel's {WIDEST_HEAD}"
    return None


def _refusal(facts: Facts) -> str | None:
    return _unfit(int(facts["head_dim"])) or kv_cells.refusal(facts)


def _signature(facts: Facts) -> Signature:
    activation, cache = f"*{facts['dtype']}", kv_cells.POINTERS[str(facts["cache"])]
    arguments: dict[str, str | float] = {
        "qkv": activation, "positions": "*i32", "slot_mapping": "*i32", "cos": "*fp32", "sin": "*fp32",
        "k_cache": cache, "v_cache": cache, "q_out": activation,
        "eps": float(facts["eps"]), "offset": float(facts["offset"]),
    }  # fmt: skip
    names = ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size")
    constants = _constants(str(facts["cache"]), *(int(facts[name]) for name in names))
    scaled = CACHE_FORMATS[str(facts["cache"])].scaled
    optional = {
        "q_norm": facts["qk_norm"],
        "k_norm": facts["qk_norm"],
        "k_scale": scaled,
        "v_scale": scaled,
    }
    for name, present in optional.items():
        if present:
            arguments[name] = "*fp32"
        else:
            constants[name] = None
    return Signature(arguments, constants, num_warps=_warps(int(facts["head_dim"])))


def _grid(signature: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    return (sizes["rows"], _chunks(signature.constants), 1)


SPECS = (
    KernelSpec(
        "qk_norm_rope_kv_write", "qk_norm_rope_kv_write", qk_norm_rope_kv_write_kernel, _refusal, _signature, _grid
    ),
)
