"""The reference backend: every node by its torch reference, in order. Slow, plain, and what the rest must equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantkit.formats import QuantizedMatrix
from quantkit.program.ir import Node, Program
from quantkit.program.weights import WeightProvider
from quantkit_kernels.ops import (
    act_mul,
    add,
    add_rms_norm,
    embedding,
    gated_act,
    head_rms_norm,
    kv_write,
    linear,
    logits,
    paged_attention,
    qk_norm_rope_kv_write,
    rms_norm,
    rope,
)
from quantkit_kernels.tensors import as_tensor

if TYPE_CHECKING:
    from quantkit.runtime.executor import Memory


@dataclass(frozen=True)
class TensorMemory:
    """What nodes are bound to, as `executor.Memory` holds it."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    activations: dict[str, Tensor] = field(default_factory=dict)
    k_cache: dict[int, Tensor] = field(default_factory=dict)
    v_cache: dict[int, Tensor] = field(default_factory=dict)
    rope: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, memory: Memory) -> TensorMemory:
        """The same memory, seen by torch."""
        return cls(
            {name: as_tensor(array) for name, array in memory.inputs.items()},
            {name: as_tensor(array) for name, array in memory.activations.items()},
            {layer: as_tensor(array) for layer, array in memory.k_cache.items()},
            {layer: as_tensor(array) for layer, array in memory.v_cache.items()},
            {name: (as_tensor(cos), as_tensor(sin)) for name, (cos, sin) in memory.rope.items()},
        )


Call = Callable[[dict[str, Tensor]], tuple[Tensor, ...]]
"""A bound node: values of a step by name, cut to the step's counts -> its outputs."""


