"""What flows through the unquantized model on the calibration samples, measured one decoder layer at a time.

Every sample passes a layer before the next layer's weights are read, so memory holds one layer in float32 and one
boundary's activations, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.calibration.boundary import Boundary
from quantkit.calibration.dataset import CalibrationSet, Sample
from quantkit.errors import NumericsError
from quantkit.models import ModelSource, SourceWeights
from quantkit.program.ir import Program
from quantkit.program.slices import slices
from quantkit.runtime.executor import Executor
from quantkit.runtime.step import StepInputs

BLOCK = 16
"""Positions of one cache block."""
STEP_TOKENS = 2048
"""Tokens that pass a layer together; a longer sample is a step of its own."""

Progress = Callable[[int, int, str], object]
"""Called with (done, total, what)."""


@dataclass(frozen=True)
class Statistics:
    """input_sq: float32 `[K]` by fused group, the mean square of each input channel over all tokens.

    kv_absmax: float32 `[Hkv, D]` by `layers.{i}.k` and `layers.{i}.v`, the greatest magnitudes as the cache stores them
    (keys after normalisation and rotation).
    """

    input_sq: dict[str, Tensor]
    kv_absmax: dict[str, Tensor]

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        tensors = {f"input_sq/{name}": value for name, value in self.input_sq.items()}
        tensors |= {f"kv_absmax/{name}": value for name, value in self.kv_absmax.items()}
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)

    @staticmethod
    def load(path: Path) -> Statistics:
        """Read what `save` wrote."""
        tensors = load_file(path)

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

        return Statistics(part("input_sq/"), part("kv_absmax/"))


def collect(
    source: ModelSource,
    program: Program,
    calibration: CalibrationSet,
    progress: Progress = lambda done, total, what: None,
    *,
    spill: Path | None = None,
) -> Statistics:
    """Run the fused, unquantized `program` of `source` over the samples and measure.

    Args:
        source: the checkpoint the program was built from.
        program: with its cache in a float format.
        calibration: what to run.
        progress: called before each slice of the program.
        spill: a folder for the boundaries' activations (tokens x hidden size x 4 bytes each, two or three of them at
            a time); in memory when None.

    Raises NumericsError naming layer and sample when an activation, key or value is NaN or Inf.
    """
    steps = list(_steps(calibration.samples))
    weights = SourceWeights(source)
    sums = _InputSquares()
    kv_absmax: dict[str, Tensor] = {}
    pieces = slices(program)
    before = Boundary({}, calibration.tokens, None)
    for index, piece in enumerate(pieces):
        layer = index - 1 if 0 < index < len(pieces) - 1 else None
        what = f"layer {layer}" if layer is not None else ("embedding" if index == 0 else "head")
        progress(index, len(pieces), what)
        read = _group_inputs(piece)
        executor = Executor(
            piece.with_(outputs=tuple(dict.fromkeys((*piece.outputs, *read.values())))),
            weights,
            max_tokens=max(step.tokens for step in steps),
            max_seqs=max(len(step.samples) for step in steps),
            max_rows=1,
            num_blocks=max(step.blocks for step in steps),
            max_model_len=max(len(sample.ids) for sample in calibration.samples),
            block_size=BLOCK,
        )
        after = Boundary(_widths(piece), calibration.tokens, spill)
        for step in steps:
            made = executor.run_slice(step.inputs(), before.get(step.start, step.start + step.tokens))
            for name in (*_widths(piece), *read.values()):
                _require_finite(made[name], step, what)
            for group, name in read.items():
                sums.add(group, made[name])
            after.put(step.start, {name: made[name] for name in _widths(piece)})
            if layer is not None:
                _observe_cache(executor, layer, kv_absmax, step, what)
        before.close()
        before = after
    before.close()
    progress(len(pieces), len(pieces), "done")
    return Statistics(sums.mean(), kv_absmax)


@dataclass(frozen=True)
class _Step:
    """Whole samples that pass a layer together: tokens `[start, start + tokens)` of the calibration set."""

    samples: tuple[Sample, ...]
    start: int

    @property
    def tokens(self) -> int:
        return sum(len(sample.ids) for sample in self.samples)

    @property
    def blocks(self) -> int:
        return sum(-(-len(sample.ids) // BLOCK) for sample in self.samples)

    def inputs(self) -> StepInputs:
        tables: list[list[int]] = []
        taken = 0
        for sample in self.samples:
            count = -(-len(sample.ids) // BLOCK)
            tables.append(list(range(taken, taken + count)))
            taken += count
        return StepInputs.of_sequences(
            [list(sample.ids) for sample in self.samples], tables, block_size=BLOCK, logits="none"
        )


def _steps(samples: Sequence[Sample]) -> Iterator[_Step]:
    held: list[Sample] = []
    start = filled = 0
    for sample in samples:
        if held and filled + len(sample.ids) > STEP_TOKENS:
            yield _Step(tuple(held), start)
            start, filled, held = start + filled, 0, []
        held.append(sample)
        filled += len(sample.ids)
    yield _Step(tuple(held), start)


def _group_inputs(piece: Program) -> dict[str, str]:
    """Fused group -> the value its matrix reads."""
    found: dict[str, str] = {}
    for node in piece.nodes:
        name = node.weights.get("weight")
        if name is not None and piece.weights[name].kind == "matrix":
            found[piece.weights[name].group or name] = node.inputs[0]
    return found


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


def _widths(piece: Program) -> dict[str, int]:
    """Width of each activation that crosses into the next slice; logits do not."""
    shapes = {name: piece.values[name].shape for name in piece.outputs}
    return {name: int(shape[1]) for name, shape in shapes.items() if shape[:1] == ("T",)}


def _observe_cache(executor: Executor, layer: int, absmax: dict[str, Tensor], step: _Step, what: str) -> None:
    """Fold one step's keys and values into the maxima, and leave the cache zeroed for the next."""
    for side, cache in zip("kv", executor.cache(layer), strict=True):
        greatest = cache.abs().amax(dim=(0, 2)).float()
        if not bool(torch.isfinite(greatest).all()):
            raise NumericsError("a key or value is NaN or Inf", where=f"{what}, {_names(step)}", next=_NEXT)
        known = absmax.get(f"layers.{layer}.{side}")
        absmax[f"layers.{layer}.{side}"] = greatest if known is None else torch.maximum(known, greatest)
    executor.clear_cache()


_NEXT = "The source overflows its type on this text: drop the sample, or give a BF16 or FP32 source"


def _require_finite(value: Tensor, step: _Step, what: str) -> None:
    """NumericsError naming the first sample whose tokens `[T, n]` hold NaN or Inf."""
    rows = torch.isfinite(value).all(dim=1)
    if bool(rows.all()):
        return
    bad = int((~rows).nonzero()[0, 0])
    for sample in step.samples:
        if bad < len(sample.ids):
            raise NumericsError(
                f"an activation of token {bad} is NaN or Inf", where=f"{what}, sample {sample.name}", next=_NEXT
            )
        bad -= len(sample.ids)


def _names(step: _Step) -> str:
    return "one of samples " + ", ".join(sample.name for sample in step.samples)
