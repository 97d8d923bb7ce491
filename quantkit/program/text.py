"""The Program as text, to be read like a paper's pseudo-code."""

from __future__ import annotations

from quantkit.program.ir import Node, Program, Weight


def format_program(program: Program) -> str:
    """One line an op: outputs with shapes, inputs, attributes, weights with shape and scheme."""
    kv = program.kv[0]
    lines = [
        f"program {program.family}  vocab {program.vocab_size}  hidden {program.hidden_size}  "
        f"layers {program.num_layers}  kv {kv.format} {kv.num_kv_heads}x{kv.head_dim}",
        f"passes {' '.join(program.passes) or '(none)'}",
    ]
    layer: int | None = -1
    for node in program.nodes:
        if node.layer != layer:
            layer = node.layer
            lines.append("" if layer is None else f"\nlayer {layer}{_window(program, layer)}")
        lines.append("  " + _line(program, node))
    return "\n".join(lines)


def _window(program: Program, layer: int) -> str:
    window = program.kv[layer].window
    return f"  (window {window})" if window else ""


def _line(program: Program, node: Node) -> str:
    outputs = ", ".join(_value(program, name, node.layer) for name in node.outputs)
    inputs = ", ".join(_short(name, node.layer) for name in node.inputs)
    facts = [f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in node.attrs.items() if v is not None]
    facts += [_weight(program.weights[name], role) for role, name in node.weights.items()]
    return f"{outputs} = {node.op}({inputs})" + (f"  {{{', '.join(facts)}}}" if facts else "")


def _value(program: Program, name: str, layer: int | None) -> str:
    value = program.values[name]
    short = _short(name, layer)
    shape = "" if value.dtype == "state" else f"[{', '.join(map(str, value.shape))}]"
    return f"{short}{shape}" + (f"@{value.buffer}" if value.buffer is not None else "")


def _short(name: str, layer: int | None) -> str:
    return name.removeprefix(f"layers.{layer}.") if layer is not None else name


def _weight(weight: Weight, role: str) -> str:
    shape = "x".join(map(str, weight.shape))
    kind = weight.scheme if weight.kind == "matrix" else weight.kind
    return f"{role}: {kind} {shape}"
