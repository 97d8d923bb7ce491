"""Teacher-forced runs over the held-out windows, compared with the baseline chunk by chunk.

One executor lives at a time. The baseline's log-probabilities go to a file in the work folder (float32, read back
through the page cache, never counted in anonymous memory); everything after it is compared row by row and only
scalars are kept.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.errors import NumericsError, PreflightError
from quantkit.gate.data import EvalSet, Window
from quantkit.gate.metrics import Scores, score_rows
from quantkit.gate.steps import BLOCK, Composition, Step, compose, in_order, interleaved, offsets
from quantkit.program.ir import Program
from quantkit.program.weights import WeightProvider
from quantkit.runtime.executor import Executor

MOST_LOGITS = 8_000_000
"""Logits of one step: 32 MB a buffer, of which about four exist."""
TOP = 5
"""Alternatives kept for the worst token of a window."""

Tick = Callable[[int], None]
"""Told the number of tokens a step ran."""


@dataclass(frozen=True)
class Variant:
    """A program and its weights, to be run over the windows. `threads`, `backend`: as the executor takes them."""

    name: str
    program: Program
    weights: WeightProvider
    threads: int | None = None
    backend: str = "auto"


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
    """The unquantized model's log-probabilities `[S, V]` at every scored position, in a file that goes with it.

    floor: the baseline against itself on the first `floor_windows` windows, with other batches, chunks, order and
    cache blocks.
    """

    def __init__(self, variant: Variant, data: EvalSet, work: Path, tick: Tick, *, floor_windows: int) -> None:
        self.windows: Sequence[Window] = data.windows
        self._starts = offsets(data.windows)
        self.cluster = np.repeat(np.arange(len(data.windows), dtype=np.int32), np.diff(self._starts))
        self._targets = np.concatenate([np.asarray(w.targets, np.int64) for w in data.windows])
        shape = (int(self._starts[-1]), variant.program.vocab_size)
        _require_room(work, shape[0] * shape[1] * 4)
        self._folder = tempfile.TemporaryDirectory(prefix="gate-baseline-", dir=work)
        self._rows = np.memmap(Path(self._folder.name) / "logprobs.f32", np.float32, "w+", shape=shape)
        self._nll = np.zeros(shape[0])
        most = budget(variant.program)
        executor = make_executor(variant, self.windows, (in_order(most), interleaved(most)))
        for step, logits in run(executor, self.windows, in_order(most), tick):
            values = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
            self._rows[step.index] = values
            self._nll[step.index] = -values[np.arange(len(values)), self._targets[step.index]]
        _require_finite(self._nll, self.windows, self.cluster, variant.name)
        executor.clear_cache()
        self.floor = self._compare(executor, variant.name, interleaved(most), tick, floor_windows)
        del executor
        gc.collect()

    def __enter__(self) -> Baseline:
        return self

    def __exit__(self, *_: object) -> None:
        del self._rows
        self._folder.cleanup()

    def compare(self, variant: Variant, tick: Tick, *, windows: int | None = None) -> Compared:
        """Scores of `variant` over the first `windows` windows (all when None)."""
        composition = in_order(budget(variant.program))
        executor = make_executor(variant, self.windows, (composition,))
        found = self._compare(executor, variant.name, composition, tick, windows)
        del executor
        gc.collect()
        return found

    def _compare(
        self, executor: Executor, name: str, composition: Composition, tick: Tick, windows: int | None
    ) -> Compared:
        chosen = self.windows[: windows or len(self.windows)]
        count = int(self._starts[len(chosen)])
        scores = Scores.empty(self.cluster[:count])
        scores.nll_base[:] = self._nll[:count]
        worst: dict[int, WorstToken] = {}
        for step, logits in run(executor, chosen, composition, tick):
            index = step.index
            base = torch.from_numpy(self._rows[index])
            targets = torch.from_numpy(self._targets[index])
            found, same, nll = score_rows(base, torch.from_numpy(logits), targets)
            kl = found.numpy().astype(np.float64)
            scores.kl[index], scores.same[index], scores.nll_cand[index] = kl, same.numpy(), nll.numpy()
            self._keep_worst(worst, index, kl, logits)
        _require_finite(scores.kl + scores.nll_cand, chosen, scores.cluster, name)
        ordered = sorted(worst.values(), key=lambda item: -item.kl)
        return Compared(scores, tuple(ordered), executor.backend_name, executor.weight_bytes)

    def _keep_worst(
        self,
        worst: dict[int, WorstToken],
        index: NDArray[np.int64],
        kl: NDArray[np.float64],
        logits: NDArray[np.float32],
    ) -> None:
        for window in np.unique(self.cluster[index]):
            rows = np.flatnonzero(self.cluster[index] == window)
            row = rows[np.argmax(kl[rows])]
            known = worst.get(int(window))
            if known is None or kl[row] > known.kl:
                position = int(index[row] - self._starts[window]) + self.windows[window].first
                ours = torch.log_softmax(torch.from_numpy(logits[row]), -1)
                base = torch.from_numpy(self._rows[index[row]])
                worst[int(window)] = WorstToken(int(window), position, float(kl[row]), _top(base), _top(ours))


def make_executor(variant: Variant, windows: Sequence[Window], compositions: Sequence[Composition]) -> Executor:
    """An executor with room for `windows` in any of the compositions."""
    longest = max(len(window.ids) for window in windows)
    return Executor(
        variant.program,
        variant.weights,
        max_tokens=max(one.budget for one in compositions),
        max_seqs=max(one.concurrent for one in compositions),
        num_blocks=max(one.blocks(longest) for one in compositions),
        block_size=BLOCK,
        max_model_len=longest,
        threads=variant.threads,
        backend=variant.backend,
    )


def run(
    executor: Executor, windows: Sequence[Window], composition: Composition, tick: Tick
) -> Iterator[tuple[Step, NDArray[np.float32]]]:
    """Run every window; yields each step that scores something with its logits `[R, V]`, valid until the next."""
    for step in compose(windows, composition):
        logits = executor.step(step.inputs)
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


def _require_room(work: Path, needed: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(work).free
    if free < needed + (64 << 20):
        raise PreflightError(
            f"the gate keeps {needed / 1e6:,.0f} MB of baseline log-probabilities and {free / 1e6:,.0f} MB are free",
            where=str(work),
            next="Free some space, or lower gate.max_samples",
        )
