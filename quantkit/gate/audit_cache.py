"""Cache audit: how the gate's own tokens use an INT8 cache's codes, so that a wrong scale has an address.

A channel's scale maps the largest value that calibration saw to code 127. On other text of the same kind the largest
code comes near that again; with a scale twice too large no code exceeds half of the range. With one half as large the
baseline's own keys and values on the same text reach twice as far as the codes can say. Decision 12 has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.artifact.read import Artifact
from quantkit.formats.kv_int8 import TOP
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.runtime.executor import Executor
from quantkit.runtime.step import StepInputs
from quantkit_kernels.tensors import as_tensor

LEAST_USE = 0.6
"""Median over channels of the largest code's share of the range; less: the scales are too large."""
MOST_REACH = 1.6
"""Median over channels of the baseline's largest value over the range's end; more: the scales are too small."""
FEW_TOKENS = 512
"""Below which nothing is said of a cache."""


class RangeWatch:
    """The greatest magnitude that each step wrote into the caches, by `layers.N.k` and `.v`: `[Hkv, D]`, as stored.

    Codes of an INT8 cache, values of any other. Slices of a program may be watched one after the other.
    """

    def __init__(self) -> None:
        self.most: dict[str, Tensor] = {}
        self.ends: dict[str, int] = {}
        """Codes at ±127."""
        self.tokens: dict[str, int] = {}

    def __call__(self, executor: Executor, inputs: StepInputs) -> None:
        """After a step: what it wrote."""
        slots = torch.from_numpy(inputs.slot_mapping[inputs.slot_mapping >= 0].astype("int64"))
        block = executor.capacity.block_size
        for layer in executor.cached_layers:
            for side, cache in zip("kv", executor.cache(layer), strict=True):
                self._take(f"layers.{layer}.{side}", as_tensor(cache)[slots // block, :, slots % block])

    def _take(self, name: str, written: Tensor) -> None:
        """written: `[T, Hkv, D]`."""
        size = written.to(torch.int16).abs() if written.dtype == torch.int8 else written.float().abs()
        most = size.amax(0).float()
        self.most[name] = torch.maximum(self.most[name], most) if name in self.most else most
        self.tokens[name] = self.tokens.get(name, 0) + len(written)
        if written.dtype == torch.int8:
            self.ends[name] = self.ends.get(name, 0) + int((size >= TOP).sum())


@dataclass(frozen=True)
class CacheUse:
    """One layer's keys or values, on the gate's tokens.

    use: median over channels of the share of the range that the largest code takes. reach: median over channels of the
    baseline's largest value over the range's end. clipped: share of codes at the ends. narrow: channels that use at
    most half of the range, of `channels`.
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
                f"{self.name} is too large: half of its channels use at most {self.use:.0%} of the codes over "
                f"{self.tokens:,} tokens ({self.narrow} of {self.channels} at most 50 %)"
            )
        if self.reach > MOST_REACH:
            return (
                f"{self.name} is too small: half of its channels reach {self.reach:.2f} times as far as the codes over "
                f"{self.tokens:,} tokens, {self.clipped:.1%} of the codes are cut off"
            )
        return ""


def audit_cache(artifact: Artifact, served: RangeWatch, baseline: RangeWatch) -> tuple[CacheUse, ...]:
    """Each INT8 scale of the artifact: `served` watched its run, `baseline` the source's on the same text."""
    found = []
    for weight in artifact.program.weights.values():
        name = weight.name.removesuffix("_scale")
        if weight.kind != "scales" or name not in served.most:
            continue
        scale = artifact.load(weight)
        if isinstance(scale, QuantizedMatrix):
            continue
        shares = served.most[name].flatten() / TOP
        reaches = (baseline.most[name] / (TOP * as_tensor(scale))).flatten()
        tokens = served.tokens[name]
        found.append(
            CacheUse(
                name=weight.name,
                use=float(shares.median()),
                reach=float(reaches.median()),
                clipped=served.ends[name] / (tokens * shares.numel()),
                narrow=int((shares <= 0.5).sum()),
                channels=shares.numel(),
                tokens=tokens,
            )
        )
    return tuple(found)
