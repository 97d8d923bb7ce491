"""What a calibration set covers, as plain data for the plan, the manifest and the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from quantkit.calibration.dataset import Sample


class Lengths(TypedDict):
    """Tokens a sample."""

    p50: int
    p95: int
    max: int


class Stratum(TypedDict):
    """One category in one language."""

    category: str
    language: str
    samples: int
    tokens: int
    lengths: Lengths


class Coverage(TypedDict):
    """Counts of rows and tokens. `truncated_tokens` were cut off, `refused` rows the chat template would not render."""

    loaded: int
    duplicates: int
    refused: int
    samples: int
    tokens: int
    truncated_tokens: int
    lengths: Lengths
    languages: dict[str, int]
    categories: dict[str, int]
    strata: list[Stratum]


def cover(samples: Sequence[Sample], *, loaded: int, duplicates: int, refused: int, truncated: int) -> Coverage:
    """The coverage table of the chosen `samples`."""
    keys = sorted({(sample.category, sample.language) for sample in samples})
    strata: list[Stratum] = []
    for category, language in keys:
        sizes = [len(s.ids) for s in samples if (s.category, s.language) == (category, language)]
        strata.append(
            Stratum(
                category=category, language=language, samples=len(sizes), tokens=sum(sizes), lengths=_lengths(sizes)
            )
        )
    return Coverage(
        loaded=loaded,
        duplicates=duplicates,
        refused=refused,
        samples=len(samples),
        tokens=sum(len(sample.ids) for sample in samples),
        truncated_tokens=truncated,
        lengths=_lengths([len(sample.ids) for sample in samples]),
        languages=_count(samples, "language"),
        categories=_count(samples, "category"),
        strata=strata,
    )


def _count(samples: Sequence[Sample], field: str) -> dict[str, int]:
    values: list[Any] = [getattr(sample, field) for sample in samples]
    return {value: values.count(value) for value in sorted(set(values))}


def _lengths(sizes: Sequence[int]) -> Lengths:
    """Nearest-rank percentiles."""
    ordered = sorted(sizes)
    rank = [ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.95)]
    return Lengths(p50=rank[0], p95=rank[1], max=ordered[-1])
