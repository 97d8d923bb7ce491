"""Write keys and values of new tokens into the paged cache, quantizing where it is int8."""

from __future__ import annotations

import torch
from torch import Tensor


def _stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x `[T, Hkv, D]` as the cache stores it: int8 by the static scale `[Hkv, D]`, else a cast."""
    if dtype != torch.int8:
        return x.to(dtype)
    if scale is None:
        raise ValueError("an int8 KV cache needs k_scale and v_scale, float32 [num_kv_heads, head_dim]")
    return torch.clamp(torch.round(x / scale), -127, 127).to(torch.int8)


def reference(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Store token t at slot `slot_mapping[t]` (block · block_size + offset), in place; slot -1 is skipped.

    Gradients flow from a float cache to k and v: give a fresh cache to every graph.

    k, v: float32 `[T, Hkv, D]`; caches: `[num_blocks, Hkv, block_size, D]`, int8, float16, bfloat16 or float32;
    scales: float32 `[Hkv, D]` for int8 (stored = clamp(round_half_even(x / scale), -127, 127)), else None.
    """
    block_size = k_cache.shape[2]
    live = slot_mapping >= 0
    slots = slot_mapping[live].long()
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, offset] = _stored(k[live], k_scale, k_cache.dtype)
    v_cache[block, :, offset] = _stored(v[live], v_scale, v_cache.dtype)
