"""The baseline, run layer by layer: one layer's weights in memory, whatever the model's depth.

What goes into the head is kept for every scored token (a few KB each); logits are computed from it again
whenever a candidate is compared, which costs one matrix product and spares gigabytes of disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.freed_memory import return_freed_memory
from quantkit.gate.data import Window
from quantkit.gate.steps import BLOCK, Composition, compose
from quantkit.program.ir import Program
from quantkit.program.slices import slices
from quantkit.program.weights import WeightProvider
from quantkit.runtime.executor import Executor
from quantkit.runtime.step import StepInputs
from quantkit_kernels.tensors import as_tensor

Activations = dict[str, NDArray[np.float32]]
"""Values that cross a boundary between slices, by name: float32 `[tokens, n]`."""


def stream_body(
    program: Program,
    weights: WeightProvider,
    windows: Sequence[Window],
    composition: Composition,
    *,
    threads: int | None,
    backend: str,
    tick: Callable[[int], None],
    watch: Callable[[Executor, StepInputs], None] | None = None,
) -> Activations:
    """What the head reads, at every scored token of `windows` in order: float32 `[S, n]` a value.

    Each slice of the program runs all windows before the next one is loaded. `tick` is told tokens as they go through
    the model: the tokens of a step spread over the slices. `watch` sees each slice's executor after every step.
    """
    body = slices(program)[:-1]
    longest = max(len(window.ids) for window in windows)
    total = sum(len(window.ids) for window in windows)
    told = 0
    boundary: Activations = {}
    for number, piece in enumerate(body, start=1):
        executor = Executor(
            piece,
            weights,
            max_tokens=composition.budget,
            max_seqs=composition.concurrent,
            num_blocks=composition.blocks(longest),
            block_size=BLOCK,
            max_model_len=longest,
            threads=threads,
            backend=backend,
        )
        read = [name for name in piece.inputs if piece.values[name].dtype == "float32"]
        made = {name: np.empty((total, int(piece.values[name].shape[1])), np.float32) for name in piece.outputs}
        for step in compose(windows, composition):
            found = executor.run_slice(step.inputs, {name: boundary[name][step.place] for name in read})
            if watch is not None:
                watch(executor, step.inputs)
            for name, value in found.items():
                made[name][step.place] = value
        boundary = made
        del executor
        return_freed_memory()
        tick(total * number // len(body) - told)
        told = total * number // len(body)
    places = _scored_places(windows)
    return {name: value[places] for name, value in boundary.items()}


def _scored_places(windows: Sequence[Window]) -> NDArray[np.int64]:
    """Place of every scored token among all tokens of the windows."""
    found: list[NDArray[np.int64]] = []
    start = 0
    for window in windows:
        found.append(np.arange(start + window.first, start + len(window.ids) - 1))
        start += len(window.ids)
    return np.concatenate(found)


class Head:
    """The last slice of a program over kept activations: `[S, n]` in, logits of chosen rows out."""

    def __init__(
        self, program: Program, weights: WeightProvider, *, rows: int, threads: int | None, backend: str
    ) -> None:
        self._rows = rows
        self._executor = Executor(
            slices(program)[-1],
            weights,
            max_tokens=rows,
            max_seqs=1,
            num_blocks=1,
            max_model_len=1,
            threads=threads,
            backend=backend,
        )

    def logits(self, inputs: Activations, index: NDArray[np.int64]) -> torch.Tensor:
        """float32 `[len(index), V]` for the rows `index` of `inputs`."""
        count = len(index)
        if count > self._rows:
            raise ValueError(f"{count} rows exceed the head's {self._rows}")
        found = self._executor.run_slice(StepInputs.of_rows(count), {n: rows[index] for n, rows in inputs.items()})
        return as_tensor(found["logits"])
