"""A decoder on a GPU, out of a Program and the registered kernels.

Random weights are random words in the kernels' layout, so a model of a billion is there at once; where a reference is
wanted they are unpacked. A slice of an artifact has its own (`sliced`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gpu.ahead import Ahead
from quantkit.compile.buckets import CLASSES, FEW_ROWS
from quantkit.compile.emit import choose
from quantkit.compile.places import Place, places
from quantkit.formats.schemes import scheme
from quantkit.models.rope import cos_sin
from quantkit.models.spec import DecoderSpec, LayerSpec, RopeSpec
from quantkit.program import build_program, fuse, lower_precision, plan_buffers
from quantkit.program.ir import Node, Program, Weight
from quantkit.program.passes import buffer_widths
from quantkit.runtime.step import StepInputs
from quantkit_kernels.triton import kernels
from quantkit_kernels.triton.layout import GpuMatrix, unpack_words
from quantkit_kernels.triton.paged_attention import NO_WINDOW, workspace
from quantkit_kernels.triton.tuning import tuned

BLOCK = 16
Call = Callable[[], Any]


def llama(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int) -> Program:
    """A Llama of that shape in W4A16 (group 128), its head in W8A16, its cache in INT8."""
    dim = hidden // heads
    spec = DecoderSpec(
        family="llama", dtype="float16", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, norm_eps=1e-5, layers=(LayerSpec(),) * layers,
        ropes={"global": RopeSpec("default", 500000.0, dim)}, max_position=8192,
    )  # fmt: skip
    fused = fuse(build_program(spec))
    schemes = dict.fromkeys(fused.groups(), "W4A16_G128") | {"lm_head": "W8A16"}
    return plan_buffers(lower_precision(fused, schemes, "INT8"))


class Weights(Protocol):
    """A program's weights on a device, by name."""

    matrices: dict[str, GpuMatrix]
    arrays: dict[str, Tensor]


