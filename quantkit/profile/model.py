"""What production traffic looks like: shares of category × language, lengths in tokens, requests at once."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ANY = "any"
"""Category or language of a cell that stands for all that are not listed."""
EDGES = tuple(sorted({2**n for n in range(4, 18)} | {3 * 2**n for n in range(4, 16)}))
"""Upper edges of the length bins that `Histogram.of` counts in: 16, 32, 48, 64, 96, 128, 192, ..., 131072 tokens."""
_LONGEST_LABEL = 200


@dataclass(frozen=True)
class Histogram:
    """Share of requests by length. `up_to[i]`: the greatest length, in tokens, of bin i; ascending. `share`: sums to 1.

    Bin i holds lengths above `up_to[i - 1]` (above 0 for the first); what is longer than the last edge counts to it.
    """

    up_to: tuple[int, ...]
    share: tuple[float, ...]

    @staticmethod
    def of(lengths: Iterable[int], edges: Sequence[int] = EDGES) -> Histogram | None:
        """Counted from `lengths`; None when there is none."""
        counts = [0] * len(edges)
        for length in lengths:
            counts[bin_of(length, edges)] += 1
        return Histogram.of_counts(counts, edges)

    @staticmethod
    def of_counts(counts: Sequence[int], edges: Sequence[int] = EDGES) -> Histogram | None:
        """From the requests in each bin, without the empty bins at both ends; None when all are empty."""
        filled = [i for i, count in enumerate(counts) if count]
        if not filled:
            return None
        first, last = filled[0], filled[-1]
        total = sum(counts)
        return Histogram(tuple(edges[first : last + 1]), tuple(count / total for count in counts[first : last + 1]))

    def bin_of(self, length: int) -> int:
        """The bin that `length` tokens fall into."""
        return bin_of(length, self.up_to)

    def percentile(self, share: float) -> int:
        """Upper edge of the bin where the cumulated share reaches `share` (0 to 1): a bound, in tokens, from above."""
        total = 0.0
        for edge, part in zip(self.up_to, self.share, strict=True):
            total += part
            if total >= share - 1e-9:
                return edge
        return self.up_to[-1]


@dataclass(frozen=True)
class Cell:
    """One category in one language: its share of all requests and how long prompts and answers are, where known."""

    category: str
    language: str
    share: float
    prompt_tokens: Histogram | None = None
    output_tokens: Histogram | None = None

    @property
    def key(self) -> tuple[str, str]:
        """(category, language)."""
        return self.category, self.language


@dataclass(frozen=True)
class Concurrency:
    """Requests in flight, over the time that was looked at."""

    mean: float
    peak: int


@dataclass(frozen=True)
class Profile:
    """Cells with shares that sum to 1, sorted by category and language; each pair once.

    `requests`: how many the profile was counted from, None for one made by hand. `tokenizer`: what counted the tokens.
    """

    cells: tuple[Cell, ...]
    concurrency: Concurrency | None = None
    requests: int | None = None
    tokenizer: str | None = None

    @property
    def categories(self) -> dict[str, float]:
        """Share of each category."""
        return _sums((cell.category, cell.share) for cell in self.cells)

    @property
    def languages(self) -> dict[str, float]:
        """Share of each language."""
        return _sums((cell.language, cell.share) for cell in self.cells)

    def cell(self, category: str, language: str) -> Cell | None:
        """The cell of that category and language."""
        return next((cell for cell in self.cells if cell.key == (category, language)), None)

    @property
    def prompt_tokens(self) -> Histogram | None:
        """Prompt lengths over all cells that state them, weighted by share."""
        return mix([(cell.share, cell.prompt_tokens) for cell in self.cells])

    @property
    def output_tokens(self) -> Histogram | None:
        """Answer lengths over all cells that state them, weighted by share."""
        return mix([(cell.share, cell.output_tokens) for cell in self.cells])


def label(value: object) -> str:
    """`value` as the name of a category, language or row: at most 200 characters, such as any file can hold."""
    return str(value).strip()[:_LONGEST_LABEL].encode("utf-8", "replace").decode()


def bin_of(length: int, edges: Sequence[int]) -> int:
    """Index of the first edge that is at least `length`; the last one's for anything longer."""
    return min(bisect.bisect_left(edges, length), len(edges) - 1)


def mix(parts: Sequence[tuple[float, Histogram | None]]) -> Histogram | None:
    """The weighted mixture of histograms on the union of their edges; None when all are."""
    known = [(weight, histogram) for weight, histogram in parts if histogram is not None and weight > 0]
    total = sum(weight for weight, _ in known)
    if not known:
        return None
    sums: dict[int, float] = {}
    for weight, histogram in known:
        for edge, share in zip(histogram.up_to, histogram.share, strict=True):
            sums[edge] = sums.get(edge, 0.0) + weight * share / total
    return Histogram(tuple(sorted(sums)), tuple(sums[edge] for edge in sorted(sums)))


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, share in pairs:
        sums[name] = sums.get(name, 0.0) + share
    return dict(sorted(sums.items()))
