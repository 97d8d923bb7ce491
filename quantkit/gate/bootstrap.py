"""Confidence intervals by resampling conversations: tokens of one conversation stay together.

All candidates are resampled with the same draws, so that ratios between them are paired.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.gate.metrics import Floats, Scores


class Resampler:
    """`samples` draws of conversations with replacement, fixed by `seed`, for scores that share `cluster`.

    Results are `[1 + samples]`: the sample as it is, then the draws.
    """

    def __init__(self, cluster: NDArray[np.int32], *, samples: int, seed: int) -> None:
        _, self._index = np.unique(cluster, return_inverse=True)
        groups = int(self._index.max()) + 1
        self._sizes = np.bincount(self._index)
        draws = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=samples)
        self._draws = np.vstack([np.ones(groups), draws]).astype(np.float64)

    def mean(self, values: Floats) -> Floats:
        """The mean of `values` `[S]` in each draw."""
        totals = np.bincount(self._index, weights=values)
        return np.asarray(self._draws @ totals / (self._draws @ self._sizes))

    def quantile(self, values: Floats, q: float) -> Floats:
        """The q-quantile of `values` `[S]` in each draw: the least value that a share q of the draw doesn't exceed."""
        order = np.argsort(values, kind="stable")
        ordered, owner = values[order], self._index[order]
        result = np.empty(len(self._draws))
        for i, draw in enumerate(self._draws):
            below = np.cumsum(draw[owner])
            result[i] = ordered[np.searchsorted(below, q * below[-1])]
        return result

    def metric(self, name: str, scores: Scores) -> Floats:
        """One of METRICS in each draw."""
        return METRICS[name](self, scores)


METRICS: dict[str, Callable[[Resampler, Scores], Floats]] = {
    "mean_kl": lambda r, s: r.mean(s.kl),
    "p99_kl": lambda r, s: r.quantile(s.kl, 0.99),
    "same_top1": lambda r, s: r.mean(s.same.astype(float)),
    "lost_top1": lambda r, s: 1.0 - r.mean(s.same.astype(float)),
    "ppl_ratio": lambda r, s: np.exp(r.mean(s.nll_cand - s.nll_base)),
}
"""Metrics that a policy may limit."""


@dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval."""

    value: float
    low: float
    high: float


def estimate(results: Floats, confidence: float) -> Estimate:
    """The value and the central percentile interval of a resampler's results."""
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(results[1:], [tail, 1.0 - tail])
    return Estimate(float(results[0]), float(low), float(high))
