"""The op table: what each op takes, and the shapes it returns. `verify` holds every Program against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quantkit.formats.schemes import SCHEMES
from quantkit.program.ir import Attr, Dim, Node, Program
from quantkit_kernels.cache_formats import CACHE_FORMATS

Shape = tuple[Dim, ...]

COMPUTE = ("exact", "int8")
"""How a product is taken: in float32, or with its input quantized on the fly and integer products."""


class ShapeError(ValueError):
    """A node that breaks its op's signature; verify adds where."""


@dataclass(frozen=True)
class OpSchema:
    """Signature of an op.

    inputs: names of inputs, in order (documentation and count). attrs: name -> allowed types.
    weights: role -> whether it must be present. infer: output shapes from node, input shapes, program.
    """

    inputs: tuple[str, ...]
    attrs: dict[str, tuple[type, ...]]
    weights: dict[str, bool]
    infer: Callable[[Node, list[Shape], Program], list[Shape]]
    inplace: tuple[tuple[int, int], ...] = ()
    """(output, input) pairs that may share memory: the op reads a row's input before it writes that row."""


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ShapeError(message)


def _width(shape: Shape) -> int:
    _need(len(shape) == 2 and shape[0] == "T" and isinstance(shape[1], int), f"expected [T, n], got {list(shape)}")
    return int(shape[1])


def _weight_shape(node: Node, role: str, program: Program) -> tuple[int, ...]:
    return program.weights[node.weights[role]].shape


def _int(value: Attr, name: str) -> int:
    _need(isinstance(value, int) and not isinstance(value, bool) and value > 0, f"{name} must be a positive integer")
    return int(value)  # type: ignore[arg-type]


def _embedding(node: Node, shapes: list[Shape], program: Program) -> list[Shape]:
    table = _weight_shape(node, "table", program)
    _need(shapes[0] == ("T",), "token_ids must be [T]")
    _need(table == (program.vocab_size, program.hidden_size), f"table is {list(table)}")
    return [("T", table[1])]


def _norm(node: Node, shapes: list[Shape], program: Program) -> list[Shape]:
    width = _width(shapes[0])
    _need(_weight_shape(node, "weight", program) == (width,), f"norm weight is not [{width}]")
    return [("T", width)]


def _add_norm(node: Node, shapes: list[Shape], program: Program) -> list[Shape]:
    _need(shapes[0] == shapes[1], f"cannot add {shapes[0]} and {shapes[1]}")
    return _norm(node, shapes, program) * 2


def _same(node: Node, shapes: list[Shape], program: Program) -> list[Shape]:
    _need(shapes[0] == shapes[1], f"cannot combine {shapes[0]} and {shapes[1]}")
    return [("T", _width(shapes[0]))]


def _compute(node: Node, program: Program) -> None:
    compute = node.attrs["compute"]
    _need(compute in COMPUTE, f"unknown compute {compute!r}")
    scheme = program.weights[node.weights["weight"]].scheme
    _need(compute == "exact" or SCHEMES[scheme].quantized, f"int8 compute with a weight in {scheme}")


def _linear(node: Node, shapes: list[Shape], program: Program) -> list[Shape]:
    _compute(node, program)
    width, weight = _width(shapes[0]), _weight_shape(node, "weight", program)
    _need(len(weight) == 2 and weight[1] == width, f"weight {list(weight)} does not take rows of {width}")
    if "bias" in node.weights:
        _need(_weight_shape(node, "bias", program) == weight[:1], "bias does not match the weight")
    return [("T", weight[0])]


def _split(node: Node, shapes: list[Shape], program: Program) -> list[Shape]:
    sizes = [int(part) for part in str(node.attrs["sizes"]).split(",")]
    _need(all(size > 0 for size in sizes) and sum(sizes) == _width(shapes[0]), f"sizes {sizes} do not add up")
    return [("T", size) for size in sizes]


def _heads(node: Node, shapes: list[Shape], program: Program) -> list[Shape]:
    width, head_dim = _width(shapes[0]), _int(node.attrs["head_dim"], "head_dim")
    _need(width % head_dim == 0, f"{width} is not a whole number of heads of {head_dim}")
    if node.op == "head_rms_norm":
        _need(_weight_shape(node, "weight", program) == (head_dim,), f"norm weight is not [{head_dim}]")
    else:
        _rope(node, head_dim, program)
        _need(shapes[1] == ("T",), "positions must be [T]")
    return [("T", width)]


def _rope(node: Node, head_dim: int, program: Program) -> None:
    rope = program.ropes.get(str(node.attrs["rope"]))
    _need(rope is not None, f"unknown rope {node.attrs['rope']!r}")
    _need(rope is not None and 0 < rope.rotary_dim <= head_dim and rope.rotary_dim % 2 == 0, "rotary_dim out of range")


def _layer_heads(node: Node, program: Program) -> tuple[int, int]:
    """(num_kv_heads, head_dim) of the node's layer, whose KV scales are checked along the way."""
    _need(node.layer is not None and 0 <= node.layer < len(program.kv), f"layer {node.layer} does not exist")
    kv = program.kv[node.layer or 0]
    scaled, wanted = {"k_scale", "v_scale"} & set(node.weights), 2 if CACHE_FORMATS[kv.format].scaled else 0
    _need(len(scaled) == wanted, f"{kv.format} cache with scales {sorted(scaled)}")
    for role in scaled:
        _need(_weight_shape(node, role, program) == (kv.num_kv_heads, kv.head_dim), f"{role} is not [heads, head_dim]")
    return kv.num_kv_heads, kv.head_dim


