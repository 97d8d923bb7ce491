"""Teacher-forced runs over the held-out windows, compared with the baseline chunk by chunk.

The baseline is streamed layer by layer (`stream`); each candidate then runs whole, as it is served, and is compared
row by row. Only scalars are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.errors import NumericsError
from quantkit.freed_memory import return_freed_memory
from quantkit.gate.data import EvalSet, Window
from quantkit.gate.metrics import Scores, score_rows
from quantkit.gate.steps import BLOCK, Composition, Step, compose, in_order, interleaved, offsets
from quantkit.gate.stream import Activations, Head, stream_body
from quantkit.program.ir import Program
from quantkit.program.weights import WeightProvider
from quantkit.runtime.executor import Executor
from quantkit.runtime.step import StepInputs

MOST_LOGITS = 8_000_000
"""Logits of one step: 32 MB a buffer, of which about four exist."""
BODY_TOKENS = 256
"""Tokens of a step of the streamed baseline, whose body computes no logits."""
TOP = 5
"""Alternatives kept for the worst token of a window."""

Tick = Callable[[int], None]
"""Told the number of tokens a step ran."""
Watch = Callable[[Executor, StepInputs], None]
"""Shown an executor and the step it has just run."""


@dataclass(frozen=True)
class Variant:
    """A program and its weights, to be run whole. `threads`, `backend`, `spill`: as the executor takes them."""

    name: str
    program: Program
    weights: WeightProvider
    threads: int | None = None
    backend: str = "auto"
    spill: Path | None = None


@dataclass(frozen=True)
class Choice:
    """One likely next token and its probability."""

    token: int
    probability: float


@dataclass(frozen=True)
class WorstToken:
    """The scored position of a window where the candidate lies furthest from the baseline."""

    window: int
    position: int
    kl: float
    base: tuple[Choice, ...]
    candidate: tuple[Choice, ...]


@dataclass(frozen=True)
class Compared:
    """A variant's scores against the baseline; `worst` has one entry a window, largest KL first."""

    scores: Scores
    worst: tuple[WorstToken, ...]
    backend: str
    weight_bytes: int


