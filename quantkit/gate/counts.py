"""Exact statistics of counts: binomial intervals, McNemar's test, and how much more data a proof would take."""

from __future__ import annotations

from dataclasses import dataclass

from scipy.special import bdtr, betaincinv

MOST_ITEMS = 100_000
"""Beyond which no number of further items is named."""


def clopper_pearson(count: int, n: int, confidence: float) -> tuple[float, float]:
    """Bounds of a share of which `count` of `n` were seen, each missed with probability at most 1 - confidence.

    (Clopper and Pearson, Biometrika 26, 1934.) One-sided bounds: the pair covers with 2·confidence - 1.
    """
    tail = 1.0 - confidence
    low = 0.0 if count == 0 else float(betaincinv(count, n - count + 1, tail))
    high = 1.0 if count == n else float(betaincinv(count + 1, n - count, 1.0 - tail))
    return low, high


def mcnemar(losses: int, gains: int) -> float:
    """Two-sided exact p of McNemar's test: are losses and gains among discordant pairs equally likely?"""
    n = losses + gains
    return 1.0 if n == 0 else min(1.0, 2.0 * float(bdtr(min(losses, gains), n, 0.5)))


@dataclass(frozen=True)
class Change:
    """How a share changed over `n` pairs: `losses` that only the baseline had right, `gains` only the candidate.

    low: no smaller change is likely, by exact bounds on losses and gains; what a proof of no harm rests on.
    high: no greater one is, given the pairs that differ (the interval of McNemar's test); what harm is shown by.
    """

    n: int
    losses: int
    gains: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """Gains less losses as a share."""
        return (self.gains - self.losses) / self.n

    @property
    def p(self) -> float:
        """McNemar's exact p."""
        return mcnemar(self.losses, self.gains)


def change(losses: int, gains: int, n: int, confidence: float) -> Change:
    """The change of a share over `n` > 0 pairs, with one-sided bounds at `confidence`."""
    lost, won = clopper_pearson(losses, n, confidence), clopper_pearson(gains, n, confidence)
    differ = losses + gains
    high = won[1] if not differ else (2.0 * clopper_pearson(gains, differ, confidence)[1] - 1.0) * differ / n
    return Change(n, losses, gains, won[0] - lost[1], high)


def items_needed(losses: int, n: int, drop: float, confidence: float) -> int | None:
    """Further items after which, without another loss, a loss of `drop` would be excluded; None beyond MOST_ITEMS."""
    if clopper_pearson(losses, MOST_ITEMS, confidence)[1] > drop:
        return None
    low, high = max(n, 1), MOST_ITEMS
    while low < high:
        middle = (low + high) // 2
        if clopper_pearson(min(losses, middle), middle, confidence)[1] <= drop:
            high = middle
        else:
            low = middle + 1
    return low - n
