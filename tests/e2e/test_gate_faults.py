"""Planted faults are caught by the gate and named in its verdict; a clean artifact trips none of the rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.gate import GateResult, run_gate
from quantkit.runtime.text import ChatText
from tests import planted
from tests.e2e.gate_case import ZH, Case, make_case

Plant = Callable[[Path], Path]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("faults"), json_too=True)


@pytest.fixture(scope="module")
def sound(case: Case) -> Path:
    return case.artifact("sound", down="W4A16_G32_ASYM")


@pytest.fixture(scope="module")
def judged(case: Case, sound: Path) -> GateResult:
    return judge(case, sound)


def judge(case: Case, artifact: Path) -> GateResult:
    return run_gate(
        artifact,
        case.source,
        [case.held_out],
        prompts=[case.prompts],
        calibration=[case.calibration],
        policy=str(case.policy),
        max_new_tokens=12,
    )


def failures(result: GateResult) -> dict[str, str]:
    return {rule.name: rule.text for rule in result.verdict.rules if rule.outcome == "fail"}


def test_a_clean_artifact_trips_no_rule(judged: GateResult) -> None:
    assert failures(judged) == {}
    assert judged.verdict.verdict == "pending-review"
    assert {"stop_set", "chat_template", "weights", "unquantized", "cache_scales"} <= {
        rule.name for rule in judged.verdict.rules if rule.outcome == "pass"
    }


JSON_SIGNS = ('{"', '":', '",', "{", ":", '"', "}", '"}')

FAULTS: dict[str, tuple[list[Plant], dict[str, str]]] = {
    "KV scales doubled, no system turn": (
        [lambda folder: planted.kv_scale_times(folder, "layers.1.k_scale", 2.0), planted.template_without_system_turn],
        {
            "cache layers.1.k_scale": "layers.1.k_scale is too large: half of its channels use at most 5",
            "chat_template": "a system turn, several turns after a system turn, Chinese rendered otherwise",
        },
    ),
    "KV scales halved, a zero point off by one": (
        [
            lambda folder: planted.kv_scale_times(folder, "layers.0.v_scale", 0.5),
            lambda folder: planted.zero_point_off_by_one(folder, "layers.0.down", only=(17, 3)),
        ],
        {
            "cache layers.0.v_scale": "layers.0.v_scale is too small: half of its channels reach",
            "weights layers.0.down": "1 of 1024 groups lie about a step off, the first in row 17, group 3",
        },
    ),
    "a matrix's zero points off by one, a stop token lost": (
        [
            lambda folder: planted.zero_point_off_by_one(folder, "layers.1.down"),
            lambda folder: planted.stop_token_lost(folder, "<|end_of_text|>"),
        ],
        {"weights layers.1.down": "a zero point", "stop_set": "lost <|end_of_text|> (1)"},
    ),
}


@pytest.mark.parametrize("faults", FAULTS)
def test_planted_faults_fail_and_are_named_and_nothing_else_is(
    case: Case, sound: Path, tmp_path: Path, faults: str
) -> None:
    plants, named = FAULTS[faults]
    folder = planted.copy_of(sound, tmp_path / "damaged")
    for plant in plants:
        plant(folder)
    result = judge(case, folder)
    assert (result.verdict.verdict, result.exit_code) == ("fail", 10)
    found = {
        r.name: r.text for r in result.verdict.rules if r.outcome == "fail" and r.section in ("structure", "audit")
    }
    assert found.keys() == named.keys()
    for name, said in named.items():
        assert said in found[name]


def test_damage_to_chinese_alone_fails_that_language_and_names_its_tokens(
    case: Case, sound: Path, tmp_path: Path
) -> None:
    rows = sorted(set(ChatText(sound).encode(ZH)))
    found = failures(judge(case, planted.rows_disturbed(planted.copy_of(sound, tmp_path / "damaged"), rows)))
    assert {"language zh", "unquantized embed"} <= found.keys()
    assert not {"language en", "format json"} & found.keys()
    assert f"{len(rows)} of 384 rows are not the source's: tokens" in found["unquantized embed"]


def test_damage_to_json_alone_fails_that_format_and_names_its_tokens(case: Case, sound: Path, tmp_path: Path) -> None:
    rows = planted.tokens_like(sound, lambda text: text.strip() in JSON_SIGNS)
    found = failures(judge(case, planted.rows_disturbed(planted.copy_of(sound, tmp_path / "damaged"), rows)))
    assert {"format json", "unquantized embed"} <= found.keys()
    assert "language zh" not in found
    assert "'{', '}'" in found["unquantized embed"]


def test_answers_are_evidence_in_prompt_order(case: Case, sound: Path, judged: GateResult) -> None:
    head, *rows = [json.loads(line) for line in (sound / "evidence/gate/answers.jsonl").read_text("utf-8").splitlines()]
    assert (head["kind"], head["version"]) == ("answers", 1)
    asked = [json.loads(line) for line in case.prompts.read_text("utf-8").splitlines()]
    assert [row["id"] for row in rows] == [row["id"] for row in asked]
    for row, prompt in zip(rows, asked, strict=True):
        assert row["messages"] == prompt["messages"]
        assert 1 <= row["baseline"]["tokens"] <= 12
        assert row["divergence"] >= 0
        assert [check["kind"] for check in row["checks"]] == [check["kind"] for check in prompt["checks"]]
        same = (row["baseline"]["text"], row["baseline"]["tokens"]) == (
            row["candidate"]["text"],
            row["candidate"]["tokens"],
        )
        assert same or row["first_divergence"] is not None