class RandomWeights:
    """Random ones; a WeightProvider of the same numbers for the reference."""

    def __init__(self, program: Program, device: str) -> None:
        self.matrices: dict[str, GpuMatrix] = {}
        self.arrays: dict[str, Tensor] = {}
        for name, weight in program.weights.items():
            if weight.kind == "matrix":
                self.matrices[name] = _random_matrix(weight, device)
            elif weight.kind == "table":
                self.arrays[name] = torch.randn(weight.shape, device=device).half()
            elif weight.kind == "scales":
                self.arrays[name] = torch.rand(weight.shape, device=device) * 0.02 + 0.01
            else:
                self.arrays[name] = 1 + 0.1 * torch.randn(weight.shape, device=device)

    def load(self, weight: Weight) -> Any:
        """The weight in float32, on the CPU."""
        if weight.name in self.arrays:
            return self.arrays[weight.name].float().cpu().numpy()
        matrix = self.matrices[weight.name]
        codes, scale = unpack_words(matrix.words.cpu(), matrix.bits, matrix.columns).float(), matrix.scale.float().cpu()
        return (codes * scale.T.repeat_interleave(matrix.columns // scale.shape[0], 1)).numpy()


def _random_matrix(weight: Weight, device: str) -> GpuMatrix:
    """Symmetric, float16 scales, K a multiple of 128; weights spread by about 0.7 / sqrt(K)."""
    (n, k), how = weight.shape, scheme(weight.scheme)
    words = torch.randint(-(2**31), 2**31, (n, k * how.bits // 32), dtype=torch.int64, device=device).int()
    groups = k // how.group_size if how.group_size else 1
    spread = 0.7 / k**0.5 / (2**how.bits / 12**0.5)
    scale = (spread * (0.5 + torch.rand(groups, n, device=device))).half()
    return GpuMatrix(words, scale, None, k, how.bits, how.group_size)


class Decoder:
    """A program bound to kernels on a device; ValueError, when a step is bound, for a node that has none."""

    def __init__(
        self, program: Program, weights: Weights, *, max_tokens: int, max_seqs: int, max_model_len: int,
        ahead: Ahead, device: str,
    ) -> None:  # fmt: skip
        self.program, self._weights, self._ahead = program, weights, ahead
        self.blocks = -(-max_model_len // BLOCK)
        sizes = {"T": max_tokens, "B": max_seqs, "B+1": max_seqs + 1, "M": self.blocks, "R": max_seqs}
        buffers = [
            torch.zeros(width * max_tokens, dtype=torch.float16, device=device) for width in buffer_widths(program)
        ]
        self.inputs: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = {}
        for name, value in program.values.items():
            shape = [sizes[dim] if isinstance(dim, str) else dim for dim in value.shape]
            if value.dtype == "int32":
                self.inputs[name] = torch.zeros(shape, dtype=torch.int32, device=device)
            elif value.buffer is not None:
                self._values[name] = buffers[value.buffer][: shape[0] * shape[1]].view(shape)
            elif value.dtype == "float32":
                self._values[name] = torch.zeros(shape, dtype=torch.float16, device=device)
        shape = (max_seqs * self.blocks + 1, program.kv[0].num_kv_heads, BLOCK, program.kv[0].head_dim)
        self.caches = [[torch.zeros(shape, dtype=torch.int8, device=device) for _ in range(2)] for _ in program.kv]
        self._rope = [torch.from_numpy(table).to(device) for table in cos_sin(program.ropes["global"], max_model_len)]
        heads = next(int(str(node.attrs["num_heads"])) for node in program.nodes if node.op == "paged_attention")
        self._parts = workspace(max_seqs, heads, program.kv[0].head_dim, torch.device(device))
        self._last = torch.zeros(max_seqs, program.hidden_size, dtype=torch.float16, device=device)
        self._specs = list(kernels().values())
        everywhere = [place for each in CLASSES.values() for place in places(program, ahead.target, each)]
        everywhere += [_of_rows(place, 1) for place in everywhere]  # the head has a row a sequence
        found = [(place.facts, choose(place, self._specs)) for place in everywhere]
        ahead.compile([(spec, facts) for facts, chosen in found if not isinstance(chosen, str) for spec in chosen])

    @property
    def logits(self) -> Tensor:
        """float16 `[max_seqs, V]`."""
        return self._values["logits"]

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads of weights."""
        return sum(matrix.words.nbytes + matrix.scale.nbytes for matrix in self._weights.matrices.values())

    def write(self, inputs: StepInputs) -> None:
        """Copy a step's inputs to the device."""
        for each in fields(inputs):
            self.write_one(each.name, getattr(inputs, each.name))

    def write_one(self, name: str, values: np.ndarray) -> None:
        """Copy the leading part of one input."""
        into = self.inputs[name][: len(values)]
        into = into[:, : values.shape[1]] if values.ndim == 2 else into
        into.copy_(torch.from_numpy(np.ascontiguousarray(values)))

    def bind(self, tokens: int, sequences: int, decodes: bool) -> list[Call]:
        """The calls of a step of these sizes, over buffers that stay."""
        name = "prefill" if not decodes else "decode" if tokens <= FEW_ROWS else "decode-wide"
        nodes = {node.name: node for node in self.program.nodes}
        calls: list[Call] = []
        for place in places(self.program, self._ahead.target, CLASSES[name]):
            calls += self._bind(nodes[place.node], place, tokens, sequences)
        return calls

    def _bind(self, node: Node, place: Place, tokens: int, sequences: int) -> list[Call]:
        values = self._arguments(node, tokens, sequences)
        rows = tokens
        if node.op == "logits":
            place, rows = _of_rows(place, sequences), sequences
            if place.facts["op"] == "embedding":  # the rows that are wanted become the product's
                asked = self.inputs["logits_rows"][:sequences]
                values = {"token_ids": asked, "table": values["source"], "out": values["x"], "scale": 1.0}
        chosen = choose(place, self._specs)
        if isinstance(chosen, str):
            raise ValueError(f"{node.name}: {chosen}")
        sizes = {"rows": rows, "sequences": sequences, "n": values.get("n", 0)}
        return [self._ahead.launch(spec, place.facts, sizes, values).launch for spec in chosen]

    def _arguments(self, node: Node, tokens: int, sequences: int) -> dict[str, Any]:
        """What the node's kernels may ask for, by argument."""
        x = [self.inputs.get(name, self._values.get(name)) for name in node.inputs]
        y = [self._values.get(name) for name in node.outputs]
        first = None if x[0] is None else x[0][:tokens]
        out = None if y[0] is None else y[0][:tokens]
        arrays = {role: self._weights.arrays.get(name) for role, name in node.weights.items()}
        match node.op:
            case "linear" | "logits":
                matrix = self._weights.matrices[node.weights["weight"]]
                n, k = self.program.weights[node.weights["weight"]].shape
                made = {"x": first, "words": matrix.words, "scale": matrix.scale, "zero": matrix.zero, "out": out,
                        "rows": tokens, "n": n, "k": k}  # fmt: skip
                if node.op == "logits":
                    made |= {"source": first, "x": self._last[:sequences], "out": self.logits[:sequences],
                             "rows": sequences, "softcap": node.attrs["softcap"] or 1.0}  # fmt: skip
                return made
            case "rms_norm" | "add_rms_norm":
                made = {
                    "x": first,
                    "weight": arrays["weight"],
                    "y": out,
                    "eps": node.attrs["eps"],
                    "offset": node.attrs["offset"],
                }
                if node.op == "add_rms_norm":
                    made |= {"residual": x[1][:tokens], "residual_out": y[1][:tokens]}
                return made
            case "gated_act":
                return {"gate_up": first, "out": out}
            case "embedding":
                return {"token_ids": first, "table": arrays["table"], "out": out, "scale": node.attrs["scale"]}
        k_cache, v_cache = self.caches[node.layer or 0]
        shared = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": arrays["k_scale"], "v_scale": arrays["v_scale"]}
        if node.op == "qk_norm_rope_kv_write":
            return shared | {
                "qkv": first, "cos": self._rope[0], "sin": self._rope[1],
                "positions": self.inputs["positions"][:tokens],
                "slot_mapping": self.inputs["slot_mapping"][:tokens], "q_out": out, "eps": 1e-5, "offset": 0.0,
            }  # fmt: skip
        return shared | {
            "q": first, "out": out, "block_table": self.inputs["block_table"][:sequences],
            "seq_lens": self.inputs["seq_lens"][:sequences], "partial": self._parts[0], "log_sum": self._parts[1],
            "query_start_loc": self.inputs["query_start_loc"][: sequences + 1], "sequences": sequences,
            "tokens": tokens, "scale": node.attrs["scale"], "softcap": 1.0, "window": NO_WINDOW,
            "table_width": self.blocks,
        }  # fmt: skip


def _of_rows(place: Place, rows: int) -> Place:
    """The place for another number of rows."""
    return replace(place, facts=tuned({**place.facts, "rows": "few" if rows <= FEW_ROWS else "many"}))
