"""What happens between the qkv projection and attention, in one op: q/k norm, rope, write of k and v to the cache."""

from __future__ import annotations

from torch import Tensor

from quantkit_kernels.ops import head_rms_norm, kv_write, rope


def reference(
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
) -> Tensor:
    """Split qkv, norm q and k by head where a weight is given, rotate both, write k and v; return q.

    qkv: float32 `[T, (Hq + 2·Hkv)·D]`, heads in the order q, k, v; positions, slot_mapping: int `[T]`;
    cos, sin: float32 `[P, rd/2]`; q_norm, k_norm: float32 `[D]` or None; caches, scales and cache_format as in
    `kv_write`.
    Returns float32 `[T, Hq·D]`.
    """
    tokens = qkv.shape[0]
    heads = qkv.view(tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None:
        q = head_rms_norm.reference(q, q_norm, eps, offset)
    if k_norm is not None:
        k = head_rms_norm.reference(k, k_norm, eps, offset)
    q = rope.reference(q, positions, cos, sin)
    k = rope.reference(k, positions, cos, sin)
    kv_write.reference(k, v, slot_mapping, k_cache, v_cache, k_scale, v_scale, cache_format)
    return q.reshape(tokens, num_heads * head_dim)
