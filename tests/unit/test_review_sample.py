"""The sample: every prompt has its chance, every stratum its share, and all of it follows from the seed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import CheckpointError
from quantkit.review.answers import Answer, answer_of, read_answers
from quantkit.review.plan import Plan, Stage
from quantkit.review.sample import Sample, draw, read_sample, write_sample
from quantkit.review.words import differing
from tests.review_case import QUICK, answer, answers

DIGEST = "sha256:" + "d" * 64


def drawn(count: int = 210, plan: Plan = Plan(), seed: int = 0, **options: int) -> Sample:
    return draw([answer_of(line, "") for line in answers(count, **options)], plan, seed, DIGEST)


def strata(found: list[Answer]) -> Counter[str]:
    return Counter(one.stratum for one in found)


@pytest.mark.parametrize("stage", [0, 1])
def test_every_category_and_language_is_in_proportion(stage: int) -> None:
    everything = strata([answer_of(line, "") for line in answers(210)])
    plan = Plan()
    found = strata([item.answer for item in drawn().random(stage)])
    assert sum(found.values()) == plan.needed(stage)
    for stratum, count in everything.items():
        assert abs(found[stratum] - count * plan.needed(stage) / 210) < 1.5


def test_the_recorded_inclusion_probability_is_how_often_a_prompt_is_drawn() -> None:
    plan, times, first, both = Plan((Stage(6, 0, 2), Stage(9, 2, 3))), 600, Counter[str](), Counter[str]()
    for seed in range(times):
        for item in drawn(40, plan, seed).items.values():
            if item.stage is not None:
                both[item.answer.id] += 1
                first[item.answer.id] += item.stage == 0
                assert item.inclusion == (6 / 40 if item.stage == 0 else 15 / 40)
    for counts, inclusion in ((first, 6 / 40), (both, 15 / 40)):
        assert len(counts) == 40
        assert all(abs(count / times - inclusion) < 0.08 for count in counts.values())


def test_one_seed_gives_one_sample_and_another_gives_another() -> None:
    assert drawn(seed=3) == drawn(seed=3)
    assert drawn(seed=3).id != drawn(seed=4).id
    assert set(drawn(seed=3).items) != set(drawn(seed=4).items)


def test_worst_are_those_that_stray_furthest_and_critical_those_marked() -> None:
    lines = answers(210, identical=30, critical=8)
    found = drawn(identical=30, critical=8)
    furthest = sorted(lines, key=lambda line: -line["divergence"])[:10]
    assert {key for key, item in found.items.items() if item.worst} == {line["id"] for line in furthest}
    assert {key for key, item in found.items.items() if item.critical} == {line["id"] for line in lines[-8:]}
    for item in found.items.values():
        assert (item.inclusion > 0) == (item.stage is not None) == ("random" in item.slices)


def test_identical_answers_are_never_shown_as_pairs_but_caught_with_first() -> None:
    found = drawn(identical=30)
    shown = {one.item for one in found.showings if one.kind == "pair"}
    identical = {key for key, item in found.items.items() if item.answer.identical}
    assert identical
    assert not shown & identical
    assert shown | identical == set(found.items)
    assert all(found.answer(one.item).identical for one in found.showings if one.kind == "catch")


def test_catches_and_repeats_are_a_tenth_and_a_twentieth_of_the_pairs() -> None:
    found = drawn()
    for stage in (0, 1):
        kinds = Counter(one.kind for one in found.showings if one.stage == stage)
        assert kinds["catch"] == -(-kinds["pair"] // 10)
        assert kinds["repeat"] == -(-kinds["pair"] // 20)


def test_a_repeat_comes_well_after_its_pair_and_in_its_pass() -> None:
    found = drawn()
    place = {(one.kind, one.item): (index, one.stage) for index, one in enumerate(found.showings)}
    repeats = [one.item for one in found.showings if one.kind == "repeat"]
    assert repeats
    for key in repeats:
        (pair, stage), (again, same) = place["pair", key], place["repeat", key]
        assert again >= pair + 5
        assert stage == same


def test_catches_use_prompts_outside_the_sample_while_there_are_any() -> None:
    found = drawn()
    assert found.extra
    assert all(one.item in found.extra for one in found.showings if one.kind == "catch")


def test_too_few_prompts_are_all_taken_and_the_missing_counted() -> None:
    found = drawn(48)
    assert len(found.random(1)) == 48
    assert {item.inclusion for item in found.items.values()} == {1.0}
    assert (found.missing(0), found.missing(1)) == (12, 92)


def test_a_sample_is_read_back_as_it_was_drawn_and_named_by_its_file(tmp_path: Path) -> None:
    found = drawn(30, QUICK, identical=4, critical=3)
    write_sample(tmp_path, found)
    assert read_sample(tmp_path, DIGEST) == found
    assert read_sample(tmp_path / "empty", DIGEST) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.update(payload_digest="sha256:other"), "another payload"),
        (
            lambda body: body["showings"].append({"id": "x", "kind": "pair", "item": "absent", "stage": 0}),
            "not a sample",
        ),
        (lambda body: body.pop("plan"), "not a sample"),
        (lambda body: body["items"][0].update(inclusion="often"), "not a sample"),
    ],
)
def test_a_sample_that_is_none_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    write_sample(tmp_path, drawn(30, QUICK))
    path = tmp_path / "sample.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    change(body)
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(CheckpointError, match=words):
        read_sample(tmp_path, DIGEST)


def write(path: Path, *lines: Any, head: dict[str, Any] | None = None) -> Path:
    first = head or {"payload_digest": DIGEST, "kind": "answers", "version": 1}
    text = "\n".join(
        line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in (first, *lines)
    )
    path.write_bytes(text.encode("utf-8"))
    return path


def test_answers_are_read_with_odd_line_ends_and_half_characters_in_them(tmp_path: Path) -> None:
    odd = answer(1, baseline={"text": "a\u2028b\u0085c\x0b"})
    half = json.dumps(answer(2, candidate={"text": "x\ud800y"}))
    one, two = read_answers(write(tmp_path / "a.jsonl", odd, half), DIGEST)
    assert one.baseline == "a\u2028b\u0085c\x0b"
    assert two.candidate == "x?y"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([answer(1), answer(1)], "two answers are called"),
        (["{"], ":2: not readable as JSON"),
        (["[]"], ":2: not a JSON object"),
        ([answer(1, baseline={"text": 3})], ":2: not an answer"),
        ([answer(1, messages=[])], ":2: an answer without a prompt"),
        ([answer(1, messages="hello")], ":2: not an answer"),
        ([answer(1, divergence=-1.0)], ":2: an answer without a prompt, or with a divergence"),
        ([answer(1, divergence="much")], ":2: not an answer"),
    ],
)
def test_answers_of_another_form_are_refused_by_line(tmp_path: Path, lines: list[Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_answers(write(tmp_path / "a.jsonl", *lines), DIGEST)


def test_another_payloads_answers_and_other_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", answer(1))
    with pytest.raises(CheckpointError, match="another payload"):
        read_answers(path, "sha256:other")
    with pytest.raises(CheckpointError, match="not a file of answers"):
        read_answers(write(path, answer(1), head={"kind": "poem"}), DIGEST)
    with pytest.raises(CheckpointError, match="no answers to look at"):
        read_answers(tmp_path / "absent.jsonl", DIGEST)


def test_differing_words_are_marked_and_nothing_is_lost() -> None:
    one, two = differing("The cat sat on the mat.\nIt slept.", "The dog sat on a mat.\nIt slept.")
    assert [text for text, mark in one if mark] == ["cat", "the"]
    assert [text for text, mark in two if mark] == ["dog", "a"]
    assert "".join(text for text, _ in one) == "The cat sat on the mat.\nIt slept."


def test_differing_characters_are_marked_in_chinese() -> None:
    one, two = differing("请把附件中的发票寄出", "请把附件里的票据寄出")
    assert ("".join(t for t, m in one if m), "".join(t for t, m in two if m)) == ("中发", "里据")


def test_texts_that_share_nothing_are_not_marked() -> None:
    assert differing("一把椅子八十元。", "The answer is 6.") == (
        [("一把椅子八十元。", False)],
        [("The answer is 6.", False)],
    )
    assert differing("", "Nothing") == ([], [("Nothing", True)])


def test_long_texts_are_compared_in_no_time() -> None:
    same, tail = "so it goes on and " * 10_000, "to the end"
    one, two = differing(f"{same}left {tail}", f"{same}right {tail}")
    assert [t for t, m in one if m] == ["left"]
    assert [t for t, m in two if m] == ["right"]
