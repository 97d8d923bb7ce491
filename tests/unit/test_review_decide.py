"""The plan decides by the random slice; criticals and slips of reviewers are seen wherever they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.review.answers import answer_of
from quantkit.review.decide import Tally, tally
from quantkit.review.plan import Plan, Stage
from quantkit.review.record import judge, read_record
from quantkit.review.sample import Sample, draw, write_sample
from tests.review_case import QUICK, T0, answers, rate, say

DIGEST = "sha256:" + "d" * 64


def make(folder: Path, count: int = 40, plan: Plan = QUICK, **options: int) -> Sample:
    found = draw([answer_of(line, "") for line in answers(count, **options)], plan, 0, DIGEST)
    write_sample(folder, found)
    return found


def inside(sample: Sample, stage: int = 0) -> list[str]:
    """Items of one stage's random slice that are shown."""
    return [key for key, item in sample.items.items() if item.stage == stage and not item.answer.identical]


def told(folder: Path, sample: Sample) -> Tally:
    return tally(sample, read_record(folder, sample))


def test_nothing_judged_leaves_everything_open(tmp_path: Path) -> None:
    found = told(tmp_path, make(tmp_path))
    assert (found.decision, found.rated, found.needed, found.defects) == ("continue", 0, 6, 0)
    assert (found.low, found.high) == (0.0, 1.0)
    assert found.reason.endswith("pairs to look at")


def test_no_defect_in_the_first_stage_accepts_once_worst_and_critical_are_seen_too(tmp_path: Path) -> None:
    sample = make(tmp_path, critical=3)
    last_pair = max(i for i, one in enumerate(sample.showings) if one.stage == 0 and one.kind == "pair")
    rate(tmp_path, sample, most=last_pair)
    assert told(tmp_path, sample).decision == "continue"
    judge(tmp_path, sample, "Ann", say(sample, last_pair, "tie"), T0)
    found = told(tmp_path, sample)
    assert (found.decision, found.rated, found.others) == ("accept", 6, found.others_needed)
    assert found.reason == "0 major regressions in 6; the plan accepts at 0"
    assert found.high == pytest.approx(1 - 0.025 ** (1 / 6))


def test_one_defect_asks_for_the_second_stage_which_then_accepts(tmp_path: Path) -> None:
    sample = make(tmp_path, plan=Plan(QUICK.stages, worst=0))
    worse = {inside(sample)[0]: ("worse", "major")}
    rate(tmp_path, sample, worse)
    found = told(tmp_path, sample)
    assert (found.decision, found.stage, found.needed, found.rated, found.defects) == ("continue", 1, 12, 6, 1)
    for number, showing in enumerate(sample.showings):
        if showing.stage == 1:
            judge(tmp_path, sample, "Ann", say(sample, number, "tie"), T0)
    found = told(tmp_path, sample)
    assert (found.decision, found.stage, found.rated, found.defects, found.rate) == ("accept", 1, 12, 1, 1 / 12)


def test_enough_defects_reject_before_the_stage_is_over(tmp_path: Path) -> None:
    sample = make(tmp_path)
    first, second = inside(sample)[:2]
    place = [i for i, one in enumerate(sample.showings) if one.kind == "pair" and one.item in (first, second)]
    for number in place:
        judge(tmp_path, sample, "Ann", say(sample, number, "worse", "major"), T0)
    found = told(tmp_path, sample)
    assert (found.decision, found.rated, found.reason) == ("reject", 2, "2 major regressions; the plan rejects at 2")


@pytest.mark.parametrize("slice", ["random", "worst", "critical"])
def test_one_critical_regression_anywhere_rejects(tmp_path: Path, slice: str) -> None:
    sample = make(tmp_path, critical=3)
    key = next(key for key, item in sample.items.items() if item.slices == (slice,))
    number = next(i for i, one in enumerate(sample.showings) if (one.kind, one.item) == ("pair", key))
    judge(tmp_path, sample, "Ann", say(sample, number, "worse", "critical"), T0)
    found = told(tmp_path, sample)
    assert (found.decision, found.critical) == ("reject", (key,))
    assert key in found.reason


@pytest.mark.parametrize(
    ("outcome", "severity"), [("worse", "minor"), ("better", "critical"), ("both-bad", "critical")]
)
def test_what_is_no_major_regression_is_no_defect(tmp_path: Path, outcome: str, severity: str) -> None:
    sample = make(tmp_path)
    rate(tmp_path, sample, dict.fromkeys(sample.items, (outcome, severity)))
    found = told(tmp_path, sample)
    assert (found.decision, found.defects) == ("accept", 0)
    assert found.outcomes[outcome] == 6


