"""The native CPU backend: the program lowered to a flat list of calls, run by one native call a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quantkit.formats import QuantizedMatrix
from quantkit.program.ir import Attr, Node, Program, Weight
from quantkit.program.weights import WeightProvider
from quantkit.runtime.isa import instruction_set
from quantkit_kernels import cpu
from quantkit_kernels.arrays import Array
from quantkit_kernels.registry import can_implement

if TYPE_CHECKING:
    from quantkit.runtime.executor import Memory

_NONE = np.empty(0)
"""Stands where an op's input or output is a cache state, which no kernel takes."""


def can_run(program: Program) -> tuple[bool, str]:
    """Whether the library is there and implements every op of the program, else why not."""
    usable, reason = cpu.available()
    if not usable:
        return False, reason
    instruction_set()  # says what is wrong with QUANTKIT_CPU_ISA, if anything is
    for node in program.nodes:
        usable, reason = can_implement(node.op, "cpu")
        if not usable:
            return False, f"{node.name}: {reason}"
    return True, ""


class CpuBackend:
    """Packs each weight once as it is loaded, then holds one CallList over the executor's memory.

    `spill`: where packed matrices and tables go; huge pages of this process when None.
    """

    def __init__(
        self,
        program: Program,
        weights: WeightProvider,
        memory: Memory,
        threads: int | None,
        spill: cpu.Spill | None = None,
    ) -> None:
        self._spill = spill
        self.name = f"cpu:{instruction_set()}"
        self._program, self._memory, self._source = program, memory, weights
        self._matrices: dict[str, cpu.PackedMatrix] = {}
        self._arrays: dict[str, Array] = {}
        self._calls = cpu.CallList(threads)
        for node in program.nodes:
            self._lower(node)
        packed = sum(matrix.nbytes for matrix in self._matrices.values())
        self.weight_bytes = packed + sum(array.nbytes for array in self._arrays.values())

    def run(self, tokens: int, sequences: int, rows: int) -> None:
        """One native call over the whole step."""
        self._calls.run(tokens, sequences, rows)

    def _matrix(self, name: str) -> cpu.PackedMatrix:
        if name not in self._matrices:
            allocate = cpu.streamed if self._spill is None else self._spill.array
            self._matrices[name] = _pack(self._program.weights[name], self._source, allocate)
        return self._matrices[name]

    def _optional(self, name: str | None) -> Array | None:
        return None if name is None else self._array(name)

    def _array(self, name: str) -> Array:
        if name not in self._arrays:
            loaded = self._source.load(self._program.weights[name])
            if isinstance(loaded, QuantizedMatrix):
                raise TypeError(f"{name} is no plain array")
            large = self._program.weights[name].kind == "table"
            room = self._spill if large else None
            self._arrays[name] = np.ascontiguousarray(loaded) if room is None else cpu.placed(loaded, room.array)
        return self._arrays[name]

    def _lower(self, node: Node) -> None:
        calls = self._calls
        attrs, weights = node.attrs, node.weights
        x = [self._memory.inputs.get(name, self._memory.activations.get(name, _NONE)) for name in node.inputs]
        y = [self._memory.activations.get(name, _NONE) for name in node.outputs]
        eps, offset = _number(attrs.get("eps", 0.0)), _number(attrs.get("offset", 0.0))
        match node.op:
            case "embedding":
                calls.embedding(x[0], self._array(weights["table"]), y[0], _number(attrs["scale"]))
            case "rms_norm":
                calls.rms_norm(x[0], self._array(weights["weight"]), y[0], eps, offset)
            case "add_rms_norm":
                calls.add_rms_norm(x[0], x[1], self._array(weights["weight"]), y[0], y[1], eps, offset)
            case "add":
                calls.add(x[0], x[1], y[0])
            case "linear":
                matrix, bias = self._matrix(weights["weight"]), self._optional(weights.get("bias"))
                calls.linear(x[0], matrix, bias, y[0], str(attrs["compute"]))
            case "gated_act":
                calls.gated_act(x[0], y[0], str(attrs["activation"]))
            case "logits":
                matrix, softcap = self._matrix(weights["weight"]), _maybe(attrs["softcap"])
                calls.logits(x[0], x[1], matrix, y[0], softcap, str(attrs["compute"]))
            case "qk_norm_rope_kv_write" | "paged_attention":
                self._lower_attention(node, x, y[0], eps, offset)
            case _:
                raise ValueError(f"no native form of op {node.op!r}")

    def _lower_attention(self, node: Node, x: list[Array], y: Array, eps: float, offset: float) -> None:
        attrs, weights = node.attrs, node.weights
        layer = -1 if node.layer is None else node.layer
        kv = self._program.kv[layer]
        k_cache, v_cache = self._memory.k_cache[layer], self._memory.v_cache[layer]
        k_scale, v_scale = (self._optional(weights.get(role)) for role in ("k_scale", "v_scale"))
        heads = int(_number(attrs["num_heads"]))
        if node.op == "paged_attention":
            self._calls.paged_attention(
                x[0], k_cache, v_cache, k_scale, v_scale, x[2], x[3], x[4], y,
                heads, kv.num_kv_heads, kv.head_dim, kv.format, _number(attrs["scale"]), kv.window,
                _maybe(attrs["softcap"]),
            )  # fmt: skip
            return
        cos, sin = self._memory.rope[str(attrs["rope"])]
        q_norm, k_norm = (self._optional(weights.get(role)) for role in ("q_norm", "k_norm"))
        self._calls.qk_norm_rope_kv_write(
            x[0], x[1], x[2], cos, sin, q_norm, k_norm, eps, offset, k_cache, v_cache, k_scale, v_scale, y,
            heads, kv.num_kv_heads, kv.head_dim, kv.format,
        )  # fmt: skip


def _number(value: Attr) -> float:
    """A number that verify has already checked to be one."""
    return float(value)  # type: ignore[arg-type]


def _maybe(value: Attr) -> float | None:
    return None if value is None else _number(value)


def _pack(weight: Weight, source: WeightProvider, allocate: cpu.Allocate) -> cpu.PackedMatrix:
    """Load, repack, and let the loaded form go."""
    loaded = source.load(weight)
    if isinstance(loaded, QuantizedMatrix):
        return cpu.pack_matrix(
            loaded.codes, bits=loaded.scheme.bits, scale=loaded.scale, zero=loaded.zero, allocate=allocate
        )
    return cpu.pack_matrix(loaded, bits=32 if loaded.dtype == np.float32 else 16, allocate=allocate)
