"""A slice of a Program as a differentiable function: what sensitivity takes gradients through."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quantkit.formats.matrix import QuantizedMatrix
from quantkit.models import rope as ropes
from quantkit.program.ir import Program, Weight
from quantkit.program.weights import WeightProvider
from quantkit.runtime.backend_reference import ReferenceBackend, TensorMemory
from quantkit.runtime.step import StepInputs
from quantkit_kernels.arrays import Array, cast
from quantkit_kernels.cache_formats import CACHE_FORMATS
from quantkit_kernels.tensors import as_tensor


class DifferentiableSlice:
    """Runs a slice of an unquantized program on the torch reference, every value kept in autograd's graph.

    Matrices are held in float32, so that no step converts them again; weights take no gradients.

    Args:
        program: a slice with its cache in a float format.
        weights: where its weights come from.
        max_model_len: longest sequence; decides the rope tables.
        block_size: positions of one cache block.
    """

    def __init__(self, program: Program, weights: WeightProvider, *, max_model_len: int, block_size: int = 16) -> None:
        self.program = program
        self._block_size = block_size
        names = {str(node.attrs["rope"]) for node in program.nodes if "rope" in node.attrs}
        self._memory = TensorMemory()
        for name in sorted(names):
            cos, sin = ropes.cos_sin(program.ropes[name], max_model_len)
            self._memory.rope[name] = as_tensor(cos), as_tensor(sin)
        self._attending = {n.layer for n in program.nodes if n.op == "paged_attention" and n.layer is not None}
        self._backend = ReferenceBackend(program, _Float32(weights), self._memory)

    def run(self, inputs: StepInputs, activations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every value of the slice by name: its inputs, what its nodes make, its outputs.

        activations: float32 `[T, n]` by name; those that require gradients get them. The cache starts empty: a step
        holds whole sequences.
        """
        blocks = int(inputs.block_table.max(initial=0)) + 1
        for layer in self._attending:
            kv = self.program.kv[layer]
            shape = (blocks, kv.num_kv_heads, self._block_size, kv.head_dim)
            dtype: torch.dtype = getattr(torch, CACHE_FORMATS[kv.format].dtype)
            self._memory.k_cache[layer] = torch.zeros(shape, dtype=dtype)
            self._memory.v_cache[layer] = torch.zeros(shape, dtype=dtype)
        values = {name: torch.from_numpy(array) for name, array in vars(inputs).items() if name in self.program.inputs}
        values |= activations
        self._backend.compute(values)
        self._memory.k_cache.clear()
        self._memory.v_cache.clear()
        return values


class _Float32:
    """Another provider's weights, matrices in float32; an embedding table, of which few rows are read, as it is."""

    def __init__(self, weights: WeightProvider) -> None:
        self._weights = weights

    def load(self, weight: Weight) -> Array | QuantizedMatrix:
        loaded = self._weights.load(weight)
        return loaded if isinstance(loaded, QuantizedMatrix) or weight.kind == "table" else cast(loaded, np.float32)
