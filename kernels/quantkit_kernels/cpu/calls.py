"""A step as a flat list of native calls over preallocated tensors, run by one native call."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from quantkit_kernels.cache_formats import CACHE_FORMATS
from quantkit_kernels.cpu.library import ISA_BITS, Node, last_error, library, supported_isas
from quantkit_kernels.cpu.library import isa as default_isa
from quantkit_kernels.cpu.packing import DTYPE_CODES, PackedMatrix
from quantkit_kernels.cpu.threads import usable_threads
from quantkit_kernels.ops.linear import BLOCK

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_CAPACITY = 14  # field of Node.i, see src/args.h
COMPUTE = ("exact", "int8")
_STEP = 64
_MOST_CHANNELS = 1024  # of a head whose sums of integer products fit 32 bits
_ROW_UNIT = 16
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Op(IntEnum):
    """Op codes, as in src/abi.h."""

    EMBEDDING = 0
    RMS_NORM = 1
    ADD_RMS_NORM = 2
    ADD = 3
    LINEAR = 4
    GATED_ACT = 5
    QK_NORM_ROPE_KV_WRITE = 6
    PAGED_ATTENTION = 7
    LOGITS = 8
    QUANTIZE_ROWS = 9


_OUTPUT = {Op.RMS_NORM: 3, Op.ADD_RMS_NORM: 3, Op.GATED_ACT: 1}
"""Calls that can quantize their own rows: where in Node.p their output lies."""
_AFTER = 8  # fields of Node.p and Node.i, see src/args.h


def _check(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], *shape: int | None) -> Tensor:
    """The tensor, if it is contiguous, on the CPU, of one of the dtypes and of the shape (None: any length)."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(str(d) for d in dtypes)}")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and on the CPU")
    if tensor.ndim != len(shape) or any(w is not None and w != s for w, s in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("*" if w is None else str(w) for w in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected [{wanted}]")
    return tensor


def _f32(name: str, tensor: Tensor, *shape: int | None) -> Tensor:
    return _check(name, tensor, (torch.float32,), *shape)


def _i32(name: str, tensor: Tensor, *shape: int | None) -> Tensor:
    return _check(name, tensor, (torch.int32,), *shape)


class CallList:
    """Native calls in order; `run` executes them all, on rows 0..tokens-1 (or 0..rows-1 for logits) of their tensors.

    Activations are float32 `[capacity, width]`, index tensors int32; rows beyond the counts are neither read nor
    written. Tensors are checked when a call is added (ValueError) and kept alive by the list. Each row's result is
    bit-identical whatever the counts and the number of threads. Threads that run one list take turns.

    threads: None for all the process may use; isa: None for the best one (see `quantkit_kernels.cpu.isa`).
    """

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"a step needs at least one thread, not {threads}")
        if isa is not None and isa not in supported_isas():
            raise ValueError(f"instruction set {isa} cannot run here; {', '.join(supported_isas())} can")
        self.threads = threads or usable_threads()
        self.isa = isa or default_isa()
        self._library = library()
        self._nodes: list[Node] = []
        self._tensors: list[Tensor] = []
        self._handle: int | None = None
        self._finalizer: weakref.finalize | None = None
        self._scratch: dict[tuple[torch.dtype, int], Tensor] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def _append(
        self,
        op: Op,
        capacity: int,
        tensors: Sequence[Tensor | None],
        ints: Sequence[int],
        floats: Sequence[float] = (),
    ) -> None:
        node = Node(op=op)
        for index, tensor in enumerate(tensors):
            node.p[index] = None if tensor is None else tensor.data_ptr()
        for index, value in enumerate(ints):
            node.i[index] = value
        for index, number in enumerate(floats):
            node.f[index] = number
        node.i[_CAPACITY] = capacity
        self._release()
        self._nodes.append(node)
        self._tensors.extend(tensor for tensor in tensors if tensor is not None)

    def embedding(self, token_ids: Tensor, table: Tensor, out: Tensor, scale: float = 1.0) -> None:
        """`out[t] = table[token_ids[t]] * scale`; table float32, float16 or bfloat16 `[V, H]`."""
        _check("table", table, _FLOATS, None, None)
        vocab, hidden = table.shape
        capacity = min(_i32("token_ids", token_ids, None).shape[0], _f32("out", out, None, hidden).shape[0])
        self._append(
            Op.EMBEDDING, capacity, (token_ids, table, out), (hidden, vocab, DTYPE_CODES[table.dtype]), (scale,)
        )

    def rms_norm(self, x: Tensor, weight: Tensor, out: Tensor, eps: float, offset: float = 0.0) -> None:
        """`out = rms_norm(x)`; x, out `[T, H]` (may be one tensor), weight `[H]`."""
        hidden = _f32("weight", weight, None).shape[0]
        capacity = min(_f32("x", x, None, hidden).shape[0], _f32("out", out, None, hidden).shape[0])
        self._append(Op.RMS_NORM, capacity, (x, None, weight, out, None), (hidden,), (eps, offset))

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        out: Tensor,
        residual_out: Tensor,
        eps: float,
        offset: float = 0.0,
    ) -> None:
        """`residual_out = x + residual; out = rms_norm(residual_out)`; all `[T, H]`, in place allowed."""
        hidden = _f32("weight", weight, None).shape[0]
        named = {"x": x, "residual": residual, "out": out, "residual_out": residual_out}
        capacity = min(_f32(name, tensor, None, hidden).shape[0] for name, tensor in named.items())
        self._append(Op.ADD_RMS_NORM, capacity, (x, residual, weight, out, residual_out), (hidden,), (eps, offset))

    def add(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        """`out = x + y`; all `[T, H]`, in place allowed."""
        _f32("x", x, None, None)
        hidden = x.shape[1]
        capacity = min(x.shape[0], _f32("y", y, None, hidden).shape[0], _f32("out", out, None, hidden).shape[0])
        self._append(Op.ADD, capacity, (x, y, out), (hidden,))

    def linear(self, x: Tensor, packed: PackedMatrix, bias: Tensor | None, out: Tensor, compute: str = "exact") -> None:
        """`out = x · wᵀ + bias`; x `[T, K]`, packed `[N, K]`, bias `[N]` or None, out `[T, N]`.

        compute: `exact` in float32, or `int8`: x quantized on the fly, integer products
        (`ops.linear.of_codes`; packed must hold codes).
        """
        rows, columns = packed.out_features, packed.in_features
        capacity = min(_f32("x", x, None, columns).shape[0], _f32("out", out, None, rows).shape[0])
        if bias is not None:
            _f32("bias", bias, rows)
        self._append_product(Op.LINEAR, capacity, x, packed, bias, out, None, 0.0, compute)

    def logits(
        self,
        hidden: Tensor,
        logits_rows: Tensor,
        packed: PackedMatrix,
        out: Tensor,
        softcap: float | None = None,
        compute: str = "exact",
    ) -> None:
        """`out[r] = softcap(hidden[logits_rows[r]] · wᵀ)`; hidden `[T, H]`, logits_rows `[R]`, out `[R, V]`.

        compute: as for `linear`.
        """
        _f32("hidden", hidden, None, packed.in_features)
        capacity = min(
            _i32("logits_rows", logits_rows, None).shape[0], _f32("out", out, None, packed.out_features).shape[0]
        )
        self._append_product(Op.LOGITS, capacity, hidden, packed, None, out, logits_rows, softcap or 0.0, compute)

    def _append_product(
        self,
        op: Op,
        capacity: int,
        x: Tensor,
        packed: PackedMatrix,
        bias: Tensor | None,
        out: Tensor,
        row_index: Tensor | None,
        softcap: float,
        compute: str,
    ) -> None:
        if compute not in COMPUTE:
            raise ValueError(f"unknown compute {compute!r}: known are {', '.join(COMPUTE)}")
        codes = None if compute == "exact" else self._quantize_rows(x, row_index, packed, capacity)
        scale_dtype = DTYPE_CODES[packed.scale.dtype] if packed.scale is not None else 0
        self._append(
            op,
            capacity,
            (x, packed.data, packed.scale, packed.zero, bias, out, row_index, *(codes or ())),
            (packed.in_features, packed.out_features, packed.groups, packed.dtype, scale_dtype, x.shape[0]),
            (softcap,),
        )

    def _quantize_rows(
        self, x: Tensor, row_index: Tensor | None, packed: PackedMatrix, capacity: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The call that quantizes x for a product with `packed`: codes, scales and sums, which the next call reads.

        They are scratch, which the next product of the same size overwrites.
        """
        if not packed.holds_codes:
            raise ValueError("int8 compute needs a weight of 4 or 8 bits")
        group = packed.in_features // packed.groups
        blocks = packed.groups * -(-group // BLOCK)
        stride = packed.groups * -(-group // _STEP) * _STEP
        rows = -(-capacity // _ROW_UNIT) * _ROW_UNIT
        sizes = ((torch.int8, rows * stride), (torch.float32, rows * blocks), (torch.int32, rows * blocks))
        for dtype, count in sizes:
            if (dtype, count) not in self._scratch:
                self._scratch[dtype, count] = torch.zeros(count, dtype=dtype)
        codes, scale, total = (self._scratch[size] for size in sizes)
        made = (codes, scale, total)
        last = self._nodes[-1] if self._nodes and row_index is None else None
        makes_x = last is not None and last.op in _OUTPUT and last.p[_OUTPUT[last.op]] == x.data_ptr()
        if last is not None and makes_x and last.i[0] == packed.in_features:  # not a view of another width
            for index, tensor in enumerate(made):  # it makes the codes of its rows while they are at hand
                last.p[_AFTER + index] = tensor.data_ptr()
            last.i[_AFTER] = packed.groups
            self._tensors.extend(made)
            return made
        ints = (packed.in_features, packed.groups, x.shape[0], row_index is not None)
        self._append(Op.QUANTIZE_ROWS, capacity, (x, row_index, *made), ints)
        return made

    def gated_act(self, gate_up: Tensor, out: Tensor, activation: str) -> None:
        """`out = act(gate_up[:, :I]) * gate_up[:, I:]`; gate_up `[T, 2·I]`, out `[T, I]`; silu or gelu_tanh."""
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}: known are {', '.join(ACTIVATIONS)}")
        inner = _f32("out", out, None, None).shape[1]
        capacity = min(out.shape[0], _f32("gate_up", gate_up, None, 2 * inner).shape[0])
        self._append(Op.GATED_ACT, capacity, (gate_up, out), (inner, ACTIVATIONS[activation]))

    def qk_norm_rope_kv_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        offset: float,
        k_cache: Tensor,
        v_cache: Tensor,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        q_out: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cache_format: str,
    ) -> None:
        """Norm (where weights are given) and rotate q and k, write k and v to the cache, q to q_out `[T, Hq·D]`.

        Shapes as in `ops.qk_norm_rope_kv_write.reference`; slot -1 is skipped.
        """
        _f32("cos", cos, None, None)
        half = cos.shape[1]
        if 2 * half > head_dim:
            raise ValueError(f"cos covers {2 * half} channels, a head has {head_dim}")
        _f32("sin", sin, cos.shape[0], half)
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                _f32(name, norm, head_dim)
        _check_cache(k_cache, v_cache, k_scale, v_scale, num_kv_heads, head_dim, cache_format)
        capacity = min(
            _f32("qkv", qkv, None, (num_heads + 2 * num_kv_heads) * head_dim).shape[0],
            _f32("q_out", q_out, None, num_heads * head_dim).shape[0],
            _i32("positions", positions, None).shape[0],
            _i32("slot_mapping", slot_mapping, None).shape[0],
        )
        self._append(
            Op.QK_NORM_ROPE_KV_WRITE,
            capacity,
            (qkv, positions, slot_mapping, cos, sin, q_norm, k_norm, k_cache, v_cache, k_scale, v_scale, q_out),
            (
                num_heads,
                num_kv_heads,
                head_dim,
                half,
                CACHE_FORMATS[cache_format].code,
                k_cache.shape[2],
                k_cache.shape[0],
                cos.shape[0],
            ),
            (eps, offset),
        )

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cache_format: str,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        """Causal attention over the paged cache; shapes as in `ops.paged_attention.reference`, out `[T, Hq·D]`."""
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads do not share {num_kv_heads} key-value heads evenly")
        if window is not None and window < 1:
            raise ValueError(f"a window covers at least one position, not {window}")
        _check_cache(k_cache, v_cache, k_scale, v_scale, num_kv_heads, head_dim, cache_format)
        width = num_heads * head_dim
        _i32("block_table", block_table, None, None)
        sequences = min(
            block_table.shape[0],
            _i32("query_start_loc", query_start_loc, None).shape[0] - 1,
            _i32("seq_lens", seq_lens, None).shape[0],
        )
        capacity = min(_f32("q", q, None, width).shape[0], _f32("out", out, None, width).shape[0])
        self._append(
            Op.PAGED_ATTENTION,
            capacity,
            (q, k_cache, v_cache, k_scale, v_scale, block_table, query_start_loc, seq_lens, out),
            (
                num_heads,
                num_kv_heads,
                head_dim,
                CACHE_FORMATS[cache_format].code,
                k_cache.shape[2],
                k_cache.shape[0],
                block_table.shape[1],
                window or 0,
                sequences,
            ),
            (scale, softcap or 0.0),
        )

    def run(self, tokens: int, sequences: int, rows: int) -> None:
        """Run every call once. Raises IndexError, having computed nothing, where a count or index is out of range."""
        if self._library.qk_list_run(self._native(), tokens, sequences, rows):
            raise IndexError(last_error())

    def time(self, tokens: int, sequences: int, rows: int) -> list[tuple[str, float]]:
        """A step like `run`, node by node: each call's op and the seconds it took, the team's start included."""
        seconds = (ctypes.c_double * len(self._nodes))()
        if self._library.qk_list_time(self._native(), tokens, sequences, rows, seconds):
            raise IndexError(last_error())
        return [(Op(node.op).name.lower(), taken) for node, taken in zip(self._nodes, seconds, strict=True)]

    def _native(self) -> int:
        """The list's native form, made on first use: all memory a step needs is allocated here."""
        if self._handle is None:
            nodes = (Node * len(self._nodes))(*self._nodes)
            handle = self._library.qk_list_create(
                ctypes.byref(nodes), len(self._nodes), ISA_BITS[self.isa], self.threads
            )
            if not handle:
                raise RuntimeError(last_error())
            self._handle = handle
            self._finalizer = weakref.finalize(self, self._library.qk_list_destroy, handle)
        return self._handle

    def _release(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._handle = self._finalizer = None


def _check_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    num_kv_heads: int,
    head_dim: int,
    cache_format: str,
) -> None:
    if cache_format not in CACHE_FORMATS:
        raise ValueError(f"unknown KV cache format {cache_format!r}: known are {', '.join(CACHE_FORMATS)}")
    kind = CACHE_FORMATS[cache_format]
    _check("k_cache", k_cache, (getattr(torch, kind.dtype),), None, num_kv_heads, None, kind.cell(head_dim))
    _check("v_cache", v_cache, (k_cache.dtype,), *k_cache.shape)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if kind.scaled and scale is None:
            raise ValueError(f"a KV cache in {cache_format} needs {name}, float32 [{num_kv_heads}, {head_dim}]")
        if scale is not None:
            _f32(name, scale, num_kv_heads, head_dim)
    if kind.in_integers and head_dim > _MOST_CHANNELS:
        raise ValueError(f"heads over an INT8 KV cache have at most {_MOST_CHANNELS} channels, not {head_dim}")
    if math.prod(k_cache.shape[:1] + k_cache.shape[2:3]) >= 2**31:
        raise ValueError("a KV cache may hold at most 2^31 - 1 slots")
