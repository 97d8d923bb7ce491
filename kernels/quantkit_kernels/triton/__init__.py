"""Triton kernels, one file each; every file exports its `SPECS`.

Importing this package imports no Triton: `kernels()` does.
"""

from __future__ import annotations

from quantkit_kernels.triton.spec import Fact, Facts, KernelSpec, Signature


def kernels() -> dict[str, KernelSpec]:
    """Every kernel by name, in the order in which their specs are asked; ModuleNotFoundError without triton."""
    from quantkit_kernels.triton import (  # by name, so that a build sees what it depends on
        add_rms_norm,
        embedding,
        gated_act,
        linear_a8,
        linear_w4a16,
        linear_w8a16,
        moe_linear,
        moe_route,
        moe_sum,
        paged_attention,
        paged_prefill,
        qk_norm_rope_kv_write,
        quantize,
        sample,
        softcap,
        split_k,
    )

    linears, attention = (
        (linear_w4a16, linear_w8a16, linear_a8),
        (qk_norm_rope_kv_write, paged_attention, paged_prefill),
    )
    experts = (moe_route, moe_linear, moe_sum)
    files = (*linears, embedding, add_rms_norm, *attention, gated_act, quantize, split_k, softcap, sample, *experts)
    return {spec.name: spec for file in files for spec in file.SPECS}


__all__ = ["Fact", "Facts", "KernelSpec", "Signature", "kernels"]
