"""Which samples: as many of each category and language as the profile says, with lengths like the profile's.

Without a profile the cells take turns, so that each has as many as any other where the data allows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit.profile.model import ANY, Cell, Histogram, Profile

CellKey = tuple[str, str]
"""(category, language)."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a candidate: of its prompt and of its answer, None where it has no answer to tell apart."""

    prompt: int
    output: int | None


def cell_for(profile: Profile | None, category: str, language: str) -> CellKey | None:
    """The cell that a row counts to: its own without a profile; with one, the profile's cell of that pair, or of one
    half and `any`; None when the profile has none for it."""
    if profile is None:
        return category, language
    pairs = ((category, language), (category, ANY), (ANY, language), (ANY, ANY))
    return next((pair for pair in pairs if (cell := profile.cell(*pair)) is not None and cell.share > 0), None)


def quotas(available: Mapping[CellKey, int], count: int, profile: Profile | None) -> dict[CellKey, int]:
    """How many samples each cell gives: `count` in all, or all there are.

    Cells with less than their share give all they have; the others' shares of the rest are turned into numbers by
    largest remainder. Every cell of the profile is in the answer.
    """
    shares = (
        dict.fromkeys(available, 1.0) if profile is None else {c.key: c.share for c in profile.cells if c.share > 0}
    )
    given = dict.fromkeys(shares, 0)
    left = min(count, sum(available.get(key, 0) for key in shares))
    while shares:
        total = math.fsum(shares.values())
        short = [key for key, share in shares.items() if left * share / total >= available.get(key, 0)]
        if not short:
            return given | largest_remainder(shares, left)
        for key in short:
            given[key] = available.get(key, 0)
            left -= given[key]
            del shares[key]
    return given


def largest_remainder(shares: Mapping[CellKey, float], count: int) -> dict[CellKey, int]:
    """Whole numbers that sum to `count`, in proportion to `shares`; of equal remainders the first key's is raised."""
    total = math.fsum(shares.values())
    exact = {key: count * share / total for key, share in shares.items()}
    parts = {key: math.floor(value + 1e-9) for key, value in exact.items()}
    order = sorted(exact, key=lambda key: (-round(exact[key] - parts[key], 9), key))
    for key in order[: count - sum(parts.values())]:
        parts[key] += 1
    return parts


def choose(candidates: Sequence[Lengths], count: int, cell: Cell | None) -> list[int]:
    """Indices of `count` candidates whose lengths follow the cell's histograms as far as they allow.

    The candidates come in random order; the first of equally wanted ones is taken. Where prompts and answers cannot
    both be matched, the bin that lacks more counts.
    """
    count = min(count, len(candidates))
    wanted = (
        _Deficit(cell.prompt_tokens if cell else None, count),
        _Deficit(cell.output_tokens if cell else None, count),
    )
    waiting: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in reversed(range(len(candidates))):  # so that pop() takes the first
        lengths = candidates[index]
        waiting[wanted[0].bin_of(lengths.prompt), wanted[1].bin_of(lengths.output)].append(index)
    taken: list[int] = []
    while len(taken) < count:
        best = max(waiting, key=lambda bins: (wanted[0].of(bins[0]) + wanted[1].of(bins[1]), -waiting[bins][-1]))
        taken.append(waiting[best].pop())
        if not waiting[best]:
            del waiting[best]
        for side, bin_ in zip(wanted, best, strict=True):
            side.take(bin_)
    return taken


class _Deficit:
    """How many samples each length bin still lacks; a side without histogram wants nothing."""

    def __init__(self, histogram: Histogram | None, count: int) -> None:
        self._histogram = histogram
        self._lacks = [share * count for share in histogram.share] if histogram else []

    def bin_of(self, length: int | None) -> int:
        return -1 if self._histogram is None or length is None else self._histogram.bin_of(length)

    def of(self, bin_: int) -> float:
        return self._lacks[bin_] if bin_ >= 0 else 0.0

    def take(self, bin_: int) -> None:
        if bin_ >= 0:
            self._lacks[bin_] -= 1
