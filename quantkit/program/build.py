"""DecoderSpec -> the unfused Program: one op a line, as the paper would write it."""

from __future__ import annotations

from typing import Any

from quantkit.models.spec import DecoderSpec, Part
from quantkit.program.ir import Attr, Dim, KVLayer, Node, Program, Value, Weight

STEP_INPUTS: dict[str, tuple[Dim, ...]] = {
    "token_ids": ("T",),
    "positions": ("T",),
    "slot_mapping": ("T",),
    "query_start_loc": ("B+1",),
    "seq_lens": ("B",),
    "block_table": ("B", "M"),
    "logits_rows": ("R",),
}
"""What every step brings, all int32: T tokens of B sequences, M blocks a sequence at most, R rows to score."""


class _Builder:
    """Collects nodes, values and weights in program order."""

    def __init__(self) -> None:
        self.values = {name: Value(name, shape, "int32") for name, shape in STEP_INPUTS.items()}
        self.weights: dict[str, Weight] = {}
        self.nodes: list[Node] = []

    def node(
        self,
        op: str,
        name: str,
        inputs: tuple[str, ...],
        width: Dim | None,
        *,
        layer: int | None = None,
        weights: dict[str, str] | None = None,
        **attrs: Attr,
    ) -> str:
        """Append a node with one output named like itself: `[T, width]`, or the layer's cache state when None."""
        value = Value(name, (), "state") if width is None else Value(name, ("T", width))
        self.values[name] = value
        self.nodes.append(Node(op, name, inputs, (name,), attrs, weights or {}, layer))
        return name

    def vector(self, name: str, tensor: str, size: int, start: int = 0) -> str:
        self.weights[name] = Weight(name, "vector", (size,), (Part(tensor, start, start + size),))
        return name

    def matrix(self, name: str, tensor: str, rows: int, columns: int, *, group: str, start: int = 0) -> str:
        part = Part(tensor, start, start + rows)
        self.weights[name] = Weight(name, "matrix", (rows, columns), (part,), group=group)
        return name


def build_program(spec: DecoderSpec) -> Program:
    """The spec's decoder as an unfused Program: KV in FP32, every weight in the source's own type."""
    b = _Builder()
    names = spec.names
    hidden = spec.hidden_size
    b.weights["embed"] = Weight("embed", "table", (spec.vocab_size, hidden), (Part(names.embed, 0, spec.vocab_size),))
    h = b.node("embedding", "embed", ("token_ids",), hidden, weights={"table": "embed"}, scale=spec.embedding_scale)
    for i in range(spec.num_layers):
        h = _layer(b, spec, i, h)
    norm = b.vector("final_norm", names.final_norm, hidden)
    final = _norm(b, spec, "final_norm", h, norm, None)
    head = b.matrix("lm_head", names.embed if spec.tied else names.head, spec.vocab_size, hidden, group="lm_head")
    b.values["logits"] = Value("logits", ("R", spec.vocab_size))
    b.nodes.append(
        Node(
            "logits",
            "logits",
            (final, "logits_rows"),
            ("logits",),
            {"softcap": spec.logits_softcap, "compute": "exact"},
            {"weight": head},
        )
    )
    return Program(
        family=spec.family,
        vocab_size=spec.vocab_size,
        hidden_size=hidden,
        max_position=spec.max_position,
        inputs=tuple(STEP_INPUTS),
        outputs=("logits",),
        values=b.values,
        weights=b.weights,
        nodes=tuple(b.nodes),
        kv=tuple(KVLayer(spec.num_kv_heads, spec.head_dim, "FP32", layer.window) for layer in spec.layers),
        ropes=dict(spec.ropes),
        source_dtype=spec.dtype,
    )


def _norm(b: _Builder, spec: DecoderSpec, name: str, x: str, weight: str, layer: int | None) -> str:
    return b.node(
        "rms_norm",
        name,
        (x,),
        spec.hidden_size,
        layer=layer,
        weights={"weight": weight},
        eps=spec.norm_eps,
        offset=spec.norm_offset,
    )


