"""fuse_qkv and fuse_gate_up: linears over one input become one GEMM.

    q = linear(x) {layers.0.q}                    qkv = linear(x) {layers.0.qkv}
    k = linear(x) {layers.0.k}          ->        q, k, v = split(qkv)
    v = linear(x) {layers.0.v}

All rows then share one scheme, so precision is chosen per fused group.
"""

from __future__ import annotations

from quantkit.models.spec import Part
from quantkit.program.ir import Node, Program, Value, Weight
from quantkit.program.passes.rewrite import rebuild


def fuse_qkv(program: Program) -> Program:
    """Join the q, k and v projections of each layer."""
    return _fuse(program, "qkv")


def fuse_gate_up(program: Program) -> Program:
    """Join the gate and up projections of each layer."""
    return _fuse(program, "gate_up")


def _fuse(program: Program, kind: str) -> Program:
    members: dict[str, list[Node]] = {}
    for node in program.nodes:
        if node.op == "linear":
            group = program.weights[node.weights["weight"]].group
            if group is not None and group.rpartition(".")[2] == kind:
                members.setdefault(group, []).append(node)
    fusable = {group: nodes for group, nodes in members.items() if len(nodes) > 1}
    first = {nodes[0].name: group for group, nodes in fusable.items()}
    dropped = {node.name for nodes in fusable.values() for node in nodes}
    nodes: list[Node] = []
    values: list[Value] = []
    weights: list[Weight] = []
    for node in program.nodes:
        if node.name in first:
            group = first[node.name]
            added, value, made = _join(program, group, fusable[group])
            nodes += added
            values.append(value)
            weights += made
        elif node.name not in dropped:
            nodes.append(node)
    return rebuild(program, nodes, values, weights, f"fuse_{kind}")


def _join(program: Program, group: str, parts: list[Node]) -> tuple[list[Node], Value, list[Weight]]:
    head = parts[0]
    matrices = [program.weights[node.weights["weight"]] for node in parts]
    rows = [matrix.shape[0] for matrix in matrices]
    total = sum(rows)
    weights = [Weight(group, "matrix", (total, matrices[0].shape[1]), _contiguous(matrices), group=group)]
    roles = {"weight": group}
    if "bias" in head.weights:
        biases = [program.weights[node.weights["bias"]] for node in parts]
        weights.append(Weight(f"{group}.bias", "vector", (total,), _contiguous(biases)))
        roles["bias"] = f"{group}.bias"
    joined = Node("linear", group, head.inputs, (group,), dict(head.attrs), roles, head.layer)
    split = Node(
        "split",
        f"{group}.split",
        (group,),
        tuple(node.outputs[0] for node in parts),
        {"sizes": ",".join(map(str, rows))},
        {},
        head.layer,
    )
    return [joined, split], Value(group, ("T", total)), weights


def _contiguous(weights: list[Weight]) -> tuple[Part, ...]:
    """All parts in order; neighbours that are consecutive rows of one tensor become one."""
    parts: list[Part] = []
    for part in (part for weight in weights for part in weight.parts):
        if parts and parts[-1].tensor == part.tensor and parts[-1].stop == part.start:
            parts[-1] = Part(part.tensor, parts[-1].start, part.stop)
        else:
            parts.append(part)
    return tuple(parts)
