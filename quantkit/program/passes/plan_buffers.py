"""plan_buffers: values that never live at the same time share a buffer.

x [T, 576]   gate_up [T, 3072]   y [T, 1536]     ->     x: buffer 0   gate_up: buffer 1   y: buffer 2 ...
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.program.ir import Program, Value
from quantkit.program.ops import OPS


def plan_buffers(program: Program) -> Program:
    """Set `Value.buffer` on every `[T, n]` activation: first fit over last uses, smallest buffer that is wide enough.

    Step inputs, the logits and cache states have memory of their own and keep None.
    """
    last_use = {name: index for index, node in enumerate(program.nodes) for name in node.inputs}
    last_use |= dict.fromkeys(program.outputs, len(program.nodes))
    widths: list[int] = []
    free: list[int] = []
    home: dict[str, int] = {}

    def take(value: Value) -> int:
        width = int(value.shape[1])
        fitting = [b for b in free if widths[b] >= width]
        if fitting:
            buffer = min(fitting, key=lambda b: (widths[b], b))
        elif free:
            buffer = max(free, key=lambda b: (widths[b], -b))
            widths[buffer] = width
        else:
            widths.append(width)
            return len(widths) - 1
        free.remove(buffer)
        return buffer

    for name in program.inputs:
        if _buffered(program.values[name]):
            home[name] = take(program.values[name])
    for index, node in enumerate(program.nodes):
        dying = [n for n in dict.fromkeys(node.inputs) if n in home and last_use[n] == index]
        moved: set[str] = set()
        for out, source in OPS[node.op].inplace:
            name = node.inputs[source]
            if name in dying and node.inputs.count(name) == 1:
                home[node.outputs[out]] = home[name]
                moved.add(name)
        for name in node.outputs:
            if name not in home and _buffered(program.values[name]):
                home[name] = take(program.values[name])
        free += [home[name] for name in dying if name not in moved]
        free += [home[name] for name in node.outputs if name in home and name not in last_use]
    values = {name: replace(value, buffer=home.get(name)) for name, value in program.values.items()}
    return program.with_(values=values, passes=(*program.passes, "plan_buffers"))


def buffer_widths(program: Program) -> list[int]:
    """Elements a token that each planned buffer must hold."""
    widths: dict[int, int] = {}
    for value in program.values.values():
        if value.buffer is not None:
            widths[value.buffer] = max(widths.get(value.buffer, 0), int(value.shape[1]))
    return [widths.get(i, 0) for i in range(max(widths, default=-1) + 1)]


def _buffered(value: Value) -> bool:
    return value.dtype == "float32" and len(value.shape) == 2 and value.shape[0] == "T"
