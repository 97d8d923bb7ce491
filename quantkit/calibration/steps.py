"""Whole samples grouped into steps of an executor, and what must hold of the activations a step makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.calibration.samples import Sample
from quantkit.errors import NumericsError
from quantkit.program.ir import Program
from quantkit.program.weights import WeightProvider
from quantkit.runtime.executor import Executor
from quantkit.runtime.step import StepInputs

BLOCK = 16
"""Positions of one cache block."""
STEP_TOKENS = 2048
"""Tokens that pass a layer together; a longer sample is a step of its own."""
ADVICE = "The source overflows its type on this text: drop the sample, or give a BF16 or FP32 source"


@dataclass(frozen=True)
class SampleStep:
    """Whole samples that pass a layer together: tokens `[start, start + tokens)` of the calibration set."""

    samples: tuple[Sample, ...]
    start: int

    @property
    def tokens(self) -> int:
        """Tokens of all its samples."""
        return sum(len(sample.ids) for sample in self.samples)

    @property
    def blocks(self) -> int:
        """Cache blocks its samples take."""
        return sum(-(-len(sample.ids) // BLOCK) for sample in self.samples)

    @property
    def names(self) -> str:
        """Its samples, for an error that cannot tell them apart."""
        return "one of samples " + ", ".join(sample.name for sample in self.samples)

    def inputs(self) -> StepInputs:
        """What an executor takes; no logits rows."""
        tables: list[list[int]] = []
        taken = 0
        for sample in self.samples:
            count = -(-len(sample.ids) // BLOCK)
            tables.append(list(range(taken, taken + count)))
            taken += count
        ids = [list(sample.ids) for sample in self.samples]
        return StepInputs.of_sequences(ids, tables, block_size=BLOCK, logits="none")


def sample_steps(samples: Sequence[Sample], most_tokens: int | None = None) -> list[SampleStep]:
    """The samples in order, as many to a step as fit into `most_tokens` (`STEP_TOKENS` when None)."""
    return list(_steps(samples, most_tokens or STEP_TOKENS))


def _steps(samples: Sequence[Sample], most_tokens: int) -> Iterator[SampleStep]:
    held: list[Sample] = []
    start = filled = 0
    for sample in samples:
        if held and filled + len(sample.ids) > most_tokens:
            yield SampleStep(tuple(held), start)
            start, filled, held = start + filled, 0, []
        held.append(sample)
        filled += len(sample.ids)
    yield SampleStep(tuple(held), start)


def slice_executor(piece: Program, weights: WeightProvider, steps: Sequence[SampleStep]) -> Executor:
    """An executor of one slice with room for every step."""
    return Executor(
        piece,
        weights,
        max_tokens=max(step.tokens for step in steps),
        max_seqs=max(len(step.samples) for step in steps),
        max_rows=1,
        num_blocks=max(step.blocks for step in steps),
        max_model_len=max(len(sample.ids) for step in steps for sample in step.samples),
        block_size=BLOCK,
    )


def group_inputs(piece: Program) -> dict[str, str]:
    """Fused group -> the value its matrix reads."""
    found: dict[str, str] = {}
    for node in piece.nodes:
        name = node.weights.get("weight")
        if name is not None and piece.weights[name].kind == "matrix":
            found[piece.weights[name].group or name] = node.inputs[0]
    return found


def crossing_widths(piece: Program) -> dict[str, int]:
    """Width of each activation that crosses into the next slice; logits do not."""
    shapes = {name: piece.values[name].shape for name in piece.outputs}
    return {name: int(shape[1]) for name, shape in shapes.items() if shape[:1] == ("T",)}


def slice_name(index: int, count: int) -> str:
    """What slice `index` of `count` is called: embedding, layer N, head."""
    return "embedding" if index == 0 else "head" if index == count - 1 else f"layer {index - 1}"


def require_finite(value: Tensor, step: SampleStep, what: str) -> None:
    """NumericsError naming the first sample whose tokens `[T, n]` hold NaN or Inf."""
    rows = torch.isfinite(value).all(dim=1)
    if bool(rows.all()):
        return
    bad = int((~rows).nonzero()[0, 0])
    for sample in step.samples:
        if bad < len(sample.ids):
            raise NumericsError(
                f"an activation of token {bad} is NaN or Inf", where=f"{what}, sample {sample.name}", next=ADVICE
            )
        bad -= len(sample.ids)
