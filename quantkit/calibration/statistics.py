"""What flows through the unquantized model on the calibration samples, measured one decoder layer at a time.

Every sample passes a layer before the next layer's weights are read, so memory holds one layer in float32 and one
boundary's activations, whatever the depth. With a folder to work in, each slice leaves its figures and the boundary
after it there, and a killed run goes on from the last whole slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.calibration.boundary import Boundary
from quantkit.calibration.samples import CalibrationSet
from quantkit.calibration.steps import (
    ADVICE,
    SampleStep,
    crossing_widths,
    group_inputs,
    require_finite,
    sample_steps,
    slice_executor,
    slice_name,
)
from quantkit.errors import NumericsError
from quantkit.freed_memory import return_freed_memory
from quantkit.models import ModelSource, SourceWeights
from quantkit.program.ir import Program
from quantkit.program.slices import slices
from quantkit.runtime.executor import Executor
from quantkit.runtime.tensors import run_slice
from quantkit_kernels.tensors import as_tensor

TAIL = 0.001
"""Share of the tokens whose greatest magnitudes are kept of every cache channel."""

Progress = Callable[[int, int, str], object]
"""Called with (done, total, what)."""


@dataclass(frozen=True)
class Statistics:
    """input_sq: float32 `[K]` by fused group, the mean square of each input channel over all tokens.

    kv_tail: float32 `[k, Hkv, D]` by `layers.{i}.k` and `layers.{i}.v`, the greatest magnitudes of each channel over
    all tokens, falling, as the cache stores them (keys after normalisation and rotation); k is `TAIL` of the tokens.
    """

    input_sq: dict[str, Tensor]
    kv_tail: dict[str, Tensor]

    def kv_range(self, percentile: float = 100.0) -> dict[str, Tensor]:
        """float32 `[Hkv, D]` by cache side: the magnitude that `percentile` % of the tokens do not exceed, exactly.

        100 gives the maximum; percentiles below that of the tail give its end.
        """
        if not self.kv_tail:
            return {}
        count = len(next(iter(self.kv_tail.values())))
        rank = min(int((1 - percentile / 100) / TAIL * count + 1e-9), count - 1)
        return {name: tail[rank] for name, tail in self.kv_tail.items()}

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all."""
        tensors = {f"input_sq/{name}": value for name, value in self.input_sq.items()}
        tensors |= {f"kv_tail/{name}": value for name, value in self.kv_tail.items()}
        part = path.with_name(f".part-{path.name}")
        save_file({name: value.contiguous() for name, value in tensors.items()}, part)
        part.replace(path)

    @staticmethod
    def load(path: Path) -> Statistics:
        """Read what `save` wrote."""
        tensors = load_file(path)

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

        return Statistics(part("input_sq/"), part("kv_tail/"))


def collect(
    source: ModelSource,
    program: Program,
    calibration: CalibrationSet,
    progress: Progress = lambda done, total, what: None,
    *,
    work: Path | None = None,
) -> Statistics:
    """Run the fused, unquantized `program` of `source` over the samples and measure.

    Args:
        source: the checkpoint the program was built from.
        program: with its cache in a float format.
        calibration: what to run.
        progress: called before each slice of the program.
        work: a folder for the boundaries' activations (tokens x hidden size x 4 bytes each, two or three of them at
            a time) and each slice's figures; what a run over the same inputs left there is gone on from. In memory
            when None.

    Raises NumericsError naming layer and sample when an activation, key or value is NaN or Inf.
    """
    steps = sample_steps(calibration.samples)
    pieces = slices(program)
    measured: list[Statistics] = []
    before = Boundary({}, calibration.tokens, None)
    first = _whole_slices(work, pieces, calibration.tokens)
    if work is not None and first:
        measured = [Statistics.load(_figures(work, index)) for index in range(first)]
        last = Boundary.reopen(crossing_widths(pieces[first - 1]), calibration.tokens, _spilled(work, first - 1))
        before = last if last is not None else before
    for index in range(first, len(pieces)):
        what = slice_name(index, len(pieces))
        progress(index, len(pieces), what)
        after = Boundary(crossing_widths(pieces[index]), calibration.tokens, work and _spilled(work, index))
        layer = index - 1 if what.startswith("layer") else None
        found = _measure(pieces[index], SourceWeights(source), steps, before, after, layer, what)
        measured.append(found)
        if work is not None:
            after.finish()
            found.save(_figures(work, index))
        before.close()
        before = after
        return_freed_memory()
    before.close()
    progress(len(pieces), len(pieces), "done")
    return Statistics(
        {name: value for one in measured for name, value in one.input_sq.items()},
        {name: value for one in measured for name, value in one.kv_tail.items()},
    )


