"""fuse_gated_act: split and activation over the joined gate and up become one op.

gate, up = split(gate_up)           ->        y = gated_act(gate_up)
y = act_mul(gate, up)
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.program.ir import Node, Program
from quantkit.program.passes.rewrite import producers, rebuild


def fuse_gated_act(program: Program) -> Program:
    """Fold each two-way `split` into the `act_mul` that reads both halves."""
    made = producers(program)
    splits: dict[str, Node] = {}
    for node in program.nodes:
        if node.op == "act_mul":
            split = made.get(node.inputs[0])
            if split is not None and split.op == "split" and split.outputs == node.inputs:
                splits[node.name] = split
    dropped = {split.name for split in splits.values()}
    nodes = [
        replace(node, op="gated_act", inputs=splits[node.name].inputs) if node.name in splits else node
        for node in program.nodes
        if node.name not in dropped
    ]
    return rebuild(program, nodes, done="fuse_gated_act")