class Baseline:
    """The unquantized model at every scored position: what its head reads there, and the head.

    `watch` sees each of its slices after every step. floor: the baseline against itself on the first `floor_windows`
    windows, with other batches, chunks, order and cache blocks.
    """

    def __init__(
        self, variant: Variant, data: EvalSet, tick: Tick, *, floor_windows: int, watch: Watch | None = None
    ) -> None:
        self.windows: Sequence[Window] = data.windows
        self._starts = offsets(data.windows)
        self.cluster = np.repeat(np.arange(len(data.windows), dtype=np.int32), np.diff(self._starts))
        self._targets = np.concatenate([np.asarray(w.targets, np.int64) for w in data.windows])
        self._rows = budget(variant.program)
        self._body = self._stream(variant, self.windows, in_order(BODY_TOKENS), tick, watch)
        self._head = Head(
            variant.program, variant.weights, rows=self._rows, threads=variant.threads, backend=variant.backend
        )
        self._nll = np.zeros(int(self._starts[-1]))
        for index in self._chunks(len(self._nll)):
            base = self._base(index)
            self._nll[index] = -base.gather(1, torch.from_numpy(self._targets[index])[:, None])[:, 0].numpy()
        _require_finite(self._nll, self.windows, self.cluster, variant.name)
        self.floor = self._noise_floor(variant, tick, floor_windows)

    def compare(
        self, variant: Variant, tick: Tick, *, windows: int | None = None, watch: Watch | None = None
    ) -> Compared:
        """Scores of `variant`, run whole as it is served, over the first `windows` windows (all when None).

        `watch` sees the executor after every step.
        """
        chosen = self.windows[: windows or len(self.windows)]
        composition = in_order(self._rows)
        executor = make_executor(variant, chosen, composition)
        found = self._score(
            variant.name,
            len(chosen),
            (
                (step.index, torch.from_numpy(logits))
                for step, logits in run(executor, chosen, composition, tick, watch)
            ),
        )
        backend, weight_bytes = executor.backend_name, executor.weight_bytes
        del executor
        return_freed_memory()
        return replace(found, backend=backend, weight_bytes=weight_bytes)

    def _base(self, index: NDArray[np.int64]) -> torch.Tensor:
        """The baseline's log-probabilities, float32 `[len(index), V]`."""
        return torch.log_softmax(self._head.logits(self._body, index), dim=-1)

    def _noise_floor(self, variant: Variant, tick: Tick, windows: int) -> Compared:
        again = self._stream(variant, self.windows[:windows], interleaved(BODY_TOKENS), tick)
        count = int(self._starts[windows])
        # half the rows at a time: the head too sees another batch
        rows = ((index, self._head.logits(again, index)) for index in self._chunks(count, self._rows // 2))
        return self._score("noise floor", windows, rows)

    @staticmethod
    def _stream(
        variant: Variant,
        windows: Sequence[Window],
        composition: Composition,
        tick: Tick,
        watch: Watch | None = None,
    ) -> Activations:
        return stream_body(
            variant.program,
            variant.weights,
            windows,
            composition,
            threads=variant.threads,
            backend=variant.backend,
            tick=tick,
            watch=watch,
        )

    def _chunks(self, count: int, most: int | None = None) -> Iterator[NDArray[np.int64]]:
        size = most or self._rows
        return (np.arange(start, min(start + size, count)) for start in range(0, count, size))

    def _score(self, name: str, windows: int, rows: Iterable[tuple[NDArray[np.int64], torch.Tensor]]) -> Compared:
        count = int(self._starts[windows])
        scores = Scores.empty(self.cluster[:count])
        scores.nll_base[:] = self._nll[:count]
        worst: dict[int, WorstToken] = {}
        for index, logits in rows:
            base = self._base(index)
            found, same, nll = score_rows(base, logits, torch.from_numpy(self._targets[index]))
            kl = found.numpy().astype(np.float64)
            scores.kl[index], scores.same[index], scores.nll_cand[index] = kl, same.numpy(), nll.numpy()
            self._keep_worst(worst, index, kl, base, logits)  # base holds log ratios by now
        _require_finite(scores.kl + scores.nll_cand, self.windows[:windows], scores.cluster, name)
        return Compared(scores, tuple(sorted(worst.values(), key=lambda item: -item.kl)), "", 0)

    def _keep_worst(
        self,
        worst: dict[int, WorstToken],
        index: NDArray[np.int64],
        kl: NDArray[np.float64],
        ratios: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        for window in np.unique(self.cluster[index]):
            rows = np.flatnonzero(self.cluster[index] == window)
            row = rows[np.argmax(kl[rows])]
            known = worst.get(int(window))
            if known is None or kl[row] > known.kl:
                position = int(index[row] - self._starts[window]) + self.windows[window].first
                ours = torch.log_softmax(logits[row], -1)
                worst[int(window)] = WorstToken(
                    int(window), position, float(kl[row]), _top(ratios[row] + ours), _top(ours)
                )


def make_executor(variant: Variant, windows: Sequence[Window], composition: Composition) -> Executor:
    """An executor with room for `windows`, composed so."""
    longest = max(len(window.ids) for window in windows)
    return Executor(
        variant.program,
        variant.weights,
        max_tokens=composition.budget,
        max_seqs=composition.concurrent,
        num_blocks=composition.blocks(longest),
        block_size=BLOCK,
        max_model_len=longest,
        threads=variant.threads,
        backend=variant.backend,
        spill=variant.spill,
    )


def run(
    executor: Executor,
    windows: Sequence[Window],
    composition: Composition,
    tick: Tick,
    watch: Watch | None = None,
) -> Iterator[tuple[Step, NDArray[np.float32]]]:
    """Run every window; yields each step that scores something with its logits `[R, V]`, valid until the next."""
    for step in compose(windows, composition):
        logits = executor.step(step.inputs)
        if watch is not None:
            watch(executor, step.inputs)
        if len(step.index):
            yield step, logits
        tick(len(step.inputs.token_ids))


def budget(program: Program) -> int:
    """Tokens of a step: 128, fewer when the vocabulary is large."""
    return max(16, min(128, MOST_LOGITS // program.vocab_size))


def _top(log_probabilities: torch.Tensor) -> tuple[Choice, ...]:
    values, tokens = torch.topk(log_probabilities, min(TOP, len(log_probabilities)))
    return tuple(Choice(int(t), float(v)) for t, v in zip(tokens, values.exp(), strict=True))


def _require_finite(
    values: NDArray[np.float64], windows: Sequence[Window], cluster: NDArray[np.int32], name: str
) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        where = windows[cluster[bad[0]]].id
        raise NumericsError(f"{name} gives NaN or Inf on held-out text", where=where, next="Look at its scales")
