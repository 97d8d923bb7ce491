"""What a step of a program takes at best on a card, from bytes and operations alone.

An op takes as long as its bytes at the memory's rate or its products at theirs, whichever is longer (Williams,
Waterman, Patterson, "Roofline", CACM 52(4), 2009), and the launch of a kernel. Bytes are those that must move once:
weights in the kernels' layout, cells of the cache that the step sees, activations in and out; nothing is taken to stay
in a cache of the card. Weights of any bits are multiplied in FP16, after the kernels have dequantized them. Nothing
else counts: kernels reach a share of the peaks, so what is measured comes out longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quantkit.compile.cards import Card
from quantkit.compile.places import BLOCK_SIZE
from quantkit.formats.schemes import Scheme, scheme
from quantkit.program.ir import Node, Program, Value, Weight
from quantkit_kernels.triton.layout.packing import PADDING

LAUNCH_SECONDS = 2e-6
"""Assumed for each op, not measured: a kernel of a replayed graph starts, drains and lets the next one start."""
Bound = Literal["bytes", "operations", "launch"]
_ACTIVATION, _INDEX, _NORM, _BIAS = 2, 4, 4, 2
"""Bytes of an element: activations and biases in FP16, step inputs in int32, norms, KV scales and rope in FP32."""


@dataclass(frozen=True)
class Step:
    """A step's sequences. counts: tokens that each brings. lengths: positions it holds after them."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]

    @staticmethod
    def decode(sequences: int, context: int) -> Step:
        """One token of each sequence, the last of `context` positions."""
        return Step((1,) * sequences, (context,) * sequences)

    @staticmethod
    def prefill(tokens: int, longest: int) -> Step:
        """Whole prompts: as many of `longest` tokens as `tokens` hold, and one of the rest."""
        whole, rest = divmod(tokens, longest)
        prompts = (longest,) * whole + ((rest,) if rest else ())
        return Step(prompts, prompts)

    @property
    def tokens(self) -> int:
        """Rows of the step."""
        return sum(self.counts)

    def pairs(self, window: int | None) -> int:
        """(query, key) pairs that attention sees, each token all positions up to its own or the last `window`."""
        return sum(
            _seen(length, window) - _seen(length - count, window)
            for count, length in zip(self.counts, self.lengths, strict=True)
        )

    def cells(self, window: int | None) -> int:
        """Positions that attention reads from the cache."""
        return sum(
            length if window is None else min(length, window + count - 1)
            for count, length in zip(self.counts, self.lengths, strict=True)
        )


def _seen(length: int, window: int | None) -> int:
    """Pairs of the first `length` tokens of a sequence: 1 + 2 + ..., at most `window` each."""
    grows = length if window is None else min(length, window)
    return grows * (grows + 1) // 2 + (length - grows) * (window or 0)


@dataclass(frozen=True)
class Work:
    """bytes: read and written. operations: of matrix products, a multiply-add being two."""

    bytes: int
    operations: int


@dataclass(frozen=True)
class OpTime:
    """The ops of one kind in a step, together. op: the matrices' group (`qkv`, `down`, `lm_head`), else the op's name.

    bound: which of the three takes the longest.
    """

    op: str
    launches: int
    bytes: int
    operations: int
    seconds: float
    bound: Bound


@dataclass(frozen=True)
class StepTime:
    """A step at best, and its ops in the order in which the program first runs them."""

    seconds: float
    bytes: int
    operations: int
    ops: tuple[OpTime, ...]


def step_time(program: Program, step: Step, card: Card, bits: Mapping[str, float] | None = None) -> StepTime:
    """The time of a step of a fused program on a card.

    bits: a weight's, by group, scales counted (`layout_bits`); groups that it leaves out take their scheme's.
    """
    given = bits or {}
    kinds: dict[str, list[Work]] = {}
    for node in program.nodes:
        kinds.setdefault(_kind(node, program), []).append(node_work(node, program, step, given))
    ops = tuple(_together(kind, works, card) for kind, works in kinds.items())
    return StepTime(sum(op.seconds for op in ops), sum(op.bytes for op in ops), sum(op.operations for op in ops), ops)


