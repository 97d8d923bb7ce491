"""What the passes share: who reads a value, and taking a Program apart and together again."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.program.ir import Node, Program, Value, Weight


def readers(program: Program) -> dict[str, list[Node]]:
    """value name -> the nodes that read it, in program order."""
    found: dict[str, list[Node]] = {}
    for node in program.nodes:
        for name in node.inputs:
            found.setdefault(name, []).append(node)
    return found


def producers(program: Program) -> dict[str, Node]:
    """value name -> the node that computes it."""
    return {name: node for node in program.nodes for name in node.outputs}


def rebuild(
    program: Program,
    nodes: Iterable[Node],
    values: Iterable[Value] = (),
    weights: Iterable[Weight] = (),
    done: str = "",
) -> Program:
    """The program with other nodes; new values and weights are added, unused ones dropped, the pass recorded."""
    nodes = tuple(nodes)
    all_values = dict(program.values) | {value.name: value for value in values}
    all_weights = dict(program.weights) | {weight.name: weight for weight in weights}
    used = set(program.inputs) | {name for node in nodes for name in (*node.inputs, *node.outputs)}
    read = [name for node in nodes for name in node.weights.values()]
    return program.with_(
        nodes=nodes,
        values={name: value for name, value in all_values.items() if name in used},
        weights={name: all_weights[name] for name in dict.fromkeys(read)},
        passes=(*program.passes, done) if done else program.passes,
    )
