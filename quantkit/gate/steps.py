"""How windows are cut into steps of an executor: which tokens run together, and where their keys and values go.

The baseline and its rungs run one window after the other; the noise floor runs the same windows interleaved, in small
pieces, in reversed order and in other cache blocks. On an invariant runtime both give the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.gate.data import Window
from quantkit.runtime.step import StepInputs

BLOCK = 16
"""Tokens of a cache block, as the engine has it."""


@dataclass(frozen=True)
class Piece:
    """Tokens `[start, stop)` of window `window` in one step."""

    window: int
    start: int
    stop: int


@dataclass(frozen=True)
class Composition:
    """How steps are filled. budget: tokens of a step. concurrent: windows in flight. piece: most tokens of one."""

    budget: int
    concurrent: int
    piece: int
    reverse: bool = False

    def blocks(self, longest: int) -> int:
        """Cache blocks that suffice for windows of at most `longest` tokens, the null block included."""
        return 1 + self.concurrent * -(-longest // BLOCK)


def in_order(budget: int) -> Composition:
    """One window after the other, steps filled up with the next one's head."""
    return Composition(budget, concurrent=4, piece=budget)


def interleaved(budget: int) -> Composition:
    """Five windows at once in pieces of 23 tokens, last first: nothing of `in_order`'s shapes is left."""
    return Composition(budget, concurrent=5, piece=min(23, max(1, budget // 5)), reverse=True)


@dataclass(frozen=True)
class Step:
    """One step. `index[r]`: place of logits row r among all scored tokens; `place[t]`: of token t among all tokens."""

    inputs: StepInputs
    index: NDArray[np.int64]
    place: NDArray[np.int64]


def offsets(windows: Sequence[Window]) -> NDArray[np.int64]:
    """Place of each window's first scored token among all scored tokens; one more entry holds their number."""
    return np.concatenate([[0], np.cumsum([window.scored for window in windows])]).astype(np.int64)


def compose(windows: Sequence[Window], composition: Composition) -> Iterator[Step]:
    """Steps that run every window once; logits are asked for at scored positions only."""
    starts = offsets(windows)
    begins = np.concatenate([[0], np.cumsum([len(window.ids) for window in windows])])
    longest = max(len(window.ids) for window in windows)
    free = list(range(1, composition.blocks(longest)))
    if not composition.reverse:
        free.reverse()
    held: dict[int, list[int]] = {}
    for pieces in _pieces([len(window.ids) for window in windows], composition):
        for piece in pieces:
            if piece.start == 0:
                held[piece.window] = [free.pop() for _ in range(-(-len(windows[piece.window].ids) // BLOCK))]
        place = np.concatenate([np.arange(begins[p.window] + p.start, begins[p.window] + p.stop) for p in pieces])
        yield _step(windows, pieces, held, starts, place)
        for piece in pieces:
            if piece.stop == len(windows[piece.window].ids):
                free.extend(held.pop(piece.window))


def _pieces(lengths: Sequence[int], composition: Composition) -> Iterator[list[Piece]]:
    order = range(len(lengths))
    waiting = deque(reversed(order) if composition.reverse else order)
    running: dict[int, int] = {}
    while waiting or running:
        room, step = composition.budget, []
        for window in list(running):
            if room:
                step.append(_take(running, window, lengths[window], min(room, composition.piece)))
                room -= step[-1].stop - step[-1].start
        while waiting and room and len(running) < composition.concurrent:
            window = waiting.popleft()
            running[window] = 0
            step.append(_take(running, window, lengths[window], min(room, composition.piece)))
            room -= step[-1].stop - step[-1].start
        for piece in step:
            if piece.stop == lengths[piece.window]:
                del running[piece.window]
        yield step


def _take(running: dict[int, int], window: int, length: int, most: int) -> Piece:
    start = running[window]
    running[window] = min(length, start + most)
    return Piece(window, start, running[window])


def _step(
    windows: Sequence[Window],
    pieces: Sequence[Piece],
    held: dict[int, list[int]],
    starts: NDArray[np.int64],
    place: NDArray[np.int64],
) -> Step:
    inputs = StepInputs.of_sequences(
        [list(windows[p.window].ids[p.start : p.stop]) for p in pieces],
        [held[p.window] for p in pieces],
        starts=[p.start for p in pieces],
        block_size=BLOCK,
        logits="none",
    )
    rows: list[int] = []
    index: list[int] = []
    token = 0
    for piece in pieces:
        window = windows[piece.window]
        for position in range(max(piece.start, window.first), min(piece.stop, len(window.ids) - 1)):
            rows.append(token + position - piece.start)
            index.append(int(starts[piece.window]) + position - window.first)
        token += piece.stop - piece.start
    asked = StepInputs(**{**vars(inputs), "logits_rows": np.asarray(rows, np.int32)})
    return Step(asked, np.asarray(index, np.int64), place)
