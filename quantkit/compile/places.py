"""What a lowered program asks of kernels: the facts of every node, in the kernels' own words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quantkit.artifact.layout import scale_type
from quantkit.compile.buckets import BucketClass
from quantkit.compile.targets import capability
from quantkit.formats.schemes import scheme
from quantkit.program.ir import Node, Program
from quantkit_kernels.triton import Fact
from quantkit_kernels.triton.tuning import tuned

BLOCK_SIZE = 16
"""Tokens of a block of the paged cache, as the engine divides it."""
ACTIVATIONS = "fp16"
_SCALES = {"F16": "fp16", "BF16": "bf16"}
_TABLES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class Place:
    """What a node of a program asks for in one bucket class: facts about it (`quantkit_kernels.triton.spec`)."""

    node: str
    bucket_class: BucketClass
    facts: dict[str, Fact]


def places(program: Program, target: str, bucket_class: BucketClass) -> Iterator[Place]:
    """Every node of the program, with its facts, as often as it asks for something: in the order of its launches.

    `program` is fused and lowered.
    """
    common: dict[str, Fact] = {
        "sm": capability(target),
        "rows": "few" if bucket_class.few else "many",
        "phase": bucket_class.phase,
        "dtype": ACTIVATIONS,
    }
    for node in program.nodes:
        for facts in _head(node, program) if node.op == "logits" else [_facts(node, program)]:
            yield Place(node.name, bucket_class, tuned({**common, **facts}))


def _facts(node: Node, program: Program) -> dict[str, Fact]:
    own = _OWN.get(node.op)
    return {"op": node.op, **(own(node, program) if own else {})}


def _head(node: Node, program: Program) -> Iterator[dict[str, Fact]]:
    """A linear like any other, on the rows whose logits are wanted: gathered first, as an embedding's, capped last."""
    product = _linear(node, program)
    yield {"op": "embedding", "width": product["k"], "table": ACTIVATIONS, "scale": 1.0}
    yield {"op": "linear", **product}
    if node.attrs["softcap"]:
        yield {"op": "softcap", "width": product["n"], "softcap": _number(node, "softcap")}


def _embedding(node: Node, program: Program) -> dict[str, Fact]:
    width = program.weights[node.weights["table"]].shape[1]
    return {"width": width, "table": _TABLES[program.source_dtype], "scale": _number(node, "scale")}


def _linear(node: Node, program: Program) -> dict[str, Fact]:
    weight = program.weights[node.weights["weight"]]
    how = scheme(weight.scheme)
    return {
        "n": weight.shape[0],
        "k": weight.shape[1],
        "bits": how.bits,
        "group_size": how.group_size,
        "symmetric": how.symmetric,
        "bias": "bias" in node.weights,
        "scale": _SCALES[scale_type(program)],
    }


def _norm(node: Node, program: Program) -> dict[str, Fact]:
    width = program.weights[node.weights["weight"]].shape[0]
    return {"width": width, "eps": _number(node, "eps"), "offset": _number(node, "offset")}


def _rope_kv_write(node: Node, program: Program) -> dict[str, Fact]:
    rope = program.ropes[str(node.attrs["rope"])]
    norm = "q_norm" in node.weights
    return {
        **_heads(node, program),
        "rotary_dim": rope.rotary_dim,
        "qk_norm": norm,
        "eps": _number(node, "eps"),
        "offset": _number(node, "offset"),
    }


def _attention(node: Node, program: Program) -> dict[str, Fact]:
    window = program.kv[node.layer or 0].window
    return {
        **_heads(node, program),
        "scale": _number(node, "scale"),
        "softcap": _number(node, "softcap"),
        "window": window or 0,
    }


def _gated_act(node: Node, program: Program) -> dict[str, Fact]:
    width = program.values[node.outputs[0]].shape[1]
    return {"width": int(width), "activation": str(node.attrs["activation"])}


def _heads(node: Node, program: Program) -> dict[str, Fact]:
    kv = program.kv[node.layer or 0]
    heads = node.attrs["num_heads"]
    return {
        "num_heads": int(heads or 0),
        "num_kv_heads": kv.num_kv_heads,
        "head_dim": kv.head_dim,
        "cache": kv.format,
        "block_size": BLOCK_SIZE,
    }


def _number(node: Node, name: str) -> float:
    """A numeric attribute; 0 where it is None."""
    return float(node.attrs[name] or 0.0)


_OWN: dict[str, Callable[[Node, Program], dict[str, Fact]]] = {
    "embedding": _embedding,
    "linear": _linear,
    "rms_norm": _norm,
    "add_rms_norm": _norm,
    "qk_norm_rope_kv_write": _rope_kv_write,
    "paged_attention": _attention,
    "gated_act": _gated_act,
}
