"""Held-out data: read strictly, kept apart from calibration, cut and scored once, run in any composition."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quantkit.errors import RecipeError
from quantkit.gate.data import Conversation, Window, make_windows, read_conversations, refuse_overlap
from quantkit.gate.steps import BLOCK, Composition, compose, in_order, interleaved
from quantkit.resources import resource
from quantkit.runtime.text import ChatText
from tests.tiny import write_tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ChatText:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, "qwen2")
    return ChatText(folder)


def conversation(name: str, said: str, language: str = "en", category: str = "sql", system: str = "") -> Conversation:
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": said})
    return Conversation(name, category, language, tuple(turns), f"file:{name}")


def test_packaged_sets_share_no_message() -> None:
    held_out = read_conversations([resource("evals/heldout.jsonl")])
    calibration = read_conversations([resource("calib/conversations.jsonl")])
    refuse_overlap(held_out, calibration)
    assert len(held_out) >= 48
    assert len(calibration) >= 64
    for items, least in ((held_out, 0.3), (calibration, 0.35)):
        assert sum(item.language == "zh" for item in items) / len(items) >= least


def test_a_shared_message_is_refused_whatever_its_layout() -> None:
    ours = conversation("held-1", "Please refund the SECOND payment, of 3 March — thanks!")
    theirs = conversation("calib-9", "please refund   the second payment of 3 march thanks", system="Be brief.")
    with pytest.raises(RecipeError, match="prove nothing") as caught:
        refuse_overlap([ours], [theirs])
    assert caught.value.where == "file:held-1"


def test_shared_system_messages_and_greetings_are_no_overlap() -> None:
    system = "You are the assistant of a long-named company that sells garden tools."
    ours = conversation("a", "What does a spade with an ash handle cost?", system=system)
    theirs = conversation("b", "Hello there, good day", system=system)
    refuse_overlap([ours, conversation("c", "Hello there, good day")], [theirs])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"id": "a", "category": "x", "messages": [{"role": "user", "content": "hi"}]}, "'language' must be text"),
        ({"id": "a", "category": "x", "language": "en", "messages": []}, "list of turns"),
        ({"id": "a", "category": "x", "language": "en", "messages": [{"role": "user"}]}, "'content'"),
    ],
)
def test_a_malformed_row_is_told_with_its_place(tmp_path: Path, line: dict[str, object], told: str) -> None:
    good = {"id": "g", "category": "x", "language": "en", "messages": [{"role": "user", "content": "hi"}]}
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(line)}\n")
    with pytest.raises(RecipeError, match=told) as caught:
        read_conversations([path])
    assert caught.value.where == f"{path}:2"


def test_an_id_used_twice_is_refused(tmp_path: Path) -> None:
    good = {"id": "g", "category": "x", "language": "en", "messages": [{"role": "user", "content": "hi"}]}
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(good)}\n")
    with pytest.raises(RecipeError, match="used before"):
        read_conversations([path])


def test_windows_take_turns_over_language_and_category(text: ChatText) -> None:
    many = [conversation(f"en{i}", f"question number {i} about a river") for i in range(20)]
    few = [conversation(f"zh{i}", f"第{i}个问题", "zh", "rag") for i in range(3)]
    chosen = make_windows([*many, *few], text, max_samples=6, max_tokens=4096, max_window=64, seed=0)
    assert sorted(window.language for window in chosen.windows) == ["en", "en", "en", "zh", "zh", "zh"]
    shuffled = make_windows([*few, *reversed(many)], text, max_samples=6, max_tokens=4096, max_window=64, seed=0)
    assert shuffled.fingerprint == chosen.fingerprint  # the file's order doesn't matter


def test_windows_keep_to_the_budget(text: ChatText) -> None:
    many = [conversation(f"c{i}", f"{i} " + "the river runs slowly towards the sea " * 4) for i in range(9)]
    chosen = make_windows(many, text, max_samples=9, max_tokens=150, max_window=50, seed=0)
    assert chosen.tokens <= 150
    assert all(len(window.ids) <= 50 and window.cut for window in chosen.windows)


def test_a_context_that_two_windows_share_is_scored_once(text: ChatText) -> None:
    system = "You answer questions about invoices."
    items = [conversation(f"c{i}", said, system=system) for i, said in enumerate(["river", "stock"])]
    first, second = make_windows(items, text, max_samples=2, max_tokens=999, max_window=99, seed=0).windows
    shared = next(i for i, (a, b) in enumerate(zip(first.ids, second.ids, strict=False)) if a != b)
    assert (first.first, second.first) == (0, shared)


def windows(lengths: list[int]) -> list[Window]:
    return [Window(f"w{i}", "c", "en", tuple(range(1, n + 1)), i % 3, False) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("composition", [in_order(64), in_order(16), interleaved(64), interleaved(16)])
def test_every_composition_runs_each_token_once_and_asks_for_each_scored_row_once(composition: Composition) -> None:
    some = windows([5, 70, 33, 16, 17, 128, 2 + 2])
    slots: dict[int, tuple[int, int]] = {}
    asked: list[int] = []
    ran = 0
    for step in compose(some, composition):
        inputs = step.inputs
        assert len(inputs.token_ids) <= composition.budget
        assert len(inputs.seq_lens) <= composition.concurrent
        assert (inputs.slot_mapping >= BLOCK).all()  # block 0 is never written
        assert inputs.slot_mapping.max() < composition.blocks(128) * BLOCK
        assert (inputs.token_ids == inputs.positions + 1).all()  # each window counts from 1
        owners = np.repeat(np.arange(len(inputs.seq_lens)), np.diff(inputs.query_start_loc))
        for slot, position, row in zip(inputs.slot_mapping, inputs.positions, owners, strict=True):
            assert inputs.block_table[row, position // BLOCK] == slot // BLOCK
            slots[int(slot)] = (int(row), int(position))
        ran += len(inputs.token_ids)
        asked += step.index.tolist()
    assert ran == sum(len(window.ids) for window in some)
    assert sorted(asked) == list(range(sum(window.scored for window in some)))
