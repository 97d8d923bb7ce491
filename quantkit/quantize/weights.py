"""RtnWeights: a checkpoint's weights, quantized by round-to-nearest as they are asked for."""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.errors import RecipeError
from quantkit.formats.integer import scale_dtype
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.minmax import quantize_minmax
from quantkit.formats.schemes import scheme
from quantkit.models import ModelSource
from quantkit.models.source_weights import SourceWeights
from quantkit.program.ir import Weight
from quantkit.quantize.rtn import Search, rtn
from quantkit_kernels.arrays import Array
from quantkit_kernels.tensors import as_tensor


class RtnWeights:
    """WeightProvider of `source` where a matrix whose scheme is quantized comes out of `rtn`.

    What the build packages and what the gate's RTN rungs run: lower a program to any schemes and bind it to this.
    A tied head follows the min-max rule, as it will when the artifact's runtime derives it at load.

    Args:
        source: the checkpoint.
        kv_scales: float32 `[Hkv, D]` by weight name (`layers.0.k_scale`), for programs with a quantized cache.
        search: how scales are found.
    """

    def __init__(self, source: ModelSource, *, kv_scales: Mapping[str, Array] | None = None, search: Search = "mse"):
        self._source = SourceWeights(source)
        self._scale_dtype = scale_dtype(source.spec.dtype)
        self._tied = source.spec.names.embed if source.spec.tied else None
        self._kv_scales = kv_scales or {}
        self._search: Search = search

    def load(self, weight: Weight) -> Array | QuantizedMatrix:
        """The weight as its kind and scheme say; see `program.weights.WeightProvider`."""
        if weight.kind == "scales":
            if weight.name not in self._kv_scales:
                raise RecipeError(
                    "no KV scales were calibrated", where=weight.name, next="Calibrate, or set KV to FP16"
                )
            return self._kv_scales[weight.name]
        loaded = self._source.load(weight)
        wanted = scheme(weight.scheme)
        if not wanted.quantized:
            return loaded
        if any(part.tensor == self._tied for part in weight.parts):
            return quantize_minmax(loaded, wanted, scale_dtype=self._scale_dtype, where=weight.name)
        return rtn(as_tensor(loaded), wanted, search=self._search, scale_dtype=self._scale_dtype, where=weight.name)
