"""fuse_rope_kv_write: everything between the qkv GEMM and attention becomes one op.

q, k, v = split(qkv)
q = head_rms_norm(q); k = head_rms_norm(k)    (where the family has them)
q = rope(q, positions); k = rope(k, positions)     ->     q, kv = qk_norm_rope_kv_write(qkv, positions, slots)
kv = kv_write(k, v, slots)
"""

from __future__ import annotations

from quantkit.program.ir import Attr, Node, Program
from quantkit.program.passes.rewrite import producers, readers, rebuild


def fuse_rope_kv_write(program: Program) -> Program:
    """Fuse per layer; a layer of another form is left as it is."""
    replaced: dict[str, Node] = {}
    dropped: set[str] = set()
    for node in program.nodes:
        if node.op == "kv_write":
            match = _match(program, node)
            if match is not None:
                fused, gone = match
                replaced[node.name] = fused
                dropped |= gone - {node.name}
    nodes = [replaced.get(node.name, node) for node in program.nodes if node.name not in dropped]
    return rebuild(program, nodes, done="fuse_rope_kv_write")


def _match(program: Program, write: Node) -> tuple[Node, set[str]] | None:
    made, read = producers(program), readers(program)
    k_rope = made.get(write.inputs[0])
    split = made.get(write.inputs[1])
    if k_rope is None or split is None or k_rope.op != "rope" or split.op != "split" or len(split.outputs) != 3:
        return None
    k_norm = made[k_rope.inputs[0]] if made[k_rope.inputs[0]].op == "head_rms_norm" else None
    q_first = read[split.outputs[0]][0]
    q_norm = q_first if q_first.op == "head_rms_norm" else None
    q_rope = read[q_norm.outputs[0]][0] if q_norm is not None else q_first
    if q_rope.op != "rope" or dict(q_rope.attrs) != dict(k_rope.attrs) or (q_norm is None) != (k_norm is None):
        return None
    head_dim = int(k_rope.attrs["head_dim"])  # type: ignore[arg-type]
    q_width = int(program.values[q_rope.outputs[0]].shape[1])
    attrs: dict[str, Attr] = {
        "num_heads": q_width // head_dim,
        "rope": k_rope.attrs["rope"],
        "eps": 0.0,
        "offset": 0.0,
    }
    weights = dict(write.weights)
    gone = {split.name, q_rope.name, k_rope.name, write.name}
    if q_norm is not None and k_norm is not None:
        attrs |= {"eps": q_norm.attrs["eps"], "offset": q_norm.attrs["offset"]}
        weights |= {"q_norm": q_norm.weights["weight"], "k_norm": k_norm.weights["weight"]}
        gone |= {q_norm.name, k_norm.name}
    fused = Node(
        "qk_norm_rope_kv_write",
        f"layers.{write.layer}.rope_kv_write",
        (split.inputs[0], "positions", write.inputs[2]),
        (q_rope.outputs[0], write.outputs[0]),
        attrs,
        weights,
        write.layer,
    )
    return fused, gone
