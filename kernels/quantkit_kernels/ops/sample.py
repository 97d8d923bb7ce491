"""A token for each row of logits: penalties, temperature, top-k, top-p, min-p, a seeded draw; in numpy, without torch.

Filters keep a head of one order, larger logits first and lower ids first among equals. What they keep together is drawn
from by ascending id: the token at which the running sum of the weights exp(logit / temperature) passes a uniform
number's share of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COLDEST = 1e-5
"""Temperatures below this are greedy: dividing by them overflows in float32."""
HOTTEST = 1e30
"""Temperatures above this count as this: beyond, their inverse is 0 in float32 and 0 times -infinity is no number."""
LARGEST = 1e30
"""Magnitude at which a penalized logit saturates, so that sums and differences of such stay finite in float32."""
_MASK = 2**64 - 1
_NONE = np.empty(0, np.int32)


class SampleRow(NamedTuple):
    """How one row is drawn. The fields apply in this order; the defaults are greedy over the logits as they come."""

    bias: Mapping[int, float] = {}
    """Token id -> number added to its logit."""
    tokens: NDArray[np.int32] = _NONE
    """Int32 `[n]`: those penalties look at. The first `prompt` were given, the rest generated."""
    prompt: int = 0
    repetition: float = 1.0
    """Positive logits of `tokens` are divided by it, others multiplied."""
    presence: float = 0.0
    """Subtracted once from the logits of generated tokens."""
    frequency: float = 0.0
    """Subtracted as often as a token was generated."""
    banned: Collection[int] = ()
    """Tokens out of reach."""
    temperature: float = 0.0
    """Below `COLDEST`: the largest logit, the lowest id among equals."""
    top_k: int = 0
    """The likeliest so many; 0: all."""
    top_p: float = 1.0
    """The fewest of what top_k leaves that reach this share of it."""
    min_p: float = 0.0
    """Those at least this times as likely as the likeliest."""
    seed: int = 0
    position: int = 0
    logprobs: int | None = None
    """Likeliest tokens to report beside the drawn one, by the logits as they came; None: no log probabilities."""


GREEDY = SampleRow()


class Sampled(NamedTuple):
    """A drawn token, None where the row holds NaN or its largest logit is infinite; log probabilities if asked for."""

    token: int | None
    logprob: float | None = None
    top_ids: Sequence[int] = ()
    """Likeliest first."""
    top_logprobs: Sequence[float] = ()


def reference(logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[Sampled]:
    """One draw for each row of `logits` float32 `[R, V]`; IndexError where an id lies outside the vocabulary."""
    return [_sample(values, row) for values, row in zip(logits, rows, strict=True)]


def _sample(values: NDArray[np.float32], row: SampleRow) -> Sampled:
    changed = adjusted(values, row)
    if not (np.isfinite(values.max()) and np.isfinite(changed.max())):  # a NaN anywhere is numpy's maximum
        return Sampled(None)
    token = int(changed.argmax())
    if row.temperature >= COLDEST:
        running = np.cumsum(probabilities(changed, row))
        token = int(np.searchsorted(running, uniform(row.seed, row.position) * running[-1], side="right"))
    if row.logprobs is None:
        return Sampled(token)
    wide = values.astype(np.float64)
    logprobs = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    best = np.argsort(-wide, kind="stable")[: row.logprobs]
    return Sampled(token, float(logprobs[token]), best.tolist(), logprobs[best].tolist())


def probabilities(values: NDArray[np.float32], row: SampleRow) -> NDArray[np.float64]:
    """What each token of adjusted logits `values` `[V]` is drawn with, after the row's filters: float64 `[V]`."""
    wide, temperature = values.astype(np.float64), min(row.temperature, HOTTEST)
    order = np.argsort(-wide, kind="stable")
    weights = np.exp((wide - wide.max()) / temperature)
    kept = order[: row.top_k or None]
    if row.top_p < 1.0:
        running = np.cumsum(weights[kept])
        kept = kept[: 1 + np.searchsorted(running, row.top_p * running[-1])]
    if row.min_p:
        kept = kept[wide[kept] >= wide.max() + temperature * math.log(row.min_p)]
    filtered = np.zeros(len(wide))
    filtered[kept] = weights[kept]
    return filtered / filtered.sum()


def adjusted(values: NDArray[np.float32], row: SampleRow) -> NDArray[np.float32]:
    """Logits `[V]` with bias, penalties and bans applied: a copy."""
    out = values.copy()
    for token, bias in row.bias.items():
        out[token] += np.float32(bias)
    seen, counts = np.unique(row.tokens[row.prompt :], return_counts=True)
    if row.repetition != 1.0:
        held = np.unique(row.tokens)
        held = held[out[held] > -np.inf]
        wide = out[held].astype(np.float64)
        with np.errstate(over="ignore"):
            penalized = np.where(wide > 0, wide / row.repetition, wide * row.repetition)
        out[held] = np.clip(penalized, -LARGEST, LARGEST)
    out[seen] -= np.float32(row.presence)
    for token, count in zip(seen, counts, strict=True):
        for _ in range(count):  # one rounding each
            out[token] -= np.float32(row.frequency)
    out[list(row.banned)] = -np.inf
    return out


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (Philox 4x64, key seed, counter position)."""
    generator = np.random.Philox(key=np.array([seed & _MASK, 0], np.uint64), counter=[position, 0, 0, 0])
    return float(int(generator.random_raw()) >> 11) * 2.0**-53
