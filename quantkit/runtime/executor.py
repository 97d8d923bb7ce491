"""Executor: a Program bound to weights, buffers and a paged cache, run one step at a time.

Binding happens once, at load; a step only copies its few integers in and runs the bound list. The backend is native
(`cpu`) where the library is there and implements every op, else the torch reference, which says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import PreflightError
from quantkit.models import rope as ropes
from quantkit.program.ir import Program
from quantkit.program.passes import buffer_widths, plan_buffers
from quantkit.program.weights import WeightProvider
from quantkit.runtime.step import StepInputs
from quantkit_kernels import cpu
from quantkit_kernels.arrays import Array, dtype_of
from quantkit_kernels.cache_formats import CACHE_FORMATS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capacity:
    """What an executor preallocates for: tokens, sequences and logits rows of a step, cache blocks, positions."""

    max_tokens: int
    max_seqs: int
    max_rows: int
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def blocks_per_seq(self) -> int:
        """Width of the block table."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True)
class Memory:
    """Everything a backend binds nodes to. Activations by value name, `[capacity, n]`; inputs int32."""

    inputs: dict[str, Array]
    activations: dict[str, Array]
    k_cache: dict[int, Array]
    v_cache: dict[int, Array]
    rope: dict[str, tuple[Array, Array]]


class Backend(Protocol):
    """A bound program."""

    name: str
    weight_bytes: int

    def run(self, tokens: int, sequences: int, rows: int) -> None:
        """One step over what `Memory` holds."""
        ...


class Executor:
    """Runs a Program (or a slice of one).

    Args:
        program: verified; buffers are planned here when they are not yet.
        weights: where its weights come from; each is loaded once, packed for the backend, and let go.
        max_tokens, max_seqs, max_rows: largest step. num_blocks, block_size: the paged cache, block 0 included.
        max_model_len: longest sequence; decides rope tables and the block table's width.
        threads: of the native backend; default: the cores this process may use.
        backend: `auto`, `cpu` (native) or `reference` (torch).
        spill: a folder on disk; packed weights and the cache then lie in a nameless file there, mapped, and do not
            count as anonymous memory. For whole models that are run once; reading them is slower. Native backend only.
        huge_cache: the cache on huge pages: long contexts are read a third faster, and memory is taken by 2 MiB. For
            models that serve.
    """

    def __init__(
        self,
        program: Program,
        weights: WeightProvider,
        *,
        max_tokens: int,
        max_seqs: int,
        num_blocks: int,
        max_model_len: int,
        max_rows: int | None = None,
        block_size: int = 16,
        threads: int | None = None,
        backend: str = "auto",
        spill: Path | None = None,
        huge_cache: bool = False,
    ) -> None:
        if not any(value.buffer is not None for value in program.values.values()):
            program = plan_buffers(program)
        self.program = program
        rows = max_tokens if max_rows is None else max_rows
        self.capacity = Capacity(max_tokens, max_seqs, rows, num_blocks, block_size, max_model_len)
        room = None if spill is None else cpu.Spill(spill)
        allocate = cpu.streamed if huge_cache else cpu.zeroed
        self._memory = _allocate(program, self.capacity, allocate if room is None else room.array)
        self._logits: NDArray[np.float32] | None = self._memory.activations.get("logits")
        self._backend = _bind(program, weights, self._memory, backend, threads, room)

    @property
    def backend_name(self) -> str:
        """`cpu:avx512`, `cpu:avx2`, `cpu:portable` or `reference`."""
        return self._backend.name

    @property
    def weight_bytes(self) -> int:
        """Bytes the bound weights take in memory."""
        return self._backend.weight_bytes

    @property
    def kv_bytes_per_block(self) -> int:
        """Bytes of one cache block over all layers."""
        caches = [*self._memory.k_cache.values(), *self._memory.v_cache.values()]
        return sum(cache[0].nbytes for cache in caches)

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Run one step. Returns logits `[R, V]`, a view that the next step overwrites."""
        rows = self._run(inputs)[2]
        if self._logits is None:
            raise ValueError("this program computes no logits; use run_slice")
        return self._logits[:rows]

    def run_slice(
        self, inputs: StepInputs, activations: Mapping[str, NDArray[np.float32]]
    ) -> dict[str, NDArray[np.float32]]:
        """Run a slice of a program: float32 `[T, n]` activations in, copies of its outputs `[T, n]` or `[R, V]` out."""
        tokens = len(inputs.token_ids)
        for name, value in activations.items():
            self._memory.activations[name][:tokens] = value
        tokens, _, rows = self._run(inputs)
        sizes = {"T": tokens, "R": rows}
        return {
            name: self._memory.activations[name][: sizes[str(self.program.values[name].shape[0])]].copy()
            for name in self.program.outputs
        }

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Layers whose keys and values this program (or slice) keeps."""
        return tuple(self._memory.k_cache)

    def cache(self, layer: int) -> tuple[Array, Array]:
        """Keys and values of one layer's paged cache as stored, `[num_blocks, Hkv, block_size, cell]`."""
        return self._memory.k_cache[layer], self._memory.v_cache[layer]

    def clear_cache(self) -> None:
        """Zero the paged cache, so that nothing of earlier steps is left in it."""
        for cache in (*self._memory.k_cache.values(), *self._memory.v_cache.values()):
            cache.view(np.uint8).fill(0)

    def _run(self, inputs: StepInputs) -> tuple[int, int, int]:
        tokens, sequences, rows = len(inputs.token_ids), len(inputs.seq_lens), len(inputs.logits_rows)
        cap = self.capacity
        if tokens > cap.max_tokens or sequences > cap.max_seqs or rows > cap.max_rows:
            raise ValueError(
                f"a step of {tokens} tokens, {sequences} sequences, {rows} rows exceeds "
                f"{cap.max_tokens}, {cap.max_seqs}, {cap.max_rows}"
            )
        arrays = self._memory.inputs
        arrays["token_ids"][:tokens] = inputs.token_ids
        arrays["positions"][:tokens] = inputs.positions
        arrays["slot_mapping"][:tokens] = inputs.slot_mapping
        arrays["query_start_loc"][: sequences + 1] = inputs.query_start_loc
        arrays["seq_lens"][:sequences] = inputs.seq_lens
        arrays["block_table"][:sequences, : inputs.block_table.shape[1]] = inputs.block_table
        arrays["logits_rows"][:rows] = inputs.logits_rows
        self._backend.run(tokens, sequences, rows)
        return tokens, sequences, rows


