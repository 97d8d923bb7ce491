"""Slices of a Program: embedding, each decoder layer, head. What streams a model layer by layer runs these."""

from __future__ import annotations

from dataclasses import replace

from quantkit.program.ir import Node, Program


def slices(program: Program) -> list[Program]:
    """The program cut at layer boundaries, in order: [embedding, layer 0, ..., layer n-1, head].

    A slice's inputs are the step inputs plus the activations that cross into it; its outputs are those that later
    slices read (the last: the logits). Running them in order computes what the whole program computes.
    """
    last = program.num_layers
    pieces: list[list[Node]] = [[] for _ in range(last + 2)]
    seen_layer = False
    for node in program.nodes:
        if node.layer is not None:
            pieces[node.layer + 1].append(node)
            seen_layer = True
        else:
            pieces[last + 1 if seen_layer else 0].append(node)
    return [_cut(program, piece, pieces[i + 1 :]) for i, piece in enumerate(pieces)]


def _cut(program: Program, nodes: list[Node], later: list[list[Node]]) -> Program:
    made = {name for node in nodes for name in node.outputs}
    read = dict.fromkeys(name for node in nodes for name in node.inputs if name not in made)
    needed = {name for piece in later for node in piece for name in node.inputs} | set(program.outputs)
    inputs = tuple(dict.fromkeys((*(n for n in program.inputs if program.values[n].dtype == "int32"), *read)))
    outputs = tuple(n for node in nodes for n in node.outputs if n in needed and program.values[n].dtype != "state")
    passed = tuple(n for n in read if n in needed and program.values[n].dtype == "float32")
    used = set(inputs) | made
    weights = dict.fromkeys(name for node in nodes for name in node.weights.values())
    return program.with_(
        inputs=inputs,
        outputs=outputs + passed,
        nodes=tuple(nodes),
        values={n: replace(v, buffer=None) for n, v in program.values.items() if n in used},
        weights={name: program.weights[name] for name in weights},
    )
