"""Checks on answers: each kind decides as its description says, and none raises on what a model may write."""

from __future__ import annotations

import time
from typing import Any

import pytest

from quantkit.errors import RecipeError
from quantkit.gate.checks import KINDS, parse_check
from quantkit.gate.wording import is_refusal, numbers_in, repeated_share

ORDER = {"type": "object", "required": ["id"], "properties": {"id": {"type": "string"}, "total": {"type": "number"}}}

DECIDED: list[tuple[dict[str, Any], str, str]] = [
    ({"kind": "contains_all", "values": ["Refund", "14 days"]}, "Your REFUND takes １４ days.", "A refund takes time."),
    ({"kind": "contains_all", "values": ["订单号：A17"]}, "您的订单号:A17 已发货", "您的订单已发货"),
    ({"kind": "contains_any", "values": ["cat", "dog"]}, "the dog", "the cow"),
    ({"kind": "contains_none", "values": ["sorry"]}, "Done.", "I'm Sorry"),
    ({"kind": "contains_none", "values": ["sorry"]}, "Done.", ""),
    ({"kind": "number", "value": 1234.5}, "That is $1,234.50.", "That is 1,234.6."),
    ({"kind": "number", "value": -3}, "It fell to −3 degrees.", "Between 1-3 degrees."),
    ({"kind": "number", "value": 12000}, "共计1.2万元", "共计1.2元"),
    ({"kind": "number", "value": 1234567}, "1 234 567 items", "123 4567 items"),
    ({"kind": "number", "value": 0.3, "tolerance": 0.05}, "about .33", "about .4"),
    ({"kind": "number", "value": 42}, "４２", "nothing here"),
    ({"kind": "choice", "value": "B"}, "A good question. The answer is **B**.", "The answer is C, not B."),
    ({"kind": "choice", "value": "C"}, "选Ｃ。", "I choose B."),
    ({"kind": "choice", "value": "B"}, "b) the second", "abacus"),
    ({"kind": "choice", "value": "A"}, "A is right because of B.", "Only D."),
    ({"kind": "regex", "pattern": r"^\d{4}.*end"}, "2024\nthe end", "year 2024 end"),
    ({"kind": "json", "schema": ORDER}, 'Sure:\n```json\n{"id": "A1", "total": 3}\n```', '{"id": 7}'),
    ({"kind": "json", "schema": ORDER}, 'The [order] is {"id": "x"} as asked.', '{"id": "x"'),
    ({"kind": "json", "schema": {"type": "array"}}, "[1, 2]", "[1, NaN]"),
    (
        {"kind": "json_equals", "values": {"/a/0/b~1c": 5, "/n": "Ann"}},
        '{"a":[{"b/c":5.0}],"n":" ann "}',
        '{"n":"Ann"}',
    ),
    ({"kind": "json_equals", "values": {"/ok": True}}, '{"ok": true}', '{"ok": 1}'),
    ({"kind": "max_words", "value": 4}, "您好ok吗", "您好，请问吗"),
    ({"kind": "min_words", "value": 3}, "one two three", "one two"),
    ({"kind": "lines", "min": 2, "max": 3}, "a\n\nb\n", "a\n\n\n"),
    ({"kind": "language", "value": "zh"}, "请登录 Windows 系统后重试。", "Please log in 吗"),
    ({"kind": "language", "value": "en"}, "Please log in.", "12345"),
    (
        {"kind": "refusal", "value": True},
        "I'm sorry, but I can't help with that.",
        "I'm sorry to hear your parcel broke.",
    ),
    ({"kind": "refusal", "value": False}, "To kill a process, use `kill`.", "抱歉，我无法提供这类信息。"),
]


@pytest.mark.parametrize(("row", "good", "bad"), DECIDED, ids=lambda value: str(value)[:40])
def test_a_check_passes_the_good_answer_and_no_other(row: dict[str, Any], good: str, bad: str) -> None:
    check = parse_check(row, "here")
    assert check.passes(good)
    assert not check.passes(bad)


def test_every_kind_is_tested() -> None:
    assert {row["kind"] for row, _, _ in DECIDED} == set(KINDS)


HOSTILE = [
    "",
    "\x00" * 100,
    "[" * 60_000,
    '{"a":' * 5_000,
    "9" * 60_000,
    "1,234," * 10_000,
    "-" * 60_000,
    "\ufdfa" * 5_000,
    "```\n" * 20_000,
    "\ud800",
    "a " * 30_000,
    "我不能" * 20_000,
    "I can't " * 8_000,
    '"' + "\\" * 60_000,
    "1e999 -1e999 1e-999",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:8]))
def test_no_answer_makes_a_check_raise_or_hang(text: str) -> None:
    began = time.thread_time()
    for row, _, _ in DECIDED:
        parse_check(row, "here").passes(text)
    assert time.thread_time() - began < 5


def test_a_pattern_that_never_ends_is_the_authors_mistake() -> None:
    check = parse_check({"kind": "regex", "pattern": r"^(\w|\w\w)+$"}, "here")
    with pytest.raises(RecipeError, match="takes longer"):
        check.passes("a" * 200 + "!")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"kind": "contains"}, "unknown check 'contains'"),
        ({"value": 1}, "with a 'kind'"),
        ({"kind": "number"}, "needs 'value'"),
        ({"kind": "number", "value": True}, "cannot be 'True'"),
        ({"kind": "number", "value": 1, "tol": 2}, "unknown argument 'tol'"),
        ({"kind": "regex", "pattern": "("}, "does not compile"),
        ({"kind": "json", "schema": {"type": "strange"}}, "schema is not valid"),
        ({"kind": "contains_all", "values": []}, "'values' cannot be"),
    ],
)
def test_a_check_that_is_none_is_refused_with_its_place(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said) as caught:
        parse_check(row, "prompts.jsonl:7")
    assert "prompts.jsonl:7" in str(caught.value)


def test_a_schema_fetches_nothing() -> None:
    with pytest.raises(RecipeError, match="nothing is fetched"):
        parse_check({"kind": "json", "schema": {"$ref": "http://localhost:9/schema.json"}}, "here")
    check = parse_check({"kind": "json", "schema": {"$dynamicRef": "http://localhost:9/schema.json"}}, "here")
    assert not check.passes("{}")


def test_sorrow_is_no_refusal() -> None:
    assert not is_refusal("Sorry for the delay! You can return it within 30 days.")
    assert not is_refusal("很抱歉给您带来不便，我们会尽快为您补发。")
    assert is_refusal("As an AI language model, I cannot provide instructions for that.")
    assert is_refusal("很抱歉，我不能帮您做这件事。")


def test_numbers_are_read_as_people_write_them() -> None:
    assert 1234567.89 in numbers_in("1.234.567,89")
    assert 5.0 in numbers_in("3,5,7")
    assert -12.5 in numbers_in("a loss of $-12.50")


def test_a_loop_repeats_and_prose_does_not() -> None:
    assert repeated_share([1, 2, 3, 4] * 20) > 0.9
    assert repeated_share(list(range(40))) == 0.0
    assert repeated_share([1, 2]) == 0.0
