"""The native CPU backend: the program lowered to a flat list of calls, run by one native call a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from quantkit_kernels.registry import can_implement
from torch import Tensor

from quantkit.formats import QuantizedMatrix
from quantkit.program.ir import Node, Program, Weight
from quantkit.program.weights import WeightProvider
from quantkit_kernels import cpu

if TYPE_CHECKING:
    from quantkit.runtime.executor import Memory


def can_run(program: Program) -> tuple[bool, str]:
    """Whether the library is there and implements every op of the program, else why not."""
    usable, reason = cpu.available()
    if not usable:
        return False, reason
    for node in program.nodes:
        usable, reason = can_implement(node.op, "cpu")
        if not usable:
            return False, f"{node.name}: {reason}"
    return True, ""


class CpuBackend:
    """Packs each weight once as it is loaded, then holds one CallList over the executor's memory."""

    def __init__(self, program: Program, weights: WeightProvider, memory: Memory, threads: int | None) -> None:
        self.name = f"cpu:{cpu.isa()}"
        self._program, self._memory, self._source = program, memory, weights
        self._matrices: dict[str, cpu.PackedMatrix] = {}
        self._tensors: dict[str, Tensor] = {}
        self._calls = cpu.CallList(threads)
        for node in program.nodes:
            self._lower(node)
        packed = sum(matrix.nbytes for matrix in self._matrices.values())
        self.weight_bytes = packed + sum(t.numel() * t.element_size() for t in self._tensors.values())

    def run(self, tokens: int, sequences: int, rows: int) -> None:
        """One native call over the whole step."""
        self._calls.run(tokens, sequences, rows)

    def _matrix(self, name: str) -> cpu.PackedMatrix:
        if name not in self._matrices:
            self._matrices[name] = _pack(self._program.weights[name], self._source)
        return self._matrices[name]

    def _tensor(self, name: str | None) -> Tensor | None:
        if name is None:
            return None
        if name not in self._tensors:
            loaded = self._source.load(self._program.weights[name])
            if isinstance(loaded, QuantizedMatrix):
                raise TypeError(f"{name} is no plain tensor")
            self._tensors[name] = loaded.contiguous()
        return self._tensors[name]

    def _lower(self, node: Node) -> None:
        program, memory, calls = self._program, self._memory, self._calls
        a, w = dict(node.attrs), dict(node.weights)
        x = [memory.inputs.get(name, memory.activations.get(name)) for name in node.inputs]
        y = [memory.activations.get(name) for name in node.outputs]
        eps, offset = a.get("eps") or 0.0, a.get("offset") or 0.0
        match node.op:
            case "embedding":
                calls.embedding(x[0], self._tensor(w["table"]), y[0], a["scale"])
            case "rms_norm":
                calls.rms_norm(x[0], self._tensor(w["weight"]), y[0], eps, offset)
            case "add_rms_norm":
                calls.add_rms_norm(x[0], x[1], self._tensor(w["weight"]), y[0], y[1], eps, offset)
            case "add":
                calls.add(x[0], x[1], y[0])
            case "linear":
                calls.linear(x[0], self._matrix(w["weight"]), self._tensor(w.get("bias")), y[0])
            case "gated_act":
                calls.gated_act(x[0], y[0], a["activation"])
            case "logits":
                calls.logits(x[0], x[1], self._matrix(w["weight"]), y[0], a["softcap"])
            case "qk_norm_rope_kv_write" | "paged_attention":
                layer = -1 if node.layer is None else node.layer
                kv = program.kv[layer]
                cache = (memory.k_cache[layer], memory.v_cache[layer])
                scales = (self._tensor(w.get("k_scale")), self._tensor(w.get("v_scale")))
                shape = (a["num_heads"], kv.num_kv_heads, kv.head_dim)
                if node.op == "paged_attention":
                    calls.paged_attention(
                        x[0], *cache, *scales, x[2], x[3], x[4], y[0], *shape, a["scale"], kv.window, a["softcap"]
                    )
                else:
                    norms = (self._tensor(w.get("q_norm")), self._tensor(w.get("k_norm")))
                    rope = memory.rope[str(a["rope"])]
                    calls.qk_norm_rope_kv_write(
                        x[0], x[1], x[2], *rope, *norms, eps, offset, *cache, *scales, y[0], *shape
                    )
            case _:
                raise ValueError(f"no native form of op {node.op!r}")


def _pack(weight: Weight, source: WeightProvider) -> cpu.PackedMatrix:
    """Load, repack, and let the loaded form go."""
    loaded = source.load(weight)
    if isinstance(loaded, QuantizedMatrix):
        return cpu.pack_matrix(loaded.codes, bits=loaded.scheme.bits, scale=loaded.scale, zero=loaded.zero)
    return cpu.pack_matrix(loaded.contiguous(), bits=32 if loaded.dtype == torch.float32 else 16)
