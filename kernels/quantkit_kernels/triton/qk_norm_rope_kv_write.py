"""Between the qkv projection and attention, in one launch: q/k norm, RoPE, and k and v into the paged cache.

    x ← x · rsqrt(mean(x²) + eps) · (norm + offset)                                 where the model norms q or k
    (a, b) ← (a·cos − b·sin, b·cos + a·sin)      channel i with i + rd/2, the rest pass    (Su et al. 2021, eq. 34)
    code = round_half_even(clamp(x / scale, −127, 127))             INT8: one static scale a head and channel
    code = x as FP16 or BF16                                                                  float caches

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

from quantkit_kernels.triton.operands import CACHES, FLOATS, expect, expect_cache
from quantkit_kernels.triton.spec import Facts, KernelSpec, Signature

HEADS_A_PROGRAM = 8
WIDEST_HEAD = 256


@triton.jit
def _store(target, value, scale, channel, fits):
    """Store value `[heads, channels]` at `target`, as codes of `scale` where there is one."""
    if scale is not None:
        value = tl.div_rn(value, tl.load(scale + channel, mask=fits, other=1.0))
        # 1.5 · 2²³ leaves no bits for fractions: adding it rounds half to even.
        value = (tl.clamp(value, -127.0, 127.0) + 12582912.0) - 12582912.0
    tl.store(target + channel, value.to(target.dtype.element_ty), mask=fits)


@triton.jit
def _norm_rope_store(
    source, norm, scale, target, target_at, cos, sin, head, head_fits, eps, offset,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm and rotate heads `head` of `source`; store them at `target + target_at`, both `[heads, 1]` of offsets."""
    half = tl.arange(0, HALF_BLOCK)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    half_fits, rest_fits = half < HALF, rest < HEAD_DIM
    fits, passes = head_fits & half_fits, head_fits & rest_fits
    at = source + head * HEAD_DIM
    a = tl.load(at + half, mask=fits, other=0.0).to(tl.float32)
    b = tl.load(at + HALF + half, mask=fits, other=0.0).to(tl.float32)
    c = tl.load(at + rest, mask=passes, other=0.0).to(tl.float32)
    if norm is not None:
        square = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)
        inverse = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        a = a * inverse * (tl.load(norm + half, mask=half_fits, other=0.0) + offset)
        b = b * inverse * (tl.load(norm + HALF + half, mask=half_fits, other=0.0) + offset)
        c = c * inverse * (tl.load(norm + rest, mask=rest_fits, other=0.0) + offset)
    cosine = tl.load(cos + half, mask=half_fits, other=0.0)
    sine = tl.load(sin + half, mask=half_fits, other=0.0)
    scales = scale
    if scale is not None:
        scales = scale + head * HEAD_DIM
    _store(target + target_at, a * cosine - b * sine, scales, half, fits)
    _store(target + target_at, b * cosine + a * sine, scales, HALF + half, fits)
    if 2 * HALF < HEAD_DIM:
        _store(target + target_at, c, scales, rest, passes)


