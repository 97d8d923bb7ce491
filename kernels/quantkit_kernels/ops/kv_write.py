"""Write keys and values of new tokens into the paged cache, quantizing them as its format says."""

from __future__ import annotations

from torch import Tensor

from quantkit_kernels.ops import kv_cells


def reference(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cache_format: str,
) -> None:
    """Store token t at slot `slot_mapping[t]` (block · block_size + offset), in place; slot -1 is skipped.

    Gradients flow from a float cache to k and v: give a fresh cache to every graph.

    k, v: float32 `[T, Hkv, D]`; caches: `[num_blocks, Hkv, block_size, cell]` in `cache_format`, a name of
    `cache_formats.CACHE_FORMATS`, as `kv_cells` stores it; scales: float32 `[Hkv, D]` for a quantized format, else
    None.
    """
    block_size = k_cache.shape[2]
    live = slot_mapping >= 0
    slots = slot_mapping[live].long()
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, offset] = kv_cells.store(k[live], k_scale, cache_format)
    v_cache[block, :, offset] = kv_cells.store(v[live], v_scale, cache_format)
