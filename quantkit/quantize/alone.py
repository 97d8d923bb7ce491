"""The divergence a group really causes when it alone is quantized: what predictions are checked by.

Several (group, scheme) pairs share one pass over the layers: the original and every variant whose group lies below go
through a layer before the next one's weights are read. A killed pass goes on from the last whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration.boundary import Boundary
from quantkit.calibration.samples import CalibrationSet
from quantkit.calibration.steps import crossing_widths, require_finite, sample_steps, slice_executor, slice_name
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.freed_memory import return_freed_memory
from quantkit.models import ModelSource, SourceWeights
from quantkit.program import lower_precision
from quantkit.program.ir import Program, Weight
from quantkit.program.slices import slices
from quantkit.quantize.gradients import LOGITS, Progress
from quantkit.runtime.executor import Executor
from quantkit.runtime.step import StepInputs
from quantkit.runtime.tensors import run_slice
from quantkit_kernels.arrays import Array

Rounding = Callable[[Weight, str], QuantizedMatrix]
"""(a group's matrix, scheme) -> its quantized form."""


@dataclass(frozen=True)
class Alone:
    """One group quantized to `scheme`, the rest of the model as it is."""

    group: str
    scheme: str

    @property
    def layer(self) -> int:
        """The group's layer."""
        return int(self.group.split(".")[1])


def kl_alone(
    source: ModelSource,
    program: Program,
    samples: CalibrationSet,
    variants: Sequence[Alone],
    rounding: Rounding,
    work: Path,
    progress: Progress = lambda done, what: None,
) -> list[float]:
    """Mean KL(original ‖ variant) of the next-token distributions in nats, over all tokens, a variant.

    Args:
        source: the checkpoint. program: fused and unquantized, its cache in a float format.
        samples: what to run. variants: what to compare. rounding: how a matrix is quantized.
        work: a folder of the pass's own; what a killed one over the same inputs left there is gone on from.
        progress: told before each slice.

    Raises NumericsError naming layer and sample when an activation is NaN or Inf.
    """
    steps, pieces = sample_steps(samples.samples), slices(program)
    widths = [_widths(piece, variants, index - 1) for index, piece in enumerate(pieces[:-1])]
    paths = [work / f"alone-{index:05d}.f32" for index in range(len(widths))]
    kept = [i for i, path in enumerate(paths) if Boundary.reopen(widths[i], samples.tokens, path) is not None]
    before = Boundary.reopen(widths[kept[-1]], samples.tokens, paths[kept[-1]]) if kept else None
    for index in range(kept[-1] + 1 if kept else 0, len(widths)):
        progress(index, slice_name(index, len(pieces)))
        original = slice_executor(pieces[index], SourceWeights(source), steps)
        after = Boundary(widths[index], samples.tokens, paths[index])
        for name in _present(variants, index - 1):
            executor = original
            if name is not None and name.layer == index - 1:
                lowered = slices(lower_precision(program, {name.group: name.scheme}, program.kv[0].format))[index]
                executor = slice_executor(lowered, _One(source, name, rounding), steps)
            for step in steps:
                entering = {} if before is None else before.get(step.start, step.start + step.tokens)
                values = _of(entering, name if name is None or name.layer < index - 1 else None, variants)
                made = run_slice(executor, step.inputs(), values)
                for value in made.values():
                    require_finite(value, step, slice_name(index, len(pieces)))
                after.put(
                    step.start, {_key(name, variants, value): made[value] for value in crossing_widths(pieces[index])}
                )
        after.finish()
        if before is not None:
            before.close()
        before = after
        del original, executor
        return_freed_memory()
    progress(len(widths), "head")
    return _compare(pieces[-1], SourceWeights(source), before, variants, samples.tokens)


def _compare(
    head: Program, weights: SourceWeights, last: Boundary | None, variants: Sequence[Alone], tokens: int
) -> list[float]:
    (logits,) = head.outputs
    rows = max(1, LOGITS // int(head.values[logits].shape[1]))
    executor = Executor(head, weights, max_tokens=rows, max_seqs=1, max_rows=rows, num_blocks=1, max_model_len=1)
    totals = [0.0] * len(variants)

    def log_probabilities(held: dict[str, Tensor], variant: Alone | None) -> Tensor:
        values = _of(held, variant, variants)
        made = run_slice(executor, StepInputs.of_rows(len(next(iter(values.values())))), values)
        return torch.log_softmax(made[logits], dim=-1)

    for start in range(0, tokens, rows):
        held = {} if last is None else last.get(start, min(start + rows, tokens))
        ours = log_probabilities(held, None)
        for index, variant in enumerate(variants):
            difference = ours - log_probabilities(held, variant)
            totals[index] += float(difference.mul_(ours.exp()).sum(dtype=torch.float64))
    return [total / tokens for total in totals]


def _present(variants: Sequence[Alone], layer: int) -> list[Alone | None]:
    """The original (None) and the variants that differ from it after `layer`."""
    return [None, *(variant for variant in variants if variant.layer <= layer)]


def _key(variant: Alone | None, variants: Sequence[Alone], name: str) -> str:
    return name if variant is None else f"{variants.index(variant)}/{name}"


def _of(held: dict[str, Tensor], variant: Alone | None, variants: Sequence[Alone]) -> dict[str, Tensor]:
    """One variant's values (None: the original's) out of all that a boundary holds."""
    prefix = _key(variant, variants, "")
    return {key[len(prefix) :]: value for key, value in held.items() if key.rpartition("/")[0] == prefix.rstrip("/")}


def _widths(piece: Program, variants: Sequence[Alone], layer: int) -> dict[str, int]:
    found = crossing_widths(piece)
    return {_key(v, variants, name): width for v in _present(variants, layer) for name, width in found.items()}


class _One:
    """One variant's group quantized, the source's weights for the rest."""

    def __init__(self, source: ModelSource, variant: Alone, rounding: Rounding) -> None:
        self._weights, self._variant, self._rounding = SourceWeights(source), variant, rounding

    def load(self, weight: Weight) -> Array | QuantizedMatrix:
        return (
            self._rounding(weight, self._variant.scheme)
            if weight.group == self._variant.group
            else self._weights.load(weight)
        )