class ReferenceBackend:
    """Runs nodes one by one in torch float32; quantized matrices are dequantized once, when bound."""

    name = "reference"

    def __init__(self, program: Program, weights: WeightProvider, memory: TensorMemory) -> None:
        self._program, self._memory = program, memory
        self._weights: dict[str, Tensor] = {}
        self._codes: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
        in_integers = {node.weights["weight"] for node in program.nodes if node.attrs.get("compute") == "int8"}
        for name, weight in program.weights.items():
            loaded = weights.load(weight)
            if isinstance(loaded, QuantizedMatrix) and name in in_integers:
                zero = None if loaded.zero is None else as_tensor(loaded.zero)
                self._codes[name] = as_tensor(loaded.codes), as_tensor(loaded.scale), zero
            else:
                self._weights[name] = as_tensor(loaded.dequantize() if isinstance(loaded, QuantizedMatrix) else loaded)
        self.weight_bytes = sum(w.numel() * w.element_size() for w in self._weights.values())
        self.weight_bytes += sum(codes.nbytes + scale.nbytes for codes, scale, _ in self._codes.values())
        self._calls = [(node, self._bind(node)) for node in program.nodes]

    def run(self, tokens: int, sequences: int, rows: int) -> None:
        """One step; outputs are copied where the executor looks for them."""
        program, memory = self._program, self._memory
        sizes = {"T": tokens, "B": sequences, "B+1": sequences + 1, "R": rows}
        values: dict[str, Tensor] = {}
        for name in program.inputs:
            tensor = memory.inputs.get(name)
            tensor = memory.activations[name] if tensor is None else tensor
            values[name] = tensor[: sizes[str(program.values[name].shape[0])]]
        with torch.no_grad():
            self.compute(values)
        for name in program.outputs:
            memory.activations[name][: values[name].shape[0]] = values[name]

    def compute(self, values: dict[str, Tensor]) -> None:
        """Add every node's outputs to `values`, which holds the program's inputs; gradients flow where enabled."""
        for node, call in self._calls:
            values.update(zip(node.outputs, call(values), strict=False))

    def _bind(self, node: Node) -> Call:
        """The node as a function of a step. States are no tensors: an op's last output is left out when it is one."""
        program, memory = self._program, self._memory
        a = dict(node.attrs)
        w = {role: self._weights[name] for role, name in node.weights.items() if name in self._weights}
        codes = self._codes.get(node.weights.get("weight", ""))
        i = node.inputs
        layer = -1 if node.layer is None else node.layer

        def cache() -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
            return memory.k_cache[layer], memory.v_cache[layer], w.get("k_scale"), w.get("v_scale")

        def heads(x: Tensor, head_dim: int) -> Tensor:
            return x.view(x.shape[0], -1, head_dim)

        eps, offset = float(a.get("eps") or 0.0), float(a.get("offset") or 0.0)
        softcap = None if a.get("softcap") is None else float(a["softcap"])  # type: ignore[arg-type]
        match node.op:
            case "embedding":
                scale = float(a["scale"])  # type: ignore[arg-type]
                return lambda s: (embedding.reference(s[i[0]], w["table"], scale),)
            case "rms_norm":
                return lambda s: (rms_norm.reference(s[i[0]], w["weight"], eps, offset),)
            case "add_rms_norm":
                return lambda s: add_rms_norm.reference(s[i[0]], s[i[1]], w["weight"], eps, offset)
            case "add":
                return lambda s: (add.reference(s[i[0]], s[i[1]]),)
            case "linear" if codes is not None:
                return lambda s: (linear.of_codes(s[i[0]], *codes, w.get("bias")),)
            case "linear":
                return lambda s: (linear.reference(s[i[0]], w["weight"], w.get("bias")),)
            case "split":
                sizes = [int(size) for size in str(a["sizes"]).split(",")]
                return lambda s: s[i[0]].split(sizes, dim=-1)
            case "head_rms_norm":
                dim = int(a["head_dim"])  # type: ignore[arg-type]
                return lambda s: (head_rms_norm.reference(heads(s[i[0]], dim), w["weight"], eps, offset).flatten(1),)
            case "rope":
                dim = int(a["head_dim"])  # type: ignore[arg-type]
                cos, sin = memory.rope[str(a["rope"])]
                return lambda s: (rope.reference(heads(s[i[0]], dim), s[i[1]], cos, sin).flatten(1),)
            case "kv_write":
                dim, cache_format = program.kv[layer].head_dim, program.kv[layer].format

                def write(s: dict[str, Tensor]) -> tuple[Tensor, ...]:
                    kv_write.reference(heads(s[i[0]], dim), heads(s[i[1]], dim), s[i[2]], *cache(), cache_format)
                    return ()

                return write
            case "qk_norm_rope_kv_write":
                kv = program.kv[layer]
                cos, sin = memory.rope[str(a["rope"])]
                q_norm, k_norm = w.get("q_norm"), w.get("k_norm")
                shape = (int(a["num_heads"]), kv.num_kv_heads, kv.head_dim, kv.format)  # type: ignore[arg-type]
                return lambda s: (
                    qk_norm_rope_kv_write.reference(
                        s[i[0]], s[i[1]], s[i[2]], cos, sin, q_norm, k_norm, eps, offset, *cache(), *shape
                    ),
                )
            case "paged_attention":
                kv = program.kv[layer]
                shape = (int(a["num_heads"]), kv.num_kv_heads, kv.head_dim, kv.format)  # type: ignore[arg-type]
                scale = float(a["scale"])  # type: ignore[arg-type]
                return lambda s: (
                    paged_attention.reference(
                        s[i[0]], *cache(), s[i[2]], s[i[3]], s[i[4]], *shape, scale, kv.window, softcap
                    ),
                )
            case "act_mul":
                return lambda s: (act_mul.reference(s[i[0]], s[i[1]], str(a["activation"])),)
            case "gated_act":
                return lambda s: (gated_act.reference(s[i[0]], str(a["activation"])),)
            case "logits" if codes is not None:
                return lambda s: (logits.of_codes(s[i[0]], s[i[1]], *codes, softcap),)
            case "logits":
                return lambda s: (logits.reference(s[i[0]], s[i[1]], w["weight"], softcap),)
        raise ValueError(f"no reference for op {node.op!r}")
