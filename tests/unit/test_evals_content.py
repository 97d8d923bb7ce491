"""The gate's own content: prompts whose checks tell right from wrong, held-out text that calibration never saw."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quantkit.gate.checks import parse_check
from quantkit.gate.data import read_conversations, refuse_overlap
from quantkit.resources import resource

Row = dict[str, Any]

PROMPTS = resource("evals/prompts.jsonl")
HELD_OUT = resource("evals/heldout.jsonl")
CALIBRATION = resource("calib/conversations.jsonl")
CARD = resource("evals/README.md")
TRIED = Path(__file__).parent / "evals_answers.jsonl"
"""A right and a wrong answer to every prompt, written with it."""

FIELDS = {"id", "category", "language", "messages", "max_tokens", "checks"}
CATEGORIES = {
    "support", "sales", "rag", "extraction", "summarizing", "sql", "policy", "multi_turn",
    "math", "knowledge", "code", "reasoning", "instruction", "safety",
}  # fmt: skip


def rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def prompts() -> list[Row]:
    return rows(PROMPTS)


def passes(prompt: Row, answer: str) -> bool:
    return all(parse_check(check, prompt["id"]).passes(answer) for check in prompt["checks"])


def kinds(prompt: Row) -> set[str]:
    return {check["kind"] for check in prompt["checks"]}


def test_every_prompt_has_the_fields_of_the_card(prompts: list[Row]) -> None:
    for prompt in prompts:
        assert prompt.keys() - {"critical", "criteria"} == FIELDS, prompt["id"]
        assert (prompt["category"] in CATEGORIES, prompt["language"] in {"en", "zh"}) == (True, True), prompt["id"]
        assert 16 <= prompt["max_tokens"] <= 160, prompt["id"]
        assert prompt.get("critical", True) is True, prompt["id"]
        assert prompt.get("criteria", "something to look for").strip(), prompt["id"]
    assert not [name for name, count in Counter(p["id"] for p in prompts).items() if count > 1]


def test_turns_alternate_after_an_optional_system_turn_and_the_user_has_the_last_word(prompts: list[Row]) -> None:
    for prompt in prompts:
        roles = [message["role"] for message in prompt["messages"] if message["content"].strip()]
        assert len(roles) == len(prompt["messages"]), prompt["id"]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"], prompt["id"]


def test_no_question_is_asked_twice(prompts: list[Row]) -> None:
    asked = Counter(json.dumps(prompt["messages"]) for prompt in prompts)
    last = Counter(prompt["messages"][-1]["content"] for prompt in prompts)
    assert max(asked.values()) == 1
    assert max(last.values()) == 1


def test_every_check_is_one_the_gate_knows_with_the_arguments_it_takes(prompts: list[Row]) -> None:
    for prompt in prompts:
        assert prompt["checks"], prompt["id"]
        for check in prompt["checks"]:
            parse_check(check, prompt["id"])


def test_checks_pass_each_right_answer_and_fail_each_wrong_one(prompts: list[Row]) -> None:
    tried = {row["id"]: row for row in rows(TRIED)}
    assert tried.keys() == {prompt["id"] for prompt in prompts}
    mistaken = []
    for prompt in prompts:
        right, wrong = tried[prompt["id"]]["right"], tried[prompt["id"]]["wrong"]
        assert min(len(right), len(wrong)) >= 1, prompt["id"]
        mistaken += [(prompt["id"], answer) for answer in right if not passes(prompt, answer)]
        mistaken += [(prompt["id"], answer) for answer in wrong if passes(prompt, answer)]
    assert not mistaken


def test_repeating_the_question_or_saying_nothing_passes_no_prompt(prompts: list[Row]) -> None:
    for prompt in prompts:
        assert not passes(prompt, prompt["messages"][-1]["content"]), prompt["id"]
        assert not passes(prompt, " \n"), prompt["id"]


@pytest.mark.parametrize(
    "answer",
    ["Yes", "No", "A", "B", "C", "{}", "可以", "不可以", "1 2 3 4 5 6 7 8 9 10", "I'm sorry, but I can't help."],
)
def test_the_same_answer_to_everything_passes_next_to_nothing(prompts: list[Row], answer: str) -> None:
    assert sum(passes(prompt, answer) for prompt in prompts) <= 0.05 * len(prompts)


def test_no_letter_is_the_right_choice_half_of_the_time(prompts: list[Row]) -> None:
    letters = Counter(check["value"] for prompt in prompts for check in prompt["checks"] if check["kind"] == "choice")
    assert len(letters) >= 3
    assert max(letters.values()) < letters.total() / 2


def test_there_is_enough_of_each_kind_to_judge_by(prompts: list[Row]) -> None:
    cells = Counter((prompt["category"], prompt["language"]) for prompt in prompts)
    assert len(prompts) >= 210
    assert len(cells) == 2 * len(CATEGORIES)
    assert min(cells.values()) >= 5
    chinese = sum(prompt["language"] == "zh" for prompt in prompts) / len(prompts)
    assert 0.35 <= chinese <= 0.45
    assert sum(bool(kinds(prompt) & {"json", "json_equals"}) for prompt in prompts) >= 40
    assert sum(prompt["messages"][0]["role"] == "system" for prompt in prompts) >= 25
    assert sum(len(prompt["messages"]) > 2 for prompt in prompts) >= 20
    assert sum("critical" in prompt for prompt in prompts) >= 12
    assert sum("criteria" in prompt for prompt in prompts) >= 20
    refusals = Counter(c["value"] for p in prompts for c in p["checks"] if c["kind"] == "refusal")
    assert min(refusals[True], refusals[False]) >= 8


def test_harmful_requests_and_harmless_look_alikes_are_the_safety_prompts(prompts: list[Row]) -> None:
    assert {p["id"] for p in prompts if "refusal" in kinds(p)} == {
        p["id"] for p in prompts if p["category"] == "safety"
    }


def test_every_held_out_conversation_is_whole_and_every_cell_has_three() -> None:
    held_out = rows(HELD_OUT)
    assert all(row["messages"][-1]["role"] == "assistant" for row in held_out)
    cells = Counter((row["category"], row["language"]) for row in held_out)
    assert min(cells.values()) >= 3
    assert cells["extraction", "en"] >= 10
    assert cells["extraction", "zh"] >= 6


def test_prompts_held_out_and_calibration_share_no_message() -> None:
    asked, held_out, calibration = (read_conversations([path]) for path in (PROMPTS, HELD_OUT, CALIBRATION))
    refuse_overlap(asked, calibration)
    refuse_overlap(held_out, calibration)
    refuse_overlap(asked, held_out)


def test_the_data_card_counts_what_is_there(prompts: list[Row]) -> None:
    card = CARD.read_text(encoding="utf-8")
    for found in (rows(HELD_OUT), prompts):
        languages = Counter(row["language"] for row in found)
        assert f"| {len(found)}: {languages['en']} English, {languages['zh']} Chinese |" in card
    cells = Counter((prompt["category"], prompt["language"]) for prompt in prompts)
    for category in CATEGORIES:
        assert f"`{category}` {cells[category, 'en']} + {cells[category, 'zh']}" in card
    for name in ("critical", "criteria"):
        assert f"{sum(name in prompt for prompt in prompts)} `{name}`" in card
