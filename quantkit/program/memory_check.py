"""Is a buffer plan sound? A plan that came with a file may lay one live value over another."""

from __future__ import annotations

from quantkit.program.ir import Program
from quantkit.program.ops import OPS, ShapeError


def check_buffers(program: Program) -> None:
    """ShapeError when a value that is no `[T, n]` activation has a buffer, and when one is overwritten before its last
    use. An op may write over an input that dies there only where its schema says so."""
    for name, value in program.values.items():
        if value.buffer is not None and (value.dtype != "float32" or len(value.shape) != 2 or value.shape[0] != "T"):
            raise ShapeError(f"value {name!r} cannot live in a buffer")
    last_use = {name: index for index, node in enumerate(program.nodes) for name in node.inputs}
    last_use |= dict.fromkeys(program.outputs, len(program.nodes))
    holder: dict[int, str] = {}

    def put(name: str, index: int, allowed: set[str]) -> None:
        buffer = program.values[name].buffer
        if buffer is None:
            return
        other = holder.get(buffer)
        if other is not None and other not in allowed and last_use.get(other, -1) >= index:
            raise ShapeError(f"{name!r} overwrites {other!r} in buffer {buffer} before its last use")
        holder[buffer] = name

    for name in program.inputs:
        put(name, -1, set())
    for index, node in enumerate(program.nodes):
        pairs = OPS[node.op].inplace
        for out, name in enumerate(node.outputs):
            sources = {node.inputs[source] for where, source in pairs if where == out}
            put(name, index, {n for n in sources if last_use[n] == index and node.inputs.count(n) == 1})
        written = [program.values[name].buffer for name in node.outputs if program.values[name].buffer is not None]
        if len(set(written)) != len(written):
            raise ShapeError(f"node {node.name!r} ({node.op}): two outputs share a buffer")
