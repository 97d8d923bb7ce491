"""Acceptance plans as data, and the exact odds they accept at.

A plan has one or more stages. Each asks for so many more items of the random slice and counts defects over all of them
so far: at most `accept` ends it well, at least `reject` ends it badly, anything between asks for the next stage
(attributes sampling by stages, as in ISO 2859-1). A defect is a major or critical regression; any critical one rejects
at once, wherever it was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from quantkit.errors import RecipeError

Decision = Literal["accept", "reject", "continue"]

MOST_STAGES, MOST_ITEMS = 7, 10_000
"""Bounds on what people can be asked for; 7 stages are the most of ISO 2859-1's multiple sampling."""


@dataclass(frozen=True)
class Stage:
    """`items` more of the random slice; `accept` and `reject` bound the defects over all stages so far."""

    items: int
    accept: int
    reject: int


@dataclass(frozen=True)
class Plan:
    """Stages, and what is shown beside the random slice.

    worst, critical: items of those slices at most. catches, repeats: shares of the pairs shown that are added as
    identical pairs and as repeats with sides swapped. catch_limit: a reviewer who prefers one of two identical answers
    more often than this share of the time is not counted.
    """

    stages: tuple[Stage, ...] = (Stage(60, 0, 3), Stage(80, 3, 4))
    worst: int = 10
    critical: int = 20
    catches: float = 0.10
    repeats: float = 0.05
    catch_limit: float = 0.34

    def __post_init__(self) -> None:
        """RecipeError for stages that no count of defects could pass through in order."""
        if not self.stages:
            raise _bad("it has no stages")
        if len(self.stages) > MOST_STAGES or self.items > MOST_ITEMS:
            raise _bad(f"more than {MOST_STAGES} stages or {MOST_ITEMS:,} answers are for nobody to look at")
        for number, stage in enumerate(self.stages, 1):
            if stage.items < 1 or not 0 <= stage.accept < stage.reject:
                raise _bad(f"stage {number} needs items of at least 1 and 0 <= accept < reject")
        for number, (one, two) in enumerate(zip(self.stages, self.stages[1:], strict=False), 2):
            if two.accept < one.accept or two.reject < one.reject:
                raise _bad(f"stage {number} counts over all items so far: its limits cannot fall below those before")
        if self.stages[-1].reject != self.stages[-1].accept + 1:
            raise _bad("its last stage leaves some counts undecided: reject must be accept + 1 there")

    @property
    def items(self) -> int:
        """Items of the random slice over all stages."""
        return sum(stage.items for stage in self.stages)

    def needed(self, stage: int) -> int:
        """Items of the random slice up to and with stage number `stage` (0 the first)."""
        return sum(one.items for one in self.stages[: stage + 1])

    def acceptance(self, rate: float) -> float:
        """Probability that a model with this rate of major defects, and no critical one, is accepted; exact."""
        import numpy as np

        going, accepted = np.ones(1), 0.0  # chance by number of defects found, where none has decided yet
        for stage in self.stages:
            chances = [binomial(more, stage.items, rate) for more in range(min(stage.items, stage.reject - 1) + 1)]
            going = np.convolve(going, chances)[: stage.reject]
            accepted += float(going[: stage.accept + 1].sum())
            going[: stage.accept + 1] = 0.0
        return accepted

    def operating_curve(self, most: float = 0.15, points: int = 61) -> list[tuple[float, float]]:
        """(defect rate, probability of acceptance) from 0 to `most`."""
        rates = [most * i / (points - 1) for i in range(points)]
        return [(rate, self.acceptance(rate)) for rate in rates]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, the form of `gate.review.plan` in a recipe."""
        return asdict(self) | {"stages": [asdict(stage) for stage in self.stages]}

    @staticmethod
    def of(data: Mapping[str, Any] | None) -> Plan:
        """The plan in `data` (as `as_dict` gives it; absent keys keep their defaults). RecipeError for another form."""
        try:
            given = dict(data or {})
            if "stages" in given:
                given["stages"] = tuple(Stage(**{k: _count(v) for k, v in one.items()}) for one in given["stages"])
            for name in ("worst", "critical"):
                if name in given:
                    given[name] = _count(given[name])
            for name in ("catches", "repeats", "catch_limit"):
                if name in given:
                    given[name] = _share(given[name])
            return Plan(**given)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _bad(str(error)) from None

    def __str__(self) -> str:
        """The plan in words."""
        words = []
        for number, stage in enumerate(self.stages):
            words.append(f"{'else ' if number else ''}{stage.items} {'more' if number else 'items'}")
            words.append(f"accept at {'≤ ' if stage.accept else ''}{stage.accept}{' in all' if number else ''}")
            if stage is not self.stages[-1]:
                words.append(f"reject at {stage.reject}")
        return ", ".join(words) + "; any critical regression rejects"


def binomial(count: int, of: int, rate: float) -> float:
    """P(X = count) for X ~ Binomial(of, rate)."""
    if rate in (0, 1):
        return float(count == of * rate)
    ways = math.lgamma(of + 1) - math.lgamma(count + 1) - math.lgamma(of - count + 1)
    return math.exp(ways + count * math.log(rate) + (of - count) * math.log1p(-rate))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 100_000:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value


def _share(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise ValueError(f"{str(value)[:40]!r} is no share between 0 and 1")
    return float(value)


def _bad(what: str) -> RecipeError:
    return RecipeError(f"not an acceptance plan: {what}", where="gate.review.plan")