def _measure(
    piece: Program,
    weights: SourceWeights,
    steps: list[SampleStep],
    before: Boundary,
    after: Boundary,
    layer: int | None,
    what: str,
) -> Statistics:
    """Every step through one slice: from the boundary before it to the one after."""
    read, widths = group_inputs(piece), crossing_widths(piece)
    executor = slice_executor(piece.with_(outputs=_once(*piece.outputs, *read.values())), weights, steps)
    sums, tails = _InputSquares(), _Tails(math.ceil(TAIL * sum(step.tokens for step in steps)))
    for step in steps:
        made = run_slice(executor, step.inputs(), before.get(step.start, step.start + step.tokens))
        for name in _once(*widths, *read.values()):
            require_finite(made[name], step, what)
        for group, name in read.items():
            sums.add(group, made[name])
        after.put(step.start, {name: made[name] for name in widths})
        if layer is not None:
            tails.observe(executor, layer, step, what)
    return Statistics(sums.mean(), tails.found)


def _whole_slices(work: Path | None, pieces: list[Program], tokens: int) -> int:
    """How many slices an earlier run finished: figures of each, and the boundary after the last."""
    if work is None:
        return 0
    count = next((i for i in range(len(pieces)) if not _figures(work, i).is_file()), len(pieces))
    while count and Boundary.reopen(crossing_widths(pieces[count - 1]), tokens, _spilled(work, count - 1)) is None:
        count -= 1
    return count


def _figures(work: Path, index: int) -> Path:
    return work / f"slice-{index:05d}.safetensors"


def _spilled(work: Path, index: int) -> Path:
    return work / f"boundary-{index:05d}.f32"


def _once(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


class _InputSquares:
    """Sums the squares of each fused group's input channels, in float64 and in token order."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, group: str, x: Tensor) -> None:
        self._sums[group] = self._sums.get(group, 0) + x.square().sum(0, dtype=torch.float64)
        self._counts[group] = self._counts.get(group, 0) + len(x)

    def mean(self) -> dict[str, Tensor]:
        return {group: (total / self._counts[group]).float() for group, total in self._sums.items()}


class _Tails:
    """The `count` greatest magnitudes of every cache channel, over all steps."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.found: dict[str, Tensor] = {}

    def observe(self, executor: Executor, layer: int, step: SampleStep, what: str) -> None:
        """Fold in one step's keys and values, and leave the cache zeroed for the next."""
        for side, cache in zip("kv", executor.cache(layer), strict=True):
            magnitudes = as_tensor(cache).abs().float().movedim(2, 1).flatten(0, 1)
            if not bool(torch.isfinite(magnitudes.sum())):
                raise NumericsError("a key or value is NaN or Inf", where=f"{what}, {step.names}", next=ADVICE)
            name = f"layers.{layer}.{side}"
            known = self.found.get(name, magnitudes[:0])
            merged = torch.cat([known, magnitudes.topk(min(self._count, len(magnitudes)), dim=0).values])
            self.found[name] = merged.topk(min(self._count, len(merged)), dim=0).values.contiguous()
        executor.clear_cache()
