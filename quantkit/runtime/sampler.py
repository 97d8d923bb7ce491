"""Sampler: the next token of each row of logits, in numpy. A row's draw depends on that row and its request alone.

Greedy takes the largest logit, the lowest id among equals. A random draw inverts the cumulative distribution at one
uniform number that Philox gives for (seed, output position): batch-mates, chunking and preemption never change it.
Only the candidates a filter can keep are sorted, never the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quantkit.runtime.request import Request, TokenLogprobs
from quantkit.runtime.sampling import SamplingParams

Row = NDArray[np.float32]

_MASK = 2**64 - 1
_SORTED = 256
"""Candidates few enough to sort."""
_BLOCK = 256
_COLDEST = 1e-5
"""Temperatures below this are greedy: dividing by them overflows."""
_HOTTEST = 1e30
"""Temperatures above this count as this: beyond, their inverse is 0 in float32 and 0 times -infinity is no number."""
_LARGEST = 1e30
"""Magnitude at which a penalized logit saturates, so that sums and differences of such stay finite in float32."""


class Draw(NamedTuple):
    """A drawn token; `token` None: the row holds NaN or infinity at its maximum."""

    token: int | None
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Draws tokens over a vocabulary of `vocab_size`, with scratch rows allocated once."""

    def __init__(self, vocab_size: int) -> None:
        self._scratch = np.empty(vocab_size, np.float32)
        self._weights = np.empty(vocab_size, np.float32)

    def sample(self, logits: NDArray[np.float32], requests: Sequence[Request]) -> list[Draw]:
        """One draw for each row of `logits` float32 `[R, V]`, which belongs to the request of the same index."""
        best = logits.argmax(axis=1)
        finite = np.isfinite(logits[np.arange(len(best)), best]).tolist()  # a NaN anywhere is numpy's maximum
        draws = [Draw(token) for token in best.tolist()]
        for index, request in enumerate(requests):
            if not finite[index]:
                draws[index] = Draw(None)
            elif not request.greedy or request.num_output < request.params.min_tokens:
                draws[index] = self._draw(logits[index], request)
        return draws

    def _draw(self, row: Row, request: Request) -> Draw:
        params = request.params
        adjusted = self._adjusted(row, request)
        token = int(adjusted.argmax())
        if not np.isfinite(adjusted[token]):
            return Draw(None)
        if params.temperature >= _COLDEST:
            scaled = np.subtract(adjusted, adjusted[token], out=self._scratch)
            if params.temperature != 1.0:
                with np.errstate(over="ignore"):
                    scaled *= np.float32(1.0 / min(params.temperature, _HOTTEST))
            token = self._choose(scaled, params, uniform(request.seed, request.num_output))
        return Draw(token, None if params.logprobs is None else self._logprobs(row, token, params.logprobs))

    def _choose(self, scaled: Row, params: SamplingParams, draw: float) -> int:
        """The token at `draw` of the filtered distribution. `scaled` `[V]`: logits over temperature, maximum 0."""
        if params.top_k:
            ids: NDArray[np.intp] | None = best(scaled, params.top_k)
            weights: NDArray[np.floating] = np.exp(scaled[ids], dtype=np.float64)
        else:
            ids, weights = None, np.exp(scaled, out=self._weights)
        if params.top_p < 1.0:
            kept = heaviest(weights, params.top_p * float(weights.sum()))
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        if params.min_p:
            kept = np.flatnonzero(weights >= params.min_p)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
        index = _invert(weights, draw)
        return index if ids is None else int(ids[index])

    def _logprobs(self, row: Row, token: int, count: int) -> TokenLogprobs:
        top = row.max()
        weights = np.exp(np.subtract(row, top, out=self._weights), out=self._weights)
        norm = float(top) + math.log(float(weights.sum(dtype=np.float64)))
        ids = best(row, count)
        return TokenLogprobs(float(row[token]) - norm, ids.tolist(), [float(v) - norm for v in row[ids]])

    def _adjusted(self, row: Row, request: Request) -> Row:
        """`row` with bias and penalties applied and stop ids out of reach before `min_tokens`; a copy if any does."""
        params, early = request.params, request.num_output < request.params.min_tokens
        if not (early or params.adjusts):
            return row
        out = self._scratch
        np.copyto(out, row)
        for token, bias in params.logit_bias.items():
            out[token] += np.float32(bias)
        if params.repetition_penalty != 1.0:
            seen = request.tokens[: request.num_tokens]
            values, penalty = out[seen].astype(np.float64), params.repetition_penalty
            with np.errstate(over="ignore"):
                penalized = np.where(values > 0, values / penalty, values * penalty)
            out[seen] = np.clip(penalized, -_LARGEST, _LARGEST)
        written = request.tokens[request.prompt_len : request.num_tokens]
        if params.presence_penalty:
            out[written] = out[written] - np.float32(params.presence_penalty)
        if params.frequency_penalty:
            np.subtract.at(out, written, np.float32(params.frequency_penalty))
        if early:
            out[list(request.stop_ids)] = -np.inf
        return out


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (Philox 4x64, key seed, counter position)."""
    generator = np.random.Philox(key=np.array([seed & _MASK, 0], np.uint64), counter=[position, 0, 0, 0])
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def best(values: Row, count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest of `values` `[n]`, largest first, lower index first among equals."""
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, np.intp)
    kth = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > kth)
    level = np.flatnonzero(values == kth)[: count - len(above)]
    chosen = np.concatenate([above, level])
    return chosen[np.lexsort((chosen, -values[chosen]))]


def heaviest(weights: NDArray[np.floating], enough: float) -> NDArray[np.intp]:
    """Indices of the fewest largest of `weights` `[n]` whose sum reaches `enough`, lower index first among equals.

    Quickselect by mass: split at a pivot, go on in the half where the sum crosses `enough`; only the last few are
    sorted. The first pivot settles a confident distribution at once.
    """
    taken: list[NDArray[np.intp]] = []
    inside, values = None, weights
    pivot = 0.02 * weights.max()
    while len(values) > _SORTED:
        above = values > pivot
        chosen = np.flatnonzero(above)
        if not len(chosen):  # the median is the maximum: what is left is mostly equal
            break
        heavy = float(values[chosen].sum(dtype=np.float64))
        if heavy < enough:
            taken.append(chosen if inside is None else inside[chosen])
            enough -= heavy
            chosen = np.flatnonzero(~above)
        inside, values = chosen if inside is None else inside[chosen], values[chosen]
        if len(values) > _SORTED:
            pivot = np.partition(values, len(values) // 2)[len(values) // 2]
    order = np.argsort(-values, kind="stable")
    last = int(np.searchsorted(np.cumsum(values[order], dtype=np.float64), enough)) + 1
    return np.concatenate([*taken, order[:last] if inside is None else inside[order[:last]]])


def _invert(weights: NDArray[np.floating], draw: float) -> int:
    """The index at which the running sum of `weights` passes `draw` of the whole: first the block, then within it."""
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)), dtype=np.float64)
    target = draw * blocks[-1]
    block = min(int(np.searchsorted(blocks, target, side="right")), len(blocks) - 1)
    before = blocks[block - 1] if block else 0.0
    inner = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    share = (target - before) / (blocks[block] - before)
    return block * _BLOCK + min(int(np.searchsorted(inner, share * inner[-1], side="right")), len(inner) - 1)
