"""What the record amounts to under the plan: accept, reject or go on; how often, how sure, and how reliable it is."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from quantkit.review.agreement import exact_interval, nominal_alpha
from quantkit.review.plan import Decision
from quantkit.review.record import OUTCOMES, Judgement, Record
from quantkit.review.sample import Sample

_READ_S = 2.0
"""Seconds below which nobody has read two answers."""


@dataclass(frozen=True)
class Reviewer:
    """One reviewer's showing. catches: identical pairs judged, and those where one side was preferred; repeats: pairs
    judged twice, and those judged alike both times. counted: whether the plan counts their judgements."""

    name: str
    judged: int
    catches: int
    catches_failed: int
    repeats: int
    repeats_alike: int
    median_seconds: float
    counted: bool


@dataclass(frozen=True)
class Tally:
    """The record under its plan.

    stage: the plan's stage this stands in, from 0. rated, needed: of the random slice up to and with that stage;
    identical: of those rated, the ones that tied without being shown. missing: items the gate has no prompts for.
    others, others_needed: rated and wanted outside the random slice (worst, critical). defects: major or critical
    regressions in the random slice; others_defects outside of it; critical: ids of prompts with a critical regression
    in any slice. rate: defects / rated with its exact interval `low` to `high`; every prompt has the same chance to be
    in the random slice, so no weights are needed. alpha: Krippendorff's over prompts that several reviewers judged.
    """

    decision: Decision
    reason: str
    stage: int
    rated: int
    needed: int
    identical: int
    missing: int
    others: int
    others_needed: int
    defects: int
    others_defects: int
    critical: tuple[str, ...]
    rate: float
    low: float
    high: float
    outcomes: Mapping[str, int]
    alpha: float | None
    reviewers: tuple[Reviewer, ...]
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def tally(sample: Sample, record: Record) -> Tally:
    """Decide by the sample's plan.

    A prompt is a defect when at least half of those who judged it, and are counted, call it one. A critical regression
    rejects whoever saw it. Accepting takes every pair of the stages so far and all worst and critical ones.
    """
    reviewers = tuple(_reviewer(name, record, sample) for name in record.reviewers)
    counted = {one.name for one in reviewers if one.counted}
    pairs: dict[str, list[Judgement]] = defaultdict(list)
    for one in record.judgements:
        if one.kind == "pair" and one.reviewer in counted:
            pairs[one.item].append(one)
    defects = {key for key, found in pairs.items() if 2 * sum(one.defect for one in found) >= len(found)}
    critical = tuple(dict.fromkeys(one.item for one in record.judgements if one.critical))
    rated = set(pairs) | {key for key, item in sample.items.items() if item.answer.identical}
    others = {key for key, item in sample.items.items() if item.worst or item.critical}
    decision, reason, stage = _by_stages(sample, rated, defects, others)
    if critical:
        decision, reason = "reject", f"a critical regression at {critical[0]}; any one rejects"
    inside = {item.answer.id for item in sample.random(stage)}
    found, seen = len(inside & defects), len(inside & rated)
    low, high = exact_interval(found, seen)
    outcomes = [_usual([one.outcome for one in pairs[key]]) for key in inside if key in pairs]
    identical = sum(sample.items[key].answer.identical for key in inside)
    outcomes += ["tie"] * identical
    return Tally(
        decision=decision,
        reason=reason,
        stage=stage,
        rated=seen,
        needed=sample.plan.needed(stage),
        identical=identical,
        missing=sample.missing(stage),
        others=len((others & rated) - inside),
        others_needed=len(others - inside),
        defects=found,
        others_defects=len((others & defects) - inside),
        critical=critical,
        rate=found / seen if seen else 0.0,
        low=low,
        high=high,
        outcomes={outcome: outcomes.count(outcome) for outcome in OUTCOMES},
        alpha=nominal_alpha([one.outcome for one in judged] for judged in pairs.values()),
        reviewers=reviewers,
        notes=_notes(sample, reviewers),
    )


def _by_stages(sample: Sample, rated: set[str], defects: set[str], others: set[str]) -> tuple[Decision, str, int]:
    """Decision by counts of major regressions, why, and the stage it was reached in."""
    for number, stage in enumerate(sample.plan.stages):
        inside = {item.answer.id for item in sample.random(number)}
        found, open_items = len(inside & defects), inside - rated
        if found >= stage.reject:
            return "reject", f"{_counted(found, 'major regression')}; the plan rejects at {stage.reject}", number
        missing = sample.missing(number)
        if missing and not open_items | (others - rated):
            have = "the only prompt is" if sample.prompts == 1 else f"all {sample.prompts} prompts are"
            why = (
                f"{have} judged and the plan needs {sample.plan.needed(number)}: {_counted(missing, 'prompt')} missing"
            )
            return "continue", why, number
        if open_items or missing:
            return "continue", f"{_counted(len(open_items | (others - rated)), 'pair')} to look at", number
        if found <= stage.accept and others - rated:
            return (
                "continue",
                f"{_counted(len(others - rated), 'pair')} of the worst and critical ones to look at",
                number,
            )
        if found <= stage.accept:
            return (
                "accept",
                f"{_counted(found, 'major regression')} in {len(inside)}; the plan accepts at {stage.accept}",
                number,
            )
    raise RuntimeError("a plan's last stage leaves nothing undecided")


def _reviewer(name: str, record: Record, sample: Sample) -> Reviewer:
    judged = list(record.of(name).values())
    catches = [one for one in judged if one.kind == "catch"]
    failed = sum(one.outcome in ("better", "worse") for one in catches)
    first = {one.item: one.outcome for one in judged if one.kind == "pair"}
    repeats = [one for one in judged if one.kind == "repeat" and one.item in first]
    return Reviewer(
        name=name,
        judged=sum(one.kind == "pair" for one in judged),
        catches=len(catches),
        catches_failed=failed,
        repeats=len(repeats),
        repeats_alike=sum(one.outcome == first[one.item] for one in repeats),
        median_seconds=round(statistics.median(one.seconds for one in judged), 1),
        counted=len(catches) < 3 or failed <= sample.plan.catch_limit * len(catches),
    )


def _usual(outcomes: Sequence[str]) -> str:
    """The outcome most reviewers gave; the one given first among equals."""
    return max(outcomes, key=lambda outcome: (outcomes.count(outcome), -outcomes.index(outcome)))


def _notes(sample: Sample, reviewers: Sequence[Reviewer]) -> tuple[str, ...]:
    """What a reader of the decision should know beside it."""
    notes = [
        f"{one.name} preferred one of two identical answers {one.catches_failed} of {one.catches} times: not counted"
        for one in reviewers
        if not one.counted
    ]
    notes += [
        f"{one.name} took {one.median_seconds:g} s a pair: too little to have read them"
        for one in reviewers
        if one.median_seconds < _READ_S and one.judged >= 5
    ]
    for number in range(len(sample.plan.stages)):
        if sample.missing(number):
            needs = "the plan needs" if number == 0 else f"stage {number + 1} would need"
            missing = f"{sample.missing(number)} missing"
            notes.append(f"{needs} {sample.plan.needed(number)} prompts; the gate answered {sample.prompts}: {missing}")
    return tuple(notes)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
