"""How far to believe a count: exact intervals of a share, and agreement between reviewers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

CONFIDENCE = 0.95


def exact_interval(count: int, of: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The two-sided Clopper-Pearson interval of a share; (0, 1) when nothing was seen.

    Source: C. J. Clopper, E. S. Pearson, Biometrika 26 (1934).
    """
    from scipy.special import betaincinv

    if not of:
        return 0.0, 1.0
    tail = (1 - confidence) / 2
    low = float(betaincinv(count, of - count + 1, tail)) if count else 0.0
    high = float(betaincinv(count + 1, of - count, 1 - tail)) if count < of else 1.0
    return low, high


def nominal_alpha(units: Iterable[Sequence[Hashable]]) -> float | None:
    """Krippendorff's alpha for nominal values.

    Args:
        units: for each thing judged, the values its reviewers gave, in any order; fewer than two say nothing.

    Returns:
        1 for full agreement, 0 for what chance would give; None when nothing was judged twice. When everybody always
        said the same one thing, chance explains all of it and alpha has no value: None as well.

    Source: K. Krippendorff, Computing Krippendorff's Alpha-Reliability (2011), D: any number of observers, nominal
    data, missing values.
    """
    totals: Counter[Hashable] = Counter()
    apart = 0.0
    for values in units:
        if len(values) < 2:
            continue
        counts = Counter(values)
        totals.update(counts)
        apart += sum(n * (len(values) - n) for n in counts.values()) / (len(values) - 1)
    total = sum(totals.values())
    expected = sum(n * (total - n) for n in totals.values())
    return None if not expected else 1 - (total - 1) * apart / expected