def _kv_write(node: Node, shapes: list[Shape], program: Program) -> list[Shape]:
    heads, head_dim = _layer_heads(node, program)
    for shape in shapes[:2]:
        _need(_width(shape) == heads * head_dim, f"{list(shape)} is not {heads} heads of {head_dim}")
    _need(shapes[2] == ("T",), "slot_mapping must be [T]")
    return [()]


def _qk_norm_rope_kv_write(node: Node, shapes: list[Shape], program: Program) -> list[Shape]:
    kv_heads, head_dim = _layer_heads(node, program)
    heads = _int(node.attrs["num_heads"], "num_heads")
    _need(_width(shapes[0]) == (heads + 2 * kv_heads) * head_dim, f"qkv is {list(shapes[0])}")
    _need(shapes[1] == ("T",) and shapes[2] == ("T",), "positions and slot_mapping must be [T]")
    _rope(node, head_dim, program)
    norms = {"q_norm", "k_norm"} & set(node.weights)
    _need(len(norms) in (0, 2), "q_norm and k_norm come together")
    for role in norms:
        _need(_weight_shape(node, role, program) == (head_dim,), f"{role} is not [{head_dim}]")
    return [("T", heads * head_dim), ()]


def _paged_attention(node: Node, shapes: list[Shape], program: Program) -> list[Shape]:
    kv_heads, head_dim = _layer_heads(node, program)
    heads = _int(node.attrs["num_heads"], "num_heads")
    _need(heads % kv_heads == 0, f"{heads} heads do not share {kv_heads} KV heads")
    _need(_width(shapes[0]) == heads * head_dim, f"q is {list(shapes[0])}")
    _need(shapes[1] == (), "second input must be the layer's cache state")
    _need(shapes[2:] == [("B", "M"), ("B+1",), ("B",)], "block_table, query_start_loc, seq_lens expected")
    return [("T", heads * head_dim)]


def _gated_act(node: Node, shapes: list[Shape], program: Program) -> list[Shape]:
    _activation(node)
    width = _width(shapes[0])
    _need(width % 2 == 0, "gate and up must be equally wide")
    return [("T", width // 2)]


def _act_mul(node: Node, shapes: list[Shape], program: Program) -> list[Shape]:
    _activation(node)
    return _same(node, shapes, program)


def _activation(node: Node) -> None:
    _need(node.attrs["activation"] in ("silu", "gelu_tanh"), f"unknown activation {node.attrs['activation']!r}")


def _logits(node: Node, shapes: list[Shape], program: Program) -> list[Shape]:
    _compute(node, program)
    width, weight = _width(shapes[0]), _weight_shape(node, "weight", program)
    _need(weight == (program.vocab_size, width), f"head is {list(weight)}")
    _need(shapes[1] == ("R",), "logits_rows must be [R]")
    return [("R", weight[0])]


_NUMBER = (int, float)
_NORM: dict[str, tuple[type, ...]] = {"eps": _NUMBER, "offset": _NUMBER}
_MAYBE_NUMBER: tuple[type, ...] = (int, float, type(None))
_ROPE: dict[str, tuple[type, ...]] = {"head_dim": (int,), "rope": (str,)}
_COMPUTE: dict[str, tuple[type, ...]] = {"compute": (str,)}
_SCALES = {"k_scale": False, "v_scale": False}

OPS: dict[str, OpSchema] = {
    "embedding": OpSchema(("token_ids",), {"scale": _NUMBER}, {"table": True}, _embedding),
    "rms_norm": OpSchema(("x",), _NORM, {"weight": True}, _norm),
    "add_rms_norm": OpSchema(("x", "residual"), _NORM, {"weight": True}, _add_norm, inplace=((1, 1),)),
    "add": OpSchema(("x", "y"), {}, {}, _same, inplace=((0, 1),)),
    "linear": OpSchema(("x",), _COMPUTE, {"weight": True, "bias": False}, _linear),
    "split": OpSchema(("x",), {"sizes": (str,)}, {}, _split),
    "head_rms_norm": OpSchema(("x",), {"head_dim": (int,), **_NORM}, {"weight": True}, _heads),
    "rope": OpSchema(("x", "positions"), _ROPE, {}, _heads),
    "kv_write": OpSchema(("k", "v", "slot_mapping"), {}, _SCALES, _kv_write),
    "qk_norm_rope_kv_write": OpSchema(
        ("qkv", "positions", "slot_mapping"),
        {"num_heads": (int,), "rope": (str,), **_NORM},
        {"q_norm": False, "k_norm": False, **_SCALES},
        _qk_norm_rope_kv_write,
    ),
    "paged_attention": OpSchema(
        ("q", "kv", "block_table", "query_start_loc", "seq_lens"),
        {"num_heads": (int,), "scale": _NUMBER, "softcap": _MAYBE_NUMBER},
        _SCALES,
        _paged_attention,
    ),
    "act_mul": OpSchema(("gate", "up"), {"activation": (str,)}, {}, _act_mul),
    "gated_act": OpSchema(("gate_up",), {"activation": (str,)}, {}, _gated_act),
    "logits": OpSchema(("hidden", "logits_rows"), {"softcap": _MAYBE_NUMBER, **_COMPUTE}, {"weight": True}, _logits),
}
