"""Which answers people look at, in what order: drawn once, from a seed, and kept with the texts as they were shown.

Three slices. *random* alone estimates the defect rate: every prompt has the same chance to be in it, whatever its
category and language, and each of those is present in proportion (systematic sampling of a list sorted by stratum, in
random order within). *worst* are the answers that stray furthest from the baseline's, *critical* the scenarios marked
so. A prompt may be in several slices; it is shown once.

Beside pairs, a pass holds *catches* (the same text on both sides: preferring one is a slip) and *repeats* (a pair
again, sides swapped). Identical answers tie without being shown, and serve as catches first.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from quantkit.artifact.people import SAMPLE, sample_id
from quantkit.errors import CheckpointError, RecipeError
from quantkit.gate.evidence import read_evidence, write_evidence
from quantkit.review.answers import Answer, answer_of
from quantkit.review.plan import Plan

Kind = Literal["pair", "catch", "repeat"]
KINDS: tuple[Kind, ...] = ("pair", "catch", "repeat")
T = TypeVar("T")
_APART = 5
"""Showings between a pair and its repeat at least, where there are as many."""


@dataclass(frozen=True)
class Item:
    """An answer in the sample. stage: the plan's stage whose random slice it is in; None outside of that slice.

    inclusion: probability that this prompt is in the random slice up to and with that stage; 0 outside.
    """

    answer: Answer
    stage: int | None
    inclusion: float
    worst: bool
    critical: bool

    @property
    def slices(self) -> tuple[str, ...]:
        """Names of the slices it is in."""
        return tuple(
            name
            for name, inside in (("random", self.stage is not None), ("worst", self.worst), ("critical", self.critical))
            if inside
        )


@dataclass(frozen=True)
class Showing:
    """One thing to show: a pair, a catch or a repeat of a pair, in the pass that stage `stage` of the plan needs."""

    id: str
    kind: Kind
    item: str
    stage: int


@dataclass(frozen=True)
class Sample:
    """The drawn sample. `id` is the SHA-256 of its file; `prompts` counts the answers it was drawn from.

    drawn_from: SHA-256 of the file of answers. extra: answers shown as catches only.
    """

    id: str
    payload_digest: str
    drawn_from: str
    seed: int
    plan: Plan
    prompts: int
    items: dict[str, Item]
    extra: dict[str, Answer]
    showings: tuple[Showing, ...]

    def answer(self, id: str) -> Answer:
        """An answer by its id, in the sample or shown as a catch only."""
        return self.items[id].answer if id in self.items else self.extra[id]

    def random(self, stage: int) -> list[Item]:
        """The random slice up to and with a stage (0 the first)."""
        return [item for item in self.items.values() if item.stage is not None and item.stage <= stage]

    def missing(self, stage: int) -> int:
        """Items that the plan asks for by that stage and the gate has no prompts for."""
        return max(0, self.plan.needed(stage) - self.prompts)


def draw(answers: Sequence[Answer], plan: Plan, seed: int, payload_digest: str, drawn_from: str = "") -> Sample:
    """Draw the sample: the same answers, plan and seed give the same sample, on any machine, so that anybody can check
    that nobody picked it by hand.

    With fewer answers than the plan asks for, all are in it; `Sample.missing` says how many lack.
    """
    ordered = sorted(answers, key=lambda one: (one.stratum, _rank(seed, "order", one.id)))
    chosen = _systematic(ordered, plan.items, _rank(seed, "start"))
    stage_of = _stages(chosen, plan, seed)
    worst = sorted((one for one in answers if not one.identical), key=lambda one: (-one.divergence, one.id))
    worst_ids = {one.id for one in worst[: plan.worst]}
    critical = sorted((one for one in answers if one.critical), key=lambda one: _rank(seed, "critical", one.id))
    critical_ids = {one.id for one in critical[: plan.critical]}
    items = {
        one.id: Item(
            answer=one,
            stage=stage_of.get(one.id),
            inclusion=min(1.0, plan.needed(stage_of[one.id]) / len(answers)) if one.id in stage_of else 0.0,
            worst=one.id in worst_ids,
            critical=one.id in critical_ids,
        )
        for one in ordered
        if one.id in stage_of or one.id in worst_ids or one.id in critical_ids
    }
    showings, extra = _showings(items, ordered, plan, seed)
    made = Sample("", payload_digest, drawn_from, seed, plan, len(answers), items, extra, showings)
    return replace(made, id=f"sha256:{hashlib.sha256(_text(made)).hexdigest()}")


def write_sample(folder: Path, sample: Sample) -> None:
    """Write `sample.json` into the review folder."""
    write_evidence(folder / SAMPLE, sample.payload_digest, _content(sample))


def read_sample(folder: Path, payload_digest: str) -> Sample | None:
    """The sample in the review folder; None when none was drawn. CheckpointError when it is of another payload."""
    path = folder / SAMPLE
    found = read_evidence(path, payload_digest)
    if found is None:
        return None
    try:
        answers = {key: answer_of(one, str(path)) for key, one in found["answers"].items()}
        items = {
            one["id"]: Item(
                answers[one["id"]], one["stage"], float(one["inclusion"]), bool(one["worst"]), bool(one["critical"])
            )
            for one in found["items"]
        }
        showings = tuple(Showing(**one) for one in found["showings"])
        extra = {key: one for key, one in answers.items() if key not in items}
        plan, prompts, seed = Plan.of(found["plan"]), int(found["prompts"]), int(found["seed"])
        drawn_from = str(found["drawn_from"])
        _require_form(items, answers, showings, plan)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecipeError) as error:
        raise CheckpointError(
            f"not a sample ({error!r})"[:300], where=str(path), next="Start over: quantkit review ARTIFACT --redraw"
        ) from None
    return Sample(sample_id(folder), payload_digest, drawn_from, seed, plan, prompts, items, extra, showings)


def _require_form(
    items: Mapping[str, Item], answers: Mapping[str, Answer], showings: Sequence[Showing], plan: Plan
) -> None:
    """ValueError for names, stages or kinds that no drawing gives."""
    stages = range(len(plan.stages))
    if any(key != answer.id for key, answer in answers.items()):
        raise ValueError("an answer goes by another name")
    if any(
        item.stage is not None and not (type(item.stage) is int and item.stage in stages) for item in items.values()
    ):
        raise ValueError("an item is in no stage of the plan")
    if any(showing.item not in answers or showing.kind not in KINDS for showing in showings):
        raise ValueError("it shows what it does not hold")
    if any(showing.kind != "catch" and showing.item not in items for showing in showings):
        raise ValueError("it shows a pair outside of the sample")
    if any(type(showing.stage) is not int or not isinstance(showing.id, str) for showing in showings):
        raise ValueError("a showing has no stage or name")
    if len({showing.id for showing in showings}) != len(showings):
        raise ValueError("two showings go by one name")


def _content(sample: Sample) -> dict[str, Any]:
    answers = {**{key: item.answer for key, item in sample.items.items()}, **sample.extra}
    return {
        "kind": "review sample",
        "version": 1,
        "drawn_from": sample.drawn_from,
        "seed": sample.seed,
        "plan": sample.plan.as_dict(),
        "prompts": sample.prompts,
        "items": [
            {
                "id": key,
                "stratum": item.answer.stratum,
                "slices": item.slices,
                "stage": item.stage,
                "inclusion": item.inclusion,
                "worst": item.worst,
                "critical": item.critical,
                "identical": item.answer.identical,
                **item.answer.hashes,
            }
            for key, item in sample.items.items()
        ],
        "showings": [asdict(showing) for showing in sample.showings],
        "answers": {key: answer.as_dict() for key, answer in answers.items()},
    }


def _text(sample: Sample) -> bytes:
    """The bytes that `write_sample` writes."""
    body = {"payload_digest": sample.payload_digest, **_content(sample)}
    return (json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _systematic(ordered: Sequence[T], count: int, start: float) -> list[T]:
    """`count` of `ordered` at equal steps from a random start in [0, 1): each is chosen with probability count / N."""
    total = len(ordered)
    if count >= total:
        return list(ordered)
    return [ordered[math.floor((index + start) * total / count)] for index in range(count)]


def _stages(chosen: Sequence[Answer], plan: Plan, seed: int) -> dict[str, int]:
    """The stage each of the random slice belongs to: every stage in proportion over the strata."""
    stage_of: dict[str, int] = {}
    left = list(chosen)
    for number, stage in enumerate(plan.stages):
        taken = _systematic(left, stage.items, _rank(seed, "stage", number))
        stage_of |= {one.id: number for one in taken}
        left = [one for one in left if one.id not in stage_of]
    return stage_of


def _showings(
    items: dict[str, Item], ordered: Sequence[Answer], plan: Plan, seed: int
) -> tuple[tuple[Showing, ...], dict[str, Answer]]:
    """Every pass in order, and the answers that only catches show."""
    made: list[Showing] = []
    extra: dict[str, Answer] = {}
    catches = _catches(items, ordered, seed)
    for number in range(len(plan.stages)):
        pairs = [key for key, item in items.items() if not item.answer.identical and _pass_of(item, number) == number]
        if not pairs:
            continue
        caught = [next(catches) for _ in range(math.ceil(plan.catches * len(pairs)))]
        extra |= {one.id: one for one in caught if one.id not in items}
        wanted: list[tuple[Kind, str]] = [("pair", key) for key in pairs] + [("catch", one.id) for one in caught]
        wanted.sort(key=lambda one: _rank(seed, "show", number, *one))
        _insert_repeats(wanted, math.ceil(plan.repeats * len(pairs)), seed, number)
        made += [Showing(f"s{len(made) + i + 1:03d}", kind, key, number) for i, (kind, key) in enumerate(wanted)]
    return tuple(made), extra


def _pass_of(item: Item, number: int) -> int:
    """The pass a pair is shown in: its stage's, but the first for worst and critical ones."""
    return 0 if item.worst or item.critical or item.stage is None else item.stage


def _catches(items: dict[str, Item], ordered: Sequence[Answer], seed: int) -> Iterator[Answer]:
    """Answers for identical pairs without end: truly identical ones, then prompts outside the sample, then the rest."""
    ranked = sorted(ordered, key=lambda one: (not one.identical, one.id in items, _rank(seed, "catch", one.id)))
    while True:
        yield from ranked


def _insert_repeats(wanted: list[tuple[Kind, str]], count: int, seed: int, number: int) -> None:
    """Repeats of pairs from the first half, put into the second."""
    half = len(wanted) // 2
    early = sorted(
        (key for kind, key in wanted[: max(1, half)] if kind == "pair"),
        key=lambda key: _rank(seed, "repeat", number, key),
    )
    for key in early[:count]:
        first = wanted.index(("pair", key))
        earliest = min(len(wanted), max(half, first + _APART))
        room = len(wanted) - earliest + 1
        wanted.insert(earliest + math.floor(_rank(seed, "place", number, key) * room), ("repeat", key))


def _rank(seed: int, *words: object) -> float:
    """A number in [0, 1) that looks random and depends on nothing but its arguments."""
    text = "\x1f".join(str(word) for word in (seed, *words))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48
