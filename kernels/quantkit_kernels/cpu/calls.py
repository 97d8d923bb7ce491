"""A step as a flat list of native calls over preallocated arrays, run by one native call."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from quantkit_kernels.arrays import Array, dtype_of
from quantkit_kernels.cache_formats import CACHE_FORMATS
from quantkit_kernels.cpu.library import ISA_BITS, Node, last_error, library, supported_isas
from quantkit_kernels.cpu.library import isa as default_isa
from quantkit_kernels.cpu.memory import zeroed
from quantkit_kernels.cpu.packing import DTYPE_CODES, FLOAT32, FLOATS, INT8, PackedMatrix
from quantkit_kernels.cpu.threads import usable_threads

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_CAPACITY = 14  # field of Node.i, see src/args.h
COMPUTE = ("exact", "int8")
_BLOCK, _STEP = 128, 64  # kBlock and kStep of src/args.h
_MOST_CHANNELS = 1024  # of a head whose sums of integer products fit 32 bits
_ROW_UNIT = 16
_INT32 = np.dtype(np.int32)


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


def _check(name: str, array: Array, dtypes: Sequence[np.dtype[Any]], *shape: int | None) -> Array:
    """The array, if it is contiguous, of one of the dtypes and of the shape (None: any length)."""
    if array.dtype not in dtypes:
        raise ValueError(f"{name} is {array.dtype}, expected {' or '.join(str(d) for d in dtypes)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous")
    if array.ndim != len(shape) or any(w is not None and w != s for w, s in zip(shape, array.shape, strict=True)):
        wanted = ", ".join("*" if w is None else str(w) for w in shape)
        raise ValueError(f"{name} has shape {list(array.shape)}, expected [{wanted}]")
    return array


def _f32(name: str, array: Array, *shape: int | None) -> Array:
    return _check(name, array, (FLOAT32,), *shape)


def _i32(name: str, array: Array, *shape: int | None) -> Array:
    return _check(name, array, (_INT32,), *shape)


class CallList:
    """Native calls in order; `run` executes them all, on rows 0..tokens-1 (or 0..rows-1 for logits) of their arrays.

    Activations are float32 `[capacity, width]`, index arrays int32; rows beyond the counts are neither read nor
    written. Arrays are checked when a call is added (ValueError) and kept alive by the list. Each row's result is
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
        self._arrays: list[Array] = []
        self._handle: int | None = None
        self._finalizer: weakref.finalize | None = None
        self._scratch: dict[tuple[np.dtype[Any], int], Array] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def _append(
        self,
        op: Op,
        capacity: int,
        arrays: Sequence[Array | None],
        ints: Sequence[int],
        floats: Sequence[float] = (),
    ) -> None:
        node = Node(op=op)
        for index, array in enumerate(arrays):
            node.p[index] = None if array is None else array.ctypes.data
        for index, value in enumerate(ints):
            node.i[index] = value
        for index, number in enumerate(floats):
            node.f[index] = number
        node.i[_CAPACITY] = capacity
        self._release()
        self._nodes.append(node)
        self._arrays.extend(array for array in arrays if array is not None)

    def embedding(self, token_ids: Array, table: Array, out: Array, scale: float = 1.0) -> None:
        """`out[t] = table[token_ids[t]] * scale`; table float32, float16 or bfloat16 `[V, H]`."""
        _check("table", table, FLOATS, None, None)
        vocab, hidden = table.shape
        capacity = min(_i32("token_ids", token_ids, None).shape[0], _f32("out", out, None, hidden).shape[0])
        self._append(
            Op.EMBEDDING, capacity, (token_ids, table, out), (hidden, vocab, DTYPE_CODES[table.dtype]), (scale,)
        )

    def rms_norm(self, x: Array, weight: Array, out: Array, eps: float, offset: float = 0.0) -> None:
        """`out = rms_norm(x)`; x, out `[T, H]` (may be one array), weight `[H]`."""
        hidden = _f32("weight", weight, None).shape[0]
        capacity = min(_f32("x", x, None, hidden).shape[0], _f32("out", out, None, hidden).shape[0])
        self._append(Op.RMS_NORM, capacity, (x, None, weight, out, None), (hidden,), (eps, offset))

    def add_rms_norm(
        self,
        x: Array,
        residual: Array,
        weight: Array,
        out: Array,
        residual_out: Array,
        eps: float,
        offset: float = 0.0,
    ) -> None:
        """`residual_out = x + residual; out = rms_norm(residual_out)`; all `[T, H]`, in place allowed."""
        hidden = _f32("weight", weight, None).shape[0]
        named = {"x": x, "residual": residual, "out": out, "residual_out": residual_out}
        capacity = min(_f32(name, array, None, hidden).shape[0] for name, array in named.items())
        self._append(Op.ADD_RMS_NORM, capacity, (x, residual, weight, out, residual_out), (hidden,), (eps, offset))

    def add(self, x: Array, y: Array, out: Array) -> None:
        """`out = x + y`; all `[T, H]`, in place allowed."""
        _f32("x", x, None, None)
        hidden = x.shape[1]
        capacity = min(x.shape[0], _f32("y", y, None, hidden).shape[0], _f32("out", out, None, hidden).shape[0])
        self._append(Op.ADD, capacity, (x, y, out), (hidden,))

    def linear(self, x: Array, packed: PackedMatrix, bias: Array | None, out: Array, compute: str = "exact") -> None:
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
        hidden: Array,
        logits_rows: Array,
        packed: PackedMatrix,
        out: Array,
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
        x: Array,
        packed: PackedMatrix,
        bias: Array | None,
        out: Array,
        row_index: Array | None,
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
        self, x: Array, row_index: Array | None, packed: PackedMatrix, capacity: int
    ) -> tuple[Array, Array, Array]:
        """The call that quantizes x for a product with `packed`: codes, scales and sums, which the next call reads.

        They are scratch, which the next product of the same size overwrites.
        """
        if not packed.holds_codes:
            raise ValueError("int8 compute needs a weight of 4 or 8 bits")
        group = packed.in_features // packed.groups
        blocks = packed.groups * -(-group // _BLOCK)
        stride = packed.groups * -(-group // _STEP) * _STEP
        rows = -(-capacity // _ROW_UNIT) * _ROW_UNIT
        sizes = ((INT8, rows * stride), (FLOAT32, rows * blocks), (_INT32, rows * blocks))
        for dtype, count in sizes:
            if (dtype, count) not in self._scratch:
                self._scratch[dtype, count] = zeroed(count, dtype=dtype)
        codes, scale, total = (self._scratch[size] for size in sizes)
        made = (codes, scale, total)
        last = self._nodes[-1] if self._nodes and row_index is None else None
        makes_x = last is not None and last.op in _OUTPUT and last.p[_OUTPUT[last.op]] == x.ctypes.data
        if last is not None and makes_x and last.i[0] == packed.in_features:  # not a view of another width
            for index, array in enumerate(made):  # it makes the codes of its rows while they are at hand
                last.p[_AFTER + index] = array.ctypes.data
            last.i[_AFTER] = packed.groups
            self._arrays.extend(made)
            return made
        ints = (packed.in_features, packed.groups, x.shape[0], row_index is not None)
        self._append(Op.QUANTIZE_ROWS, capacity, (x, row_index, *made), ints)
        return made

    def gated_act(self, gate_up: Array, out: Array, activation: str) -> None:
        """`out = act(gate_up[:, :I]) * gate_up[:, I:]`; gate_up `[T, 2·I]`, out `[T, I]`; silu or gelu_tanh."""
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}: known are {', '.join(ACTIVATIONS)}")
        inner = _f32("out", out, None, None).shape[1]
        capacity = min(out.shape[0], _f32("gate_up", gate_up, None, 2 * inner).shape[0])
        self._append(Op.GATED_ACT, capacity, (gate_up, out), (inner, ACTIVATIONS[activation]))

    def qk_norm_rope_kv_write(
        self,
        qkv: Array,
        positions: Array,
        slot_mapping: Array,
        cos: Array,
        sin: Array,
        q_norm: Array | None,
        k_norm: Array | None,
        eps: float,
        offset: float,
        k_cache: Array,
        v_cache: Array,
        k_scale: Array | None,
        v_scale: Array | None,
        q_out: Array,
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
        q: Array,
        k_cache: Array,
        v_cache: Array,
        k_scale: Array | None,
        v_scale: Array | None,
        block_table: Array,
        query_start_loc: Array,
        seq_lens: Array,
        out: Array,
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
    k_cache: Array,
    v_cache: Array,
    k_scale: Array | None,
    v_scale: Array | None,
    num_kv_heads: int,
    head_dim: int,
    cache_format: str,
) -> None:
    if cache_format not in CACHE_FORMATS:
        raise ValueError(f"unknown KV cache format {cache_format!r}: known are {', '.join(CACHE_FORMATS)}")
    kind = CACHE_FORMATS[cache_format]
    _check("k_cache", k_cache, (dtype_of(kind.dtype),), None, num_kv_heads, None, kind.cell(head_dim))
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
