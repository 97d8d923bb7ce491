"""Cache audit: how the gate's own tokens use a quantized cache's range, so that a wrong scale has an address.

A scale maps the largest value that calibration saw, of a channel or (FP8) of a head, to the end of the format's range,
127 or 448. On other text of the same kind the largest value comes near that again; with a scale twice too large none
exceeds half of the range. With one half as large the baseline's own keys and values on the same text reach twice as far
as the range. Decision 12 has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.artifact.read import Artifact
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.runtime.executor import Executor
from quantkit.runtime.step import StepInputs
from quantkit_kernels.cache_formats import CACHE_FORMATS
from quantkit_kernels.ops import kv_cells
from quantkit_kernels.tensors import as_tensor

LEAST_USE = 0.6
"""Median over channels (FP8: heads) of the largest value's share of the range; less: the scales are too large."""
MOST_REACH = 1.6
"""Median over channels (FP8: heads) of the baseline's largest value over the range's end; more: they are too small."""
FEW_TOKENS = 512
"""Below which nothing is said of a cache."""


class RangeWatch:
    """The greatest magnitude that each step wrote into the caches, by `layers.N.k` and `.v`: `[Hkv, D]`, as stored.

    In a quantized cache before its scale is applied. Slices of a program may be watched one after the other.
    """

    def __init__(self) -> None:
        self.most: dict[str, Tensor] = {}
        self.ends: dict[str, int] = {}
        """Values at the range's end, where the format has one."""
        self.tokens: dict[str, int] = {}

    def __call__(self, executor: Executor, inputs: StepInputs) -> None:
        """After a step: what it wrote."""
        slots = torch.from_numpy(inputs.slot_mapping[inputs.slot_mapping >= 0].astype("int64"))
        block = executor.capacity.block_size
        for layer in executor.cached_layers:
            kv = executor.program.kv[layer]
            top = CACHE_FORMATS[kv.format].top
            for side, cache in zip("kv", executor.cache(layer), strict=True):
                cells = as_tensor(cache)[slots // block, :, slots % block]
                self._take(f"layers.{layer}.{side}", kv_cells.load(cells, kv.format, kv.head_dim), top)

    def _take(self, name: str, written: Tensor, top: float | None) -> None:
        """written: float32 `[T, Hkv, D]`; top: the end of its range."""
        size = written.abs()
        most = size.amax(0)
        self.most[name] = torch.maximum(self.most[name], most) if name in self.most else most
        self.tokens[name] = self.tokens.get(name, 0) + len(written)
        if top is not None:
            self.ends[name] = self.ends.get(name, 0) + int((size >= top).sum())


@dataclass(frozen=True)
class CacheUse:
    """One layer's keys or values, on the gate's tokens.

    use: median over channels of the share of the range that the largest value takes. reach: median over channels of the
    baseline's largest value over the range's end. clipped: share of values at or beyond the ends. narrow: channels that
    use at most half of the range, of `channels`. With one scale a head, heads stand for channels.
    """

    name: str
    use: float
    reach: float
    clipped: float
    narrow: int
    channels: int
    tokens: int

    @property
    def problem(self) -> str:
        """What is wrong in words; empty when nothing."""
        if self.tokens < FEW_TOKENS:
            return ""
        if self.use < LEAST_USE:
            return (
                f"{self.name} is too large: half of its channels use at most {self.use:.0%} of the range over "
                f"{self.tokens:,} tokens ({self.narrow} of {self.channels} at most 50 %)"
            )
        if self.reach > MOST_REACH:
            return (
                f"{self.name} is too small: half of its channels reach {self.reach:.2f} times as far as the range over "
                f"{self.tokens:,} tokens, {self.clipped:.1%} of the values lie at its ends"
            )
        return ""


def audit_cache(artifact: Artifact, served: RangeWatch, baseline: RangeWatch) -> tuple[CacheUse, ...]:
    """Each cache scale of the artifact: `served` watched its run, `baseline` the source's on the same text."""
    found = []
    for weight in artifact.program.weights.values():
        name = weight.name.removesuffix("_scale")
        if weight.kind != "scales" or name not in served.most:
            continue
        scale = artifact.load(weight)
        if isinstance(scale, QuantizedMatrix):
            continue
        kind = CACHE_FORMATS[artifact.program.kv[int(name.split(".")[1])].format]
        if kind.top is None:
            continue
        shares, reaches = served.most[name] / kind.top, baseline.most[name] / (kind.top * as_tensor(scale))
        tokens, written = served.tokens[name], shares.numel()
        if kind.per_head:
            shares, reaches = shares.amax(-1), reaches.amax(-1)
        found.append(
            CacheUse(
                name=weight.name,
                use=float(shares.median()),
                reach=float(reaches.median()),
                clipped=served.ends[name] / (tokens * written),
                narrow=int((shares <= 0.5).sum()),
                channels=shares.numel(),
                tokens=tokens,
            )
        )
    return tuple(found)
