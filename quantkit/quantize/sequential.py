"""Layer by layer through a model that is quantized on the way: each layer sees what the quantized ones before it make.

For every decoder layer two passes over the calibration samples: one through its original weights, to sum the second
moments of what each fused group reads; one through the quantized ones, cache included, as it will be served, to make
the next layer's inputs. Memory holds one layer and its Hessians; boundaries lie on disk, and a killed walk goes on
from the last whole one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration.boundary import Boundary
from quantkit.calibration.samples import CalibrationSet
from quantkit.calibration.steps import (
    crossing_widths,
    group_inputs,
    require_finite,
    sample_steps,
    slice_executor,
    slice_name,
)
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.freed_memory import return_freed_memory
from quantkit.models import ModelSource, SourceWeights
from quantkit.program.ir import Program, Weight
from quantkit.program.slices import slices
from quantkit.runtime.tensors import run_slice
from quantkit_kernels.arrays import Array


class LayerWalk:
    """Walks the decoder layers of a model in order.

    Args:
        source: the checkpoint.
        program: fused and unquantized. lowered: the same with its schemes and cache format chosen.
        calibration: the samples that walk.
        kv_scales: float32 `[Hkv, D]` by weight name, for a quantized cache.
        work: a folder of the walk's own for boundaries.
    """

    def __init__(
        self,
        source: ModelSource,
        program: Program,
        lowered: Program,
        calibration: CalibrationSet,
        kv_scales: Mapping[str, Array],
        work: Path,
    ) -> None:
        self._weights = SourceWeights(source)
        self._plain, self._lowered = slices(program), slices(lowered)
        self._steps = sample_steps(calibration.samples)
        self._tokens = calibration.tokens
        self._kv_scales, self._work = kv_scales, work
        self._before = Boundary({}, self._tokens, None)

    def begin(self, whole_layers: int) -> int:
        """The first layer to do, of which `whole_layers` are quantized already: the one after the last boundary kept.

        Runs the embedding where nothing was kept.
        """
        for layer in range(whole_layers, -1, -1):
            found = Boundary.reopen(crossing_widths(self._plain[layer]), self._tokens, self._path(layer))
            if found is not None:
                self._before = found
                return layer
        self._pass(0, self._plain[0], self._weights)
        return 0

    def hessians(self, layer: int) -> dict[str, Tensor]:
        """Σ x xᵀ, float32 `[K, K]`, by fused group of `layer`, over all tokens in order.

        Groups that read the same value share one tensor. NumericsError names layer and sample of NaN or Inf.
        """
        piece, what = self._plain[layer + 1], slice_name(layer + 1, len(self._plain))
        read = group_inputs(piece)
        values = tuple(dict.fromkeys(read.values()))
        executor = slice_executor(piece.with_(outputs=values), self._weights, self._steps)
        sums = {name: torch.zeros(2 * (int(piece.values[name].shape[1]),)) for name in values}
        for step in self._steps:
            made = run_slice(executor, step.inputs(), self._before.get(step.start, step.start + step.tokens))
            for name, total in sums.items():
                require_finite(made[name], step, what)
                total.addmm_(made[name].t(), made[name])
        return {group: sums[name] for group, name in read.items()}

    def advance(self, layer: int, quantized: Mapping[str, QuantizedMatrix]) -> None:
        """Take all samples through `layer` with its quantized groups, to the next layer's inputs."""
        weights = _LayerWeights(self._weights, quantized, self._kv_scales)
        self._pass(layer + 1, self._lowered[layer + 1], weights)

    def end(self) -> None:
        """Let go of the last boundary."""
        self._before.close()

    def _pass(self, index: int, piece: Program, weights: SourceWeights | _LayerWeights) -> None:
        widths, what = crossing_widths(piece), slice_name(index, len(self._plain))
        executor = slice_executor(piece, weights, self._steps)
        after = Boundary(widths, self._tokens, self._path(index))
        for step in self._steps:
            made = run_slice(executor, step.inputs(), self._before.get(step.start, step.start + step.tokens))
            for name in widths:
                require_finite(made[name], step, what)
            after.put(step.start, {name: made[name] for name in widths})
        after.finish()
        self._before.close()
        self._before = after
        del executor
        return_freed_memory()

    def _path(self, index: int) -> Path:
        return self._work / f"boundary-{index:05d}.f32"


class _LayerWeights:
    """Quantized groups where there are any, calibrated cache scales, the source's weights for the rest."""

    def __init__(
        self, source: SourceWeights, quantized: Mapping[str, QuantizedMatrix], kv_scales: Mapping[str, Array]
    ) -> None:
        self._source, self._quantized, self._kv_scales = source, quantized, kv_scales

    def load(self, weight: Weight) -> Array | QuantizedMatrix:
        if weight.kind == "scales":
            return self._kv_scales[weight.name]
        if weight.group is not None and weight.group in self._quantized and weight.kind == "matrix":
            return self._quantized[weight.group]
        return self._source.load(weight)