def _allocate(program: Program, capacity: Capacity, of_cache: cpu.Allocate) -> Memory:
    cap = capacity
    sizes = {"T": cap.max_tokens, "B": cap.max_seqs, "B+1": cap.max_seqs + 1, "M": cap.blocks_per_seq}
    sizes["R"] = cap.max_rows
    inputs: dict[str, Array] = {}
    activations: dict[str, Array] = {}
    int32, float32 = np.dtype(np.int32), np.dtype(np.float32)
    buffers = [cpu.zeroed(width * cap.max_tokens, dtype=float32) for width in buffer_widths(program)]
    for name, value in program.values.items():
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in value.shape]
        if value.dtype == "int32":
            inputs[name] = cpu.zeroed(*shape, dtype=int32)
        elif value.buffer is not None:
            activations[name] = buffers[value.buffer][: shape[0] * shape[1]].reshape(shape)
        elif value.dtype == "float32":
            activations[name] = cpu.zeroed(*shape, dtype=float32)
    caches: list[dict[int, Array]] = [{}, {}]
    attending = {node.layer for node in program.nodes if node.op == "paged_attention" and node.layer is not None}
    for layer in sorted(attending):
        kv = program.kv[layer]
        for side in caches:
            kind = CACHE_FORMATS[kv.format]
            paged = (cap.num_blocks, kv.num_kv_heads, cap.block_size, kind.cell(kv.head_dim))
            side[layer] = of_cache(*paged, dtype=dtype_of(kind.dtype))
    used = {str(node.attrs["rope"]) for node in program.nodes if "rope" in node.attrs}
    tables = {name: ropes.cos_sin(program.ropes[name], cap.max_model_len) for name in sorted(used)}
    return Memory(inputs, activations, caches[0], caches[1], tables)


def _bind(
    program: Program,
    weights: WeightProvider,
    memory: Memory,
    backend: str,
    threads: int | None,
    spill: cpu.Spill | None,
) -> Backend:
    if backend not in ("auto", "cpu", "reference"):
        raise PreflightError(f"unknown backend {backend!r}", next="Known: auto, cpu, reference")
    if backend != "reference":
        from quantkit.runtime import backend_cpu

        usable, reason = backend_cpu.can_run(program)
        if usable:
            return backend_cpu.CpuBackend(program, weights, memory, threads, spill)
        if backend == "cpu":
            raise PreflightError(f"the native CPU backend cannot run this program: {reason}")
        log.warning("running on the torch reference, many times slower: %s", reason)
    from quantkit.runtime import backend_reference

    return backend_reference.ReferenceBackend(program, weights, backend_reference.TensorMemory.of(memory))
