"""Gradients of the model's loss at every fused group's output, taken one decoder layer at a time.

The unquantized program runs forwards once, layer by layer, and keeps the activations at every layer boundary on disk.
Then layers are run again from there, last one first, this time with gradients: what enters a layer from above is the
loss's gradient at its outputs, what leaves is the gradient at its inputs. Memory holds one layer, whatever the depth;
a killed walk goes on from the last whole layer of either direction.

The loss is Σ -log p(label) over all tokens. Labels are drawn from the model's own prediction, which makes squared
gradients estimate the Fisher information (Kunstner et al. 2019, arXiv:1905.12558): the curvature of the KL divergence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration.boundary import Boundary
from quantkit.calibration.samples import CalibrationSet, Sample
from quantkit.calibration.steps import (
    BLOCK,
    SampleStep,
    crossing_widths,
    group_inputs,
    require_finite,
    sample_steps,
    slice_name,
)
from quantkit.freed_memory import return_freed_memory
from quantkit.models import ModelSource, SourceWeights
from quantkit.program.ir import Program
from quantkit.program.slices import slices
from quantkit.runtime.differentiable import DifferentiableSlice
from quantkit.runtime.step import StepInputs

STEP_TOKENS = 512
"""Tokens that pass a layer together, and most of one sample: attention scores are quadratic in it."""
LOGITS = 1 << 24
"""Logits that the head makes at a time."""

Progress = Callable[[int, str], object]
"""Called with (slices done, what is next)."""


@dataclass(frozen=True)
class Tap:
    """One fused group over all tokens: what its matrix reads, float32 `[T, K]`, and the loss's gradient at what it
    makes (bias included), float32 `[T, N]`."""

    inputs: Tensor
    gradients: Tensor


def choose(samples: Sequence[Sample], most_tokens: int, seed: int) -> CalibrationSet:
    """A random part of the samples, of about `most_tokens` tokens (at least one sample), in their order.

    Samples are cut at STEP_TOKENS: what follows does not change what a causal model does before.
    """
    order = list(range(len(samples)))
    random.Random(seed).shuffle(order)
    taken: list[int] = []
    held = 0
    for index in order:
        if held < most_tokens:
            taken.append(index)
            held += min(len(samples[index].ids), STEP_TOKENS)
    chosen = tuple(replace(samples[index], ids=samples[index].ids[:STEP_TOKENS]) for index in sorted(taken))
    return CalibrationSet(chosen, "", {})


class GradientWalk:
    """Walks a model forwards, then backwards.

    Args:
        source: the checkpoint.
        program: fused and unquantized, its cache in a float format.
        calibration: samples of at most STEP_TOKENS tokens.
        work: a folder of the walk's own; what a killed walk over the same inputs left there is gone on from. Holds
            one boundary a layer: tokens x hidden size x 4 bytes, once or twice.
        seed: of the labels.
    """

    def __init__(
        self, source: ModelSource, program: Program, calibration: CalibrationSet, work: Path, *, seed: int
    ) -> None:
        self._weights = SourceWeights(source)
        self._slices = slices(program)
        self._steps = sample_steps(calibration.samples, STEP_TOKENS)
        self._longest = max(len(sample.ids) for sample in calibration.samples)
        self._tokens, self._work, self._seed = calibration.tokens, work, seed
        self._unfinished: tuple[int, Boundary] | None = None

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self._slices) - 2

    def begin(self, progress: Progress = lambda done, what: None) -> int:
        """Everything before the first `taps`; gives the number of layers whose gradients are still to be taken.

        NumericsError names layer and sample of an activation or gradient that is NaN or Inf.
        """
        for layer in range(self.layers + 1):
            if self._reopen("gradient", layer) is not None:
                return layer
        self._forwards(progress)
        progress(self.layers + 1, "head")
        self._head()
        return self.layers

    def taps(self, layer: int, groups: Sequence[str]) -> dict[str, Tap]:
        """The tap of each of `groups` of a layer, all of whose successors are finished."""
        index = layer + 1
        piece, what = self._slices[index], self._what(index)
        run = DifferentiableSlice(piece, self._weights, max_model_len=self._longest, block_size=BLOCK)
        below, above = self._kept("boundary", layer), self._kept("gradient", layer + 1)
        after = self._new("gradient", layer)
        reads = {group: name for group, name in group_inputs(piece).items() if group in groups}
        makes = {group: _output_of(piece, group) for group in reads}
        inputs = {name: torch.empty(self._tokens, int(piece.values[name].shape[1])) for name in set(reads.values())}
        gradients = {
            group: torch.empty(self._tokens, int(piece.values[name].shape[1])) for group, name in makes.items()
        }
        for step in self._steps:
            part = slice(step.start, step.start + step.tokens)
            leaves = {name: value.requires_grad_() for name, value in _aligned(below, step).items()}
            values = run.run(step.inputs(), leaves)
            arriving = _aligned(above, step)
            wanted = [*(values[name] for name in makes.values()), *leaves.values()]
            found = torch.autograd.grad(
                [values[name] for name in arriving], wanted, list(arriving.values()), materialize_grads=True
            )
            for group, gradient in zip(makes, found, strict=False):
                require_finite(gradient, step, f"gradients of {what}")
                gradients[group][part] = gradient
            for name, held in inputs.items():
                held[part] = values[name].detach()
            after.put(step.start, dict(zip(leaves, found[len(makes) :], strict=True)))
        self._unfinished = (layer, after)
        return {group: Tap(inputs[reads[group]], gradients[group]) for group in reads}

    def finish(self, layer: int) -> None:
        """The layer's taps were put to use: keep its gradient, let go of what lies above."""
        if self._unfinished is None or self._unfinished[0] != layer:
            raise ValueError(f"layer {layer} has no taps to finish")
        self._unfinished[1].finish()
        self._unfinished = None
        for kind in ("boundary", "gradient"):
            self._path(kind, layer + 1).unlink(missing_ok=True)
        return_freed_memory()

    def _forwards(self, progress: Progress) -> None:
        whole = [self._reopen("boundary", index) is not None for index in range(self.layers + 1)]
        first = whole.index(False) if False in whole else self.layers + 1
        for index in range(first, self.layers + 1):
            progress(index, self._what(index))
            run = DifferentiableSlice(self._slices[index], self._weights, max_model_len=self._longest, block_size=BLOCK)
            before = self._kept("boundary", index - 1) if index else None
            after = self._new("boundary", index)
            for step in self._steps:
                with torch.no_grad():
                    values = run.run(step.inputs(), {} if before is None else _aligned(before, step))
                made = {name: values[name] for name in self._widths(index)}
                for value in made.values():
                    require_finite(value, step, self._what(index))
                after.put(step.start, made)
            after.finish()
            del run
            return_freed_memory()

    def _head(self) -> None:
        """The loss's gradient at what the head reads."""
        piece = self._slices[-1]
        run = DifferentiableSlice(piece, self._weights, max_model_len=1, block_size=BLOCK)
        (logits,) = piece.outputs
        rows = max(1, LOGITS // int(piece.values[logits].shape[1]))
        below, after = self._kept("boundary", self.layers), self._new("gradient", self.layers)
        generator = torch.Generator().manual_seed(self._seed)
        for step in self._steps:
            whole = _aligned(below, step)
            for start in range(0, step.tokens, rows):
                leaves = {name: value[start : start + rows].clone().requires_grad_() for name, value in whole.items()}
                count = min(rows, step.tokens - start)
                made = run.run(StepInputs.of_rows(count), leaves)[logits]
                probabilities = torch.softmax(made.detach(), dim=-1)
                labels = draw(probabilities, generator)
                probabilities[torch.arange(count), labels] -= 1  # of -log softmax(logits)[label]
                found = torch.autograd.grad(made, list(leaves.values()), probabilities, materialize_grads=True)
                after.put(step.start + start, dict(zip(leaves, found, strict=True)))
            for gradient in after.get(step.start, step.start + step.tokens).values():
                require_finite(gradient, step, "gradients of the head")
        after.finish()

    def _what(self, index: int) -> str:
        return slice_name(index, len(self._slices))

    def _widths(self, index: int) -> dict[str, int]:
        return crossing_widths(self._slices[index])

    def _path(self, kind: str, index: int) -> Path:
        return self._work / f"{kind}-{index:05d}.f32"

    def _new(self, kind: str, index: int) -> Boundary:
        return Boundary(self._widths(index), self._tokens, self._path(kind, index))

    def _reopen(self, kind: str, index: int) -> Boundary | None:
        return Boundary.reopen(self._widths(index), self._tokens, self._path(kind, index))

    def _kept(self, kind: str, index: int) -> Boundary:
        found = self._reopen(kind, index)
        if found is None:
            raise ValueError(f"no {kind} after slice {index} was kept")
        return found


def draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One label a row, int64 `[R]`, drawn from `[R, V]` probabilities by inverting their cumulative sum."""
    sums = probabilities.cumsum(dim=-1)
    heights = torch.rand(len(sums), 1, generator=generator) * sums[:, -1:]
    return torch.searchsorted(sums, heights, right=True).squeeze(1).clamp_max_(sums.shape[1] - 1)


def _output_of(piece: Program, group: str) -> str:
    """The value that a fused group's matrix makes."""
    return next(
        node.outputs[0]
        for node in piece.nodes
        if node.op == "linear" and piece.weights[node.weights["weight"]].group == group
    )


def _aligned(boundary: Boundary, step: SampleStep) -> dict[str, Tensor]:
    """A step's activations in torch's own, aligned memory: products then take the same path in every run."""
    return {name: value.clone() for name, value in boundary.get(step.start, step.start + step.tokens).items()}
