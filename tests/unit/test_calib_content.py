"""The shipped calibration conversations keep what their data card promises: size, spread, form, no copies, no leak."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations

import pytest

from quantkit.gate.data import read_conversations, refuse_overlap
from quantkit.resources import resource

CATEGORIES = ("support", "sales", "rag", "extraction", "summarizing", "sql", "policy", "multi_turn")


@pytest.fixture(scope="module")
def conversations():
    return read_conversations([resource("calib/conversations.jsonl")])


def _text(item) -> str:
    return "".join(c for m in item.messages for c in m["content"].casefold() if c.isalnum())


def _grams(item) -> set[str]:
    text = _text(item)
    return {text[i : i + 8] for i in range(len(text) - 7)}


def _parses(answer: str) -> bool:
    """One JSON value, or one a line."""
    for parts in ([answer], answer.splitlines()):
        try:
            return bool([json.loads(part) for part in parts])
        except ValueError:
            continue
    return False


def test_each_category_has_both_languages_in_number(conversations):
    cells = Counter((item.category, item.language) for item in conversations)
    assert set(cells) == {(category, language) for category in CATEGORIES for language in ("en", "zh")}
    assert min(cells.values()) >= 12
    assert len(conversations) >= 240


def test_ids_are_unique_and_name_category_and_language(conversations):
    assert len({item.id for item in conversations}) == len(conversations)
    for item in conversations:
        assert item.id.startswith(f"calib-{item.category.replace('_', '-')}-{item.language}-")


def test_turns_alternate_and_end_with_an_answer(conversations):
    for item in conversations:
        roles = [m["role"] for m in item.messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) != [], item.id
        assert all(m["content"].strip() == m["content"] != "" for m in item.messages), item.id


def test_each_answer_of_an_extraction_is_json(conversations):
    for item in (item for item in conversations if item.category == "extraction"):
        assert all(_parses(m["content"]) for m in item.messages if m["role"] == "assistant"), item.id


def test_no_two_conversations_are_alike(conversations):
    grams = {item.id: _grams(item) for item in conversations}
    for one, other in combinations(grams, 2):
        shared = len(grams[one] & grams[other])
        assert shared < 0.15 * min(len(grams[one]), len(grams[other])), (one, other)


def test_nothing_the_gate_judges_on_is_calibrated_on(conversations):
    files = sorted(resource("evals").glob("*.jsonl"))
    assert files
    refuse_overlap(read_conversations(files, strict=False), conversations)