@triton.jit
def qk_norm_rope_kv_write_kernel(
    qkv, positions, slot_mapping, cos, sin, q_norm, k_norm, k_scale, v_scale, k_cache, v_cache, q_out, eps, offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs (token, HEAD_BLOCK heads of q, then of k, then of v)."""
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    Q_CHUNKS: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    KV_CHUNKS: tl.constexpr = (KV_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    lane = tl.arange(0, HEAD_BLOCK)[:, None]
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    position = tl.load(positions + token).to(tl.int64) * HALF
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if chunk < Q_CHUNKS:
        head = chunk * HEAD_BLOCK + lane
        _norm_rope_store(
            row, q_norm, None, q_out + token * (HEADS * HEAD_DIM), head * HEAD_DIM, cos + position, sin + position,
            head, head < HEADS, eps, offset, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    elif slot >= 0:
        page = (slot // PAGE) * (KV_HEADS * PAGE * HEAD_DIM) + (slot % PAGE) * HEAD_DIM
        if chunk < Q_CHUNKS + KV_CHUNKS:
            head = (chunk - Q_CHUNKS) * HEAD_BLOCK + lane
            _norm_rope_store(
                row + HEADS * HEAD_DIM, k_norm, k_scale, k_cache + page, head * (PAGE * HEAD_DIM), cos + position,
                sin + position, head, head < KV_HEADS, eps, offset, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK,
            )  # fmt: skip
        else:
            head = (chunk - Q_CHUNKS - KV_CHUNKS) * HEAD_BLOCK + lane
            channel = tl.arange(0, DIM_BLOCK)[None, :]
            fits = (head < KV_HEADS) & (channel < HEAD_DIM)
            source = row + (HEADS + KV_HEADS) * HEAD_DIM
            value = tl.load(source + head * HEAD_DIM + channel, mask=fits, other=0.0).to(tl.float32)
            scales = v_scale
            if v_scale is not None:
                scales = v_scale + head * HEAD_DIM
            _store(v_cache + page + head * (PAGE * HEAD_DIM), value, scales, channel, fits)


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
    q: Tensor | None = None,
) -> Tensor:
    """Split qkv, norm q and k by head where a weight is given, rotate both, write k and v; return q.

    qkv: float16, bfloat16 or float32 `[T, (Hq + 2·Hkv)·D]`, heads in the order q, k, v, D ≤ 256; positions,
    slot_mapping: int32 `[T]`; cos, sin: float32 `[P, rd/2]`; q_norm, k_norm: float32 `[D]` or None; caches:
    `[num_blocks, Hkv, block_size, D]`, int8, float16 or bfloat16; scales: float32 `[Hkv, D]` for int8, else None.
    Returns `[T, Hq·D]` in the type of qkv (written to `q` where given). Positions and slots are trusted, since the host
    does not see them. Raises ValueError for other shapes or types.
    """
    tokens, block_size = qkv.shape[0], k_cache.shape[2]
    constants = _constants(num_heads, num_kv_heads, head_dim, 2 * cos.shape[-1], block_size)
    q = qkv.new_empty(tokens, num_heads * head_dim) if q is None else q
    if head_dim > WIDEST_HEAD:
        raise ValueError(f"heads of {head_dim} channels are wider than the kernel's {WIDEST_HEAD}")
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
        expect_cache(name, cache, scale, num_kv_heads, block_size, head_dim)
    if tokens:
        qk_norm_rope_kv_write_kernel[(tokens, _chunks(constants))](
            qkv, positions, slot_mapping, cos, sin, q_norm, k_norm, k_scale, v_scale, k_cache, v_cache, q, eps, offset,
            **constants, num_warps=_warps(head_dim),
        )  # fmt: skip
    return q


def _constants(num_heads: int, num_kv_heads: int, head_dim: int, rotary: int, block_size: int) -> dict[str, int]:
    return {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": rotary // 2,
        "PAGE": block_size,
        "HEAD_BLOCK": HEADS_A_PROGRAM,
        "DIM_BLOCK": triton.next_power_of_2(head_dim),
        "HALF_BLOCK": triton.next_power_of_2(rotary // 2),
        "REST_BLOCK": triton.next_power_of_2(max(1, head_dim - rotary)),
    }


def _chunks(constants: Mapping[str, Any]) -> int:
    return triton.cdiv(constants["HEADS"], HEADS_A_PROGRAM) + 2 * triton.cdiv(constants["KV_HEADS"], HEADS_A_PROGRAM)


def _warps(head_dim: int) -> int:
    """Eight channels a thread: one 16-byte load of FP16 where the head is not split for rotation."""
    return max(1, triton.next_power_of_2(head_dim) * HEADS_A_PROGRAM // 256)


def _refusal(facts: Facts) -> str | None:
    if facts["cache"] not in CACHES:
        return f"no kernel for a cache in {facts['cache']}: {', '.join(CACHES)} have"
    if int(facts["head_dim"]) > WIDEST_HEAD:
        return f"heads of {facts['head_dim']} channels are wider than {WIDEST_HEAD}"
    return None


def _signature(facts: Facts) -> Signature:
    activation, cache = f"*{facts['dtype']}", f"*{CACHES[str(facts['cache'])]}"
    arguments: dict[str, str | float] = {
        "qkv": activation, "positions": "*i32", "slot_mapping": "*i32", "cos": "*fp32", "sin": "*fp32",
        "k_cache": cache, "v_cache": cache, "q_out": activation,
        "eps": float(facts["eps"]), "offset": float(facts["offset"]),
    }  # fmt: skip
    names = ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size")
    constants: dict[str, int | None] = dict(_constants(*(int(facts[name]) for name in names)))
    optional = {
        "q_norm": facts["qk_norm"],
        "k_norm": facts["qk_norm"],
        "k_scale": cache == "*i8",
        "v_scale": cache == "*i8",
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
