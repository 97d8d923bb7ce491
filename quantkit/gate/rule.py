"""Rule: one thing that had to hold for a verdict, and how it came out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal["pass", "fail", "inconclusive", "unproven", "unmeasurable"]
"""`unproven`: neither surely inside the limit nor surely beyond it. `unmeasurable`: the baseline itself cannot do it.
Neither blocks a verdict, and neither is a pass."""

Section = Literal["tokens", "answers", "structure", "audit"]


@dataclass(frozen=True)
class Rule:
    """One thing that had to hold. `value`, `low`, `high` and `limit` are shares of a rung where `share_of` names one.

    side: the value may be at most (`upper`) or at least (`lower`) the limit, or differ from 1 by at most it (`within`).
    `text` says it in a sentence, absolute numbers included. section: what it is about.
    """

    name: str
    value: float
    low: float
    high: float
    limit: float
    side: Literal["upper", "lower", "within"]
    share_of: str | None
    outcome: Outcome
    text: str
    section: Section = "tokens"


def tally(outcomes: Iterable[Outcome]) -> str:
    """How many rules came out how: `19 rules hold, 4 unproven, 3 unmeasurable`."""
    counts = Counter(outcomes)
    others = (word for word in get_args(Outcome) if word != "pass" and counts[word])
    return ", ".join([f"{counts['pass']} rules hold", *(f"{counts[word]} {word}" for word in others)])


def exact(name: str, problems: int, text: str, section: Section) -> Rule:
    """A rule on something counted exactly: it holds when there is no problem."""
    found = float(problems)
    return Rule(name, found, found, found, 0.0, "upper", None, "fail" if problems else "pass", text, section)