def _parts(tensors: tuple[str, ...], sizes: tuple[int, ...], i: int) -> list[tuple[str, int]]:
    """(tensor, first row) of each size: one tensor each, or all rows stacked in a single one."""
    if len(tensors) == len(sizes):
        return [(tensor.format(i=i), 0) for tensor in tensors]
    return [(tensors[0].format(i=i), sum(sizes[:j])) for j in range(len(sizes))]


def _layer(b: _Builder, spec: DecoderSpec, i: int, h: str) -> str:
    names, hidden, head_dim = spec.names, spec.hidden_size, spec.head_dim
    at = f"layers.{i}"

    def linear(
        name: str, x: str, tensor: str, rows: int, columns: int, *, group: str, start: int = 0, bias: bool = False
    ) -> str:
        weights = {"weight": b.matrix(f"{at}.{name}", tensor, rows, columns, group=f"{at}.{group}", start=start)}
        if bias:
            weights["bias"] = b.vector(f"{at}.{name}.bias", tensor.removesuffix("weight") + "bias", rows, start)
        return b.node("linear", f"{at}.{name}", (x,), rows, layer=i, weights=weights, compute="exact")

    def norm(name: str, x: str, tensor: str) -> str:
        weight = b.vector(f"{at}.{name}", tensor.format(i=i), hidden)
        return _norm(b, spec, f"{at}.{name}", x, weight, i)

    x = norm("input_norm", h, names.input_norm)
    q_size, kv_size = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    sizes = (q_size, kv_size, kv_size)
    q, k, v = (
        linear(name, x, tensor, rows, hidden, group="qkv", start=start, bias=spec.qkv_bias)
        for name, rows, (tensor, start) in zip("qkv", sizes, _parts(names.qkv, sizes, i), strict=True)
    )
    if spec.qk_norm:
        q_norm = b.vector(f"{at}.q_norm", names.q_norm.format(i=i), head_dim)
        k_norm = b.vector(f"{at}.k_norm", names.k_norm.format(i=i), head_dim)
        norm_attrs: dict[str, Any] = {"head_dim": head_dim, "eps": spec.norm_eps, "offset": spec.norm_offset}
        q = b.node("head_rms_norm", f"{at}.q_normed", (q,), q_size, layer=i, weights={"weight": q_norm}, **norm_attrs)
        k = b.node("head_rms_norm", f"{at}.k_normed", (k,), kv_size, layer=i, weights={"weight": k_norm}, **norm_attrs)
    rope: dict[str, Any] = {"head_dim": head_dim, "rope": spec.layers[i].rope}
    q = b.node("rope", f"{at}.q_rope", (q, "positions"), q_size, layer=i, **rope)
    k = b.node("rope", f"{at}.k_rope", (k, "positions"), kv_size, layer=i, **rope)
    kv = b.node("kv_write", f"{at}.kv", (k, v, "slot_mapping"), None, layer=i)
    attn = b.node(
        "paged_attention",
        f"{at}.attn",
        (q, kv, "block_table", "query_start_loc", "seq_lens"),
        q_size,
        layer=i,
        num_heads=spec.num_heads,
        scale=spec.scale,
        softcap=spec.attention_softcap,
    )
    o = linear("o", attn, names.o.format(i=i), hidden, q_size, group="o", bias=spec.o_bias)
    if names.post_attention_norm:
        o = norm("post_attention_norm", o, names.post_attention_norm)
    h = b.node("add", f"{at}.attn_residual", (o, h), hidden, layer=i)

    x = norm("mlp_norm", h, names.mlp_norm)
    inner = spec.intermediate_size
    gate, up = (
        linear(name, x, tensor, inner, hidden, group="gate_up", start=start, bias=spec.mlp_bias)
        for name, (tensor, start) in zip(("gate", "up"), _parts(names.gate_up, (inner, inner), i), strict=True)
    )
    act = b.node("act_mul", f"{at}.act", (gate, up), inner, layer=i, activation=spec.activation)
    down = linear("down", act, names.down.format(i=i), hidden, inner, group="down", bias=spec.mlp_bias)
    if names.post_mlp_norm:
        down = norm("post_mlp_norm", down, names.post_mlp_norm)
    return b.node("add", f"{at}.mlp_residual", (down, h), hidden, layer=i)