def test_defects_among_the_worst_do_not_count_into_the_rate(tmp_path: Path) -> None:
    sample = make(tmp_path)
    only_worst = [key for key, item in sample.items.items() if item.slices == ("worst",)]
    assert only_worst
    rate(tmp_path, sample, dict.fromkeys(only_worst, ("worse", "major")))
    found = told(tmp_path, sample)
    assert (found.decision, found.defects, found.rate, found.others_defects) == ("accept", 0, 0.0, len(only_worst))


def test_identical_answers_tie_without_anybody_looking(tmp_path: Path) -> None:
    sample = make(tmp_path, 12, identical=6)
    rate(tmp_path, sample, stages=2)
    found = told(tmp_path, sample)
    assert found.decision == "accept"
    assert found.rated == 6
    assert found.identical == found.outcomes["tie"] - len(inside(sample)) > 0


def test_a_model_that_says_the_same_everywhere_is_accepted_at_once(tmp_path: Path) -> None:
    sample = make(tmp_path, 12, identical=12)
    assert sample.showings == ()
    assert told(tmp_path, sample).decision == "accept"


def test_too_few_prompts_never_accept_and_say_how_many_are_missing(tmp_path: Path) -> None:
    sample = make(tmp_path, 4)
    rate(tmp_path, sample, stages=2)
    found = told(tmp_path, sample)
    assert (found.decision, found.rated, found.missing) == ("continue", 4, 2)
    assert found.reason == "all 4 prompts are judged and the plan needs 6: 2 prompts missing"
    assert found.notes[-2:] == (
        "the plan needs 6 prompts; the gate answered 4: 2 missing",
        "stage 2 would need 12 prompts; the gate answered 4: 8 missing",
    )


def test_too_few_prompts_still_reject(tmp_path: Path) -> None:
    sample = make(tmp_path, 4)
    rate(tmp_path, sample, dict.fromkeys(sample.items, ("worse", "major")), stages=2)
    assert told(tmp_path, sample).decision == "reject"


def test_a_reviewer_who_falls_for_identical_pairs_is_not_counted(tmp_path: Path) -> None:
    sample = make(tmp_path, 90, Plan((Stage(30, 0, 1),), worst=0))
    for number, showing in enumerate(sample.showings):
        word = "better" if showing.kind == "catch" else "tie"
        judge(tmp_path, sample, "Ann", say(sample, number, word), T0)
    found = told(tmp_path, sample)
    [ann] = found.reviewers
    assert (ann.catches, ann.catches_failed, ann.counted) == (3, 3, False)
    assert (found.decision, found.rated) == ("continue", 0)
    assert "preferred one of two identical answers 3 of 3 times" in found.notes[0]
    rate(tmp_path, sample, reviewer="Bo")
    assert told(tmp_path, sample).decision == "accept"


def test_repeats_show_whether_a_reviewer_agrees_with_themselves(tmp_path: Path) -> None:
    sample = make(tmp_path, 90, Plan((Stage(40, 0, 1),), worst=0))
    repeated = [one.item for one in sample.showings if one.kind == "repeat"]
    assert len(repeated) == 2
    for number, showing in enumerate(sample.showings):
        steady = showing.item == repeated[0]
        word = "better" if showing.kind != "catch" and steady else "tie"
        if showing.item == repeated[1]:
            word = "better" if showing.kind == "pair" else "worse"
        judge(tmp_path, sample, "Ann", say(sample, number, word), T0)
    [ann] = told(tmp_path, sample).reviewers
    assert (ann.repeats, ann.repeats_alike) == (2, 1)


def test_several_reviewers_make_a_defect_by_half_and_an_alpha(tmp_path: Path) -> None:
    sample = make(tmp_path)
    one, two = inside(sample)[:2]
    rate(tmp_path, sample, {one: ("worse", "major"), two: ("worse", "major")}, reviewer="Ann")
    rate(tmp_path, sample, {one: ("worse", "major")}, reviewer="Bo")
    rate(tmp_path, sample, {one: ("tie", "none")}, reviewer="Cy")
    found = told(tmp_path, sample)
    assert found.defects == 1
    assert found.alpha is not None
    assert 0 < found.alpha < 1
    assert [reviewer.name for reviewer in found.reviewers] == ["Ann", "Bo", "Cy"]


def test_a_grave_judgement_stands_whichever_answer_it_is_said_of(tmp_path: Path) -> None:
    """What follows from it, a rejection or another pair, tells which one it was."""
    from quantkit.errors import RequestError
    from quantkit.review.record import retract

    sample = make(tmp_path)
    number = next(i for i, one in enumerate(sample.showings) if one.kind == "pair")
    for reviewer, outcome, decision in (("Ann", "better", "continue"), ("Bo", "worse", "reject")):
        judge(tmp_path, sample, reviewer, say(sample, number, outcome, "critical", reviewer), T0)
        with pytest.raises(RequestError, match="nothing to undo"):
            retract(tmp_path, sample, reviewer)
        assert told(tmp_path, sample).decision == decision