def _together(kind: str, works: list[Work], card: Card) -> OpTime:
    moved, operations = sum(work.bytes for work in works), sum(work.operations for work in works)
    parts: dict[Bound, float] = {
        "bytes": moved / card.bandwidth,
        "operations": operations / card.fp16,
        "launch": len(works) * LAUNCH_SECONDS,
    }
    longer = sum(max(work.bytes / card.bandwidth, work.operations / card.fp16) for work in works)
    bound = max(parts, key=lambda part: parts[part])
    return OpTime(kind, len(works), moved, operations, longer + parts["launch"], bound)


def _kind(node: Node, program: Program) -> str:
    weight = program.weights.get(node.weights.get("weight", ""))
    return node.op if weight is None or weight.group is None else weight.group.rpartition(".")[2]


def node_work(node: Node, program: Program, step: Step, bits: Mapping[str, float] | None = None) -> Work:
    """Bytes and operations of one op in a step; `bits` as for `step_time`."""
    moved = sum(_value_bytes(program.values[name], step) for name in (*node.inputs, *node.outputs))
    operations = 0
    for role, name in node.weights.items():
        weight = program.weights[name]
        if weight.kind == "matrix":
            moved += matrix_bytes(weight, (bits or {}).get(weight.group or ""))
            rows = len(step.counts) if node.op == "logits" else step.tokens
            operations += 2 * rows * weight.shape[0] * weight.shape[1]
        elif weight.kind == "table":
            moved += step.tokens * weight.shape[1] * (4 if program.source_dtype == "float32" else 2)
        else:
            moved += math.prod(weight.shape) * (_BIAS if role == "bias" else _NORM)
    match node.op:
        case "logits":  # of its input it reads the rows whose logits are wanted
            moved -= (step.tokens - len(step.counts)) * program.hidden_size * _ACTIVATION
        case "rope" | "qk_norm_rope_kv_write":
            moved += step.tokens * program.ropes[str(node.attrs["rope"])].rotary_dim * _NORM
    if node.op in ("kv_write", "qk_norm_rope_kv_write"):
        moved += step.tokens * program.kv[node.layer or 0].token_bytes
    elif node.op == "paged_attention":
        kv = program.kv[node.layer or 0]
        moved += step.cells(kv.window) * kv.token_bytes
        operations = 4 * step.pairs(kv.window) * int(node.attrs["num_heads"] or 0) * kv.head_dim
    return Work(moved, operations)


def _value_bytes(value: Value, step: Step) -> int:
    """Bytes of an activation or a step input; the cache's are counted by what the op sees of it."""
    if value.dtype == "state":
        return 0
    sizes = {
        "T": step.tokens,
        "B": len(step.counts),
        "B+1": len(step.counts) + 1,
        "R": len(step.counts),
        "M": -(-max(step.lengths) // BLOCK_SIZE),
    }
    count = math.prod(sizes[dim] if isinstance(dim, str) else dim for dim in value.shape)
    return count * (_INDEX if value.dtype == "int32" else _ACTIVATION)


def matrix_bytes(weight: Weight, bits: float | None = None) -> int:
    """Bytes of a matrix as the kernels read it: its scheme's, or at `bits` a weight; quantized rows are padded."""
    rows, columns = weight.shape
    bits = layout_bits(scheme(weight.scheme), columns) if bits is None else bits
    return round(rows * (columns if bits >= 16 else _padded(columns)) * bits / 8)


def layout_bits(how: Scheme, columns: int) -> float:
    """Bits a weight in the kernels' layout (`quantkit_kernels.triton.layout`): 16 more a scale and a zero point."""
    if not how.quantized:
        return 16.0
    return how.bits + (16 if how.symmetric else 32) / (how.group_size or _padded(columns))


def _padded(columns: int) -> int:
    return -(-columns // PADDING) * PADDING
