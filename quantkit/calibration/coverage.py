"""What a calibration set covers, as plain data for the plan, the manifest and the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from quantkit.calibration.pool import Pool
from quantkit.calibration.samples import Sample
from quantkit.calibration.sampling import CellKey
from quantkit.profile.model import Histogram, Profile


class Lengths(TypedDict):
    """Tokens, by nearest rank; of a profile, the upper edges of its bins."""

    p50: int
    p95: int
    p99: int
    max: int


class Stratum(TypedDict):
    """One category in one language; of the profile, where there is one, with what that says of it.

    `share` of all samples, `wanted_share` of all requests. `lengths` of whole samples, `prompt` and `output` of those
    with an answer, and as the profile has them; None where unknown.
    """

    category: str
    language: str
    samples: int
    tokens: int
    share: float
    wanted_share: float | None
    lengths: Lengths | None
    prompt: Lengths | None
    output: Lengths | None
    wanted_prompt: Lengths | None
    wanted_output: Lengths | None


class Shortfall(TypedDict):
    """A cell of the profile with fewer samples than its share asks for."""

    category: str
    language: str
    samples: int
    wanted: int


class Coverage(TypedDict):
    """Counts of rows and tokens.

    Of the `loaded` rows, `outside` are of no cell of the profile, `duplicates` and `near_duplicates` repeat another
    candidate, `refused` would not be rendered by the chat template. `truncated_tokens` were cut off. `pii`: places in
    the chosen samples where personal data was replaced, by kind. `missing`: cells of the profile that gave fewer
    samples than their share. `profile`: whether one was followed.
    """

    loaded: int
    outside: int
    duplicates: int
    near_duplicates: int
    refused: int
    samples: int
    tokens: int
    truncated_tokens: int
    pii: dict[str, int]
    profile: bool
    lengths: Lengths | None
    languages: dict[str, int]
    categories: dict[str, int]
    strata: list[Stratum]
    missing: list[Shortfall]


def cover(
    samples: Sequence[Sample],
    cells: Sequence[CellKey],
    pool: Pool,
    profile: Profile | None,
    *,
    near_duplicates: int,
    refused: int,
    truncated: int,
    pii: Mapping[str, int],
    fair: Mapping[CellKey, int],
) -> Coverage:
    """The coverage table of the chosen `samples`, each of the cell at its place in `cells`.

    fair: samples by cell that the profile's shares ask for.
    """
    keys = sorted({*cells, *fair})
    strata = [
        _stratum(key, [s for s, cell in zip(samples, cells, strict=True) if cell == key], len(samples), profile)
        for key in keys
    ]
    return Coverage(
        loaded=pool.loaded,
        outside=pool.outside,
        duplicates=pool.duplicates,
        near_duplicates=near_duplicates,
        refused=refused,
        samples=len(samples),
        tokens=sum(len(sample.ids) for sample in samples),
        truncated_tokens=truncated,
        pii=dict(sorted(pii.items())),
        profile=profile is not None,
        lengths=_lengths(len(sample.ids) for sample in samples),
        languages=_count(sample.language for sample in samples),
        categories=_count(sample.category for sample in samples),
        strata=strata,
        missing=[
            Shortfall(category=key[0], language=key[1], samples=cells.count(key), wanted=wanted)
            for key, wanted in sorted(fair.items())
            if cells.count(key) < wanted
        ],
    )


def _stratum(key: CellKey, samples: Sequence[Sample], total: int, profile: Profile | None) -> Stratum:
    cell = profile.cell(*key) if profile is not None else None
    answered = [sample for sample in samples if sample.prompt_tokens is not None]
    prompts = [sample.prompt_tokens or 0 for sample in answered]
    return Stratum(
        category=key[0],
        language=key[1],
        samples=len(samples),
        tokens=sum(len(sample.ids) for sample in samples),
        share=len(samples) / total if total else 0.0,
        wanted_share=cell.share if cell else None,
        lengths=_lengths(len(sample.ids) for sample in samples),
        prompt=_lengths(prompts),
        output=_lengths(len(sample.ids) - prompt for sample, prompt in zip(answered, prompts, strict=True)),
        wanted_prompt=_stated(cell.prompt_tokens) if cell else None,
        wanted_output=_stated(cell.output_tokens) if cell else None,
    )


def _count(values: Iterable[str]) -> dict[str, int]:
    listed = list(values)
    return {value: listed.count(value) for value in sorted(set(listed))}


def _lengths(sizes: Iterable[int]) -> Lengths | None:
    ordered = sorted(sizes)
    if not ordered:
        return None
    p50, p95, p99 = (ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.95, 0.99))
    return Lengths(p50=p50, p95=p95, p99=p99, max=ordered[-1])


def _stated(histogram: Histogram | None) -> Lengths | None:
    if histogram is None:
        return None
    p50, p95, p99 = (histogram.percentile(share) for share in (0.5, 0.95, 0.99))
    return Lengths(p50=p50, p95=p95, p99=p99, max=histogram.up_to[-1])
