"""lower_precision: give every decision unit its scheme, products with codes their arithmetic, the cache its format.

qkv = linear(x) {layers.0.qkv: FP16}          qkv = linear(x) {layers.0.qkv: W8A16}
kv FP32                             ->        kv INT8, with k_scale and v_scale [num_kv_heads, head_dim] a layer
                                              (FP8 and INT4 likewise; float caches have no scales)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quantkit.formats.schemes import SCHEMES
from quantkit.program.ir import Node, Program, Weight
from quantkit.program.passes.rewrite import rebuild
from quantkit_kernels.cache_formats import CACHE_FORMATS


def lower_precision(program: Program, schemes: Mapping[str, str], kv_format: str, compute: str = "exact") -> Program:
    """The program with `schemes[group]` on each named decision unit (others keep theirs) and `kv_format` caches.

    compute: how products with quantized matrices are taken, one of `ops.COMPUTE`; all others are exact.
    """
    weights = [
        replace(weight, scheme=schemes.get(weight.group or "", weight.scheme)) if weight.kind == "matrix" else weight
        for weight in program.weights.values()
    ]
    quantized = {weight.name for weight in weights if SCHEMES[weight.scheme].quantized}
    scales: dict[str, Weight] = {}
    nodes: list[Node] = []
    for node in program.nodes:
        roles = {role: name for role, name in node.weights.items() if role not in ("k_scale", "v_scale")}
        if CACHE_FORMATS[kv_format].scaled and node.op in ("kv_write", "qk_norm_rope_kv_write", "paged_attention"):
            kv = program.kv[node.layer or 0]
            for role in ("k_scale", "v_scale"):
                name = f"layers.{node.layer}.{role}"
                scales[name] = Weight(name, "scales", (kv.num_kv_heads, kv.head_dim), ())
                roles[role] = name
        attrs = dict(node.attrs)
        if "compute" in attrs:
            attrs["compute"] = compute if node.weights["weight"] in quantized else "exact"
        nodes.append(replace(node, weights=roles, attrs=attrs))
    lowered = program.with_(kv=tuple(replace(kv, format=kv_format) for kv in program.kv))
    return rebuild(lowered, nodes, weights=[*weights, *scales.values()], done="lower_precision")
