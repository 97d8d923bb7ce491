"""fuse_add_norm: a residual add and the norm that reads it become one op.

h = add(x, residual)                ->        y, h = add_rms_norm(x, residual)
y = rms_norm(h)
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.program.ir import Node, Program
from quantkit.program.passes.rewrite import producers, rebuild


def fuse_add_norm(program: Program) -> Program:
    """Fold each `add` into the first `rms_norm` of its sum; the sum stays available as second output."""
    produced_by = producers(program)
    folded: dict[str, Node] = {}
    for node in program.nodes:
        if node.op == "rms_norm":
            add = produced_by.get(node.inputs[0])
            if add is not None and add.op == "add" and add.name not in folded:
                folded[add.name] = node
    norms = {norm.name: produced_by[norm.inputs[0]] for norm in folded.values()}
    nodes: list[Node] = []
    for node in program.nodes:
        if node.name in folded:
            continue
        add = norms.get(node.name)
        nodes.append(
            node
            if add is None
            else replace(node, op="add_rms_norm", inputs=add.inputs, outputs=(*node.outputs, *add.outputs))
        )
    return rebuild(program, nodes, done="fuse_add_norm")
