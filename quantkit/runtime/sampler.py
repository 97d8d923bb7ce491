"""Sampler: the next token of each row of logits, in numpy. A row's draw depends on that row and its request alone.

Greedy takes the largest logit, the lowest id among equals. A random draw inverts the cumulative distribution at one
uniform number that Philox gives for (seed, output position): batch-mates, chunking and preemption never change it.
Only the candidates a filter can keep are sorted, never the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quantkit.runtime.request import Request, TokenLogprobs
from quantkit.runtime.sampling import SamplingParams

Row = NDArray[np.float32]

_MASK = 2**64 - 1
_COLDEST = 1e-5
"""Temperatures below this are greedy: dividing by them overflows."""


class Draw(NamedTuple):
    """A drawn token; `token` None: the row holds NaN or infinity at its maximum."""

    token: int | None
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Draws tokens over a vocabulary of `vocab_size`, with one scratch row allocated once."""

    def __init__(self, vocab_size: int) -> None:
        self._scratch = np.empty(vocab_size, np.float32)

    def sample(self, logits: NDArray[np.float32], requests: Sequence[Request]) -> list[Draw]:
        """One draw for each row of `logits` float32 `[R, V]`, which belongs to the request of the same index."""
        draws: list[Draw] = []
        best = logits.argmax(axis=1)
        peaks = logits[np.arange(len(best)), best]
        for row, request, top, finite in zip(logits, requests, best.tolist(), np.isfinite(peaks).tolist(), strict=True):
            if not finite:  # a NaN anywhere is numpy's maximum
                draws.append(Draw(None))
            elif request.params.plain_greedy and request.num_output >= request.params.min_tokens:
                draws.append(Draw(top))
            else:
                draws.append(self._draw(row, request))
        return draws

    def _draw(self, row: Row, request: Request) -> Draw:
        params = request.params
        adjusted = self._adjusted(row, request)
        top = int(adjusted.argmax())
        if not np.isfinite(adjusted[top]):
            return Draw(None)
        token = top
        if params.temperature >= _COLDEST:
            adjusted -= adjusted[top]
            with np.errstate(over="ignore"):
                adjusted /= np.float32(params.temperature)
            token = _choose(adjusted, params, uniform(request.seed, request.num_output))
        return Draw(token, None if params.logprobs is None else _logprobs(row, token, params.logprobs))

    def _adjusted(self, row: Row, request: Request) -> Row:
        """A copy of `row` with bias and penalties applied, and stop ids out of reach before `min_tokens`."""
        params, out = request.params, self._scratch
        np.copyto(out, row)
        for token, bias in params.logit_bias.items():
            out[token] += np.float32(bias)
        if params.repetition_penalty != 1.0:
            seen = request.tokens[: request.num_tokens]
            values, penalty = out[seen], np.float32(params.repetition_penalty)
            out[seen] = np.where(values > 0, values / penalty, values * penalty)
        written = request.tokens[request.prompt_len : request.num_tokens]
        if params.presence_penalty:
            out[written] = out[written] - np.float32(params.presence_penalty)
        if params.frequency_penalty:
            np.subtract.at(out, written, np.float32(params.frequency_penalty))
        if request.num_output < params.min_tokens:
            out[list(request.stop_ids)] = -np.inf
        return out


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (Philox 4x64, key seed, counter position)."""
    generator = np.random.Philox(key=[seed & _MASK, 0], counter=[position, 0, 0, 0])
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


def _choose(scaled: Row, params: SamplingParams, draw: float) -> int:
    """The token at `draw` of the filtered distribution. `scaled` `[V]`: logits over temperature, their maximum 0."""
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        return _invert(np.exp(scaled), None, draw)
    if params.top_k:
        ids = best(scaled, params.top_k)
        enough = float(np.exp(scaled[ids], dtype=np.float64).sum()) * params.top_p
    elif params.top_p < 1.0:
        enough = float(np.exp(scaled).sum(dtype=np.float64)) * params.top_p
        ids = _nucleus(scaled, enough)
    else:
        ids = _by_weight(scaled, np.flatnonzero(scaled >= np.log(params.min_p) - 1e-3))
    weights = np.exp(scaled[ids], dtype=np.float64)
    kept = len(ids)
    if params.top_p < 1.0:
        kept = int(np.searchsorted(np.cumsum(weights), enough)) + 1
    if params.min_p:
        kept = min(kept, int(np.count_nonzero(weights >= params.min_p)))
    return _invert(weights[:kept], ids[:kept], draw)


def _nucleus(scaled: Row, enough: float) -> NDArray[np.intp]:
    """Tokens best first, of mass `enough` or more. A confident row is settled by the few within 4 nats of its best."""
    for reach in (4.0, 10.0, 20.0, np.inf):
        ids = np.flatnonzero(scaled >= -reach)
        if float(np.exp(scaled[ids], dtype=np.float64).sum()) >= enough:
            break
    return _by_weight(scaled, ids)


def _by_weight(scaled: Row, ids: NDArray[np.intp]) -> NDArray[np.intp]:
    return ids[np.lexsort((ids, -scaled[ids]))]


def _invert(weights: NDArray[np.floating], ids: NDArray[np.intp] | None, draw: float) -> int:
    """The index (or the id there) at which the running sum of `weights` passes `draw` of the whole."""
    sums = np.cumsum(weights, dtype=np.float64)
    index = min(int(np.searchsorted(sums, draw * sums[-1], side="right")), len(sums) - 1)
    return index if ids is None else int(ids[index])


def _logprobs(row: Row, token: int, count: int) -> TokenLogprobs:
    top = row.max()
    norm = float(top) + float(np.log(np.exp(row - top).sum(dtype=np.float64)))
    ids = best(row, count)
    return TokenLogprobs(float(row[token]) - norm, ids.tolist(), [float(v) - norm for v in row[ids]])
