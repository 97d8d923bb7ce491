"""The gate on a tiny model's artifacts: sound ones pass, damaged ones fail, and it says what it judged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quantkit.cli.app import run as quantkit
from quantkit.errors import CheckpointError, RecipeError
from quantkit.formats import QuantizedMatrix
from quantkit.gate import GateResult, read_evidence, run_gate
from quantkit.program import Weight
from quantkit.report import gather, write_report
from quantkit_kernels.arrays import Array
from tests.e2e.gate_case import ZH, Case, make_case


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def sound(case: Case) -> Path:
    return case.artifact("sound")


@pytest.fixture(scope="module")
def judged(case: Case, sound: Path) -> GateResult:
    return judge(case, sound)


def judge(case: Case, artifact: Path, **options: object) -> GateResult:
    return run_gate(
        artifact,
        case.source,
        [case.held_out],
        calibration=[case.calibration],
        policy=str(case.policy),
        **options,  # type: ignore[arg-type]
    )


def test_a_sound_artifact_waits_for_people(judged: GateResult) -> None:
    assert (judged.verdict.verdict, judged.exit_code, judged.verdict.tokens) == ("pending-review", 12, "pass")


def test_the_ladder_stands_where_it_should(judged: GateResult) -> None:
    kl = {name: row["mean_kl"] for name, row in judged.details["variants"].items()}
    assert 0 < kl["RTN-INT8"] < kl["artifact"] < kl["RTN-INT4"]  # the artifact is INT8 with an INT8 cache and head


def test_the_noise_floor_is_exactly_zero(judged: GateResult) -> None:
    floor = judged.details["variants"]["noise floor"]
    assert floor["max_kl"] == 0.0
    assert floor["same_top1"] == 1.0
    assert floor["ppl_ratio"] == 1.0


def test_evidence_names_the_payload_and_what_the_verdict_covers(judged: GateResult, sound: Path) -> None:
    from quantkit.artifact.read import open_artifact

    digest = open_artifact(sound).payload_digest  # evidence lies outside the seal: the payload still verifies
    verdict = read_evidence(sound / "evidence" / "gate" / "verdict.json", digest)
    assert verdict is not None
    assert verdict["verdict"] == "pending-review"
    assert verdict["coverage"]["kv_format"] == "INT8"
    assert verdict["coverage"]["backend"] == judged.verdict.coverage.backend
    assert {rule["name"] for rule in verdict["rules"]} >= {"mean_kl", "lost_top1", "noise_floor", "data"}
    with pytest.raises(CheckpointError, match="another payload"):
        read_evidence(sound / "evidence" / "gate" / "verdict.json", "sha256:" + "0" * 64)


def test_judging_again_with_a_waiver_measures_the_same_and_passes(
    case: Case, sound: Path, judged: GateResult, tmp_path: Path
) -> None:
    again = judge(case, sound, review_waiver="nobody serves a random model", evidence=tmp_path)
    assert again.verdict.rules == judged.verdict.rules
    assert again.details["worst"] == judged.details["worst"]
    assert (again.exit_code, again.verdict.waiver) == (0, "nobody serves a random model")
    assert json.loads((tmp_path / "gate" / "verdict.json").read_text())["waiver"] == "nobody serves a random model"


def scrambled(weight: Weight, value: Array | QuantizedMatrix) -> Array | QuantizedMatrix:
    if weight.name == "layers.1.down" and isinstance(value, QuantizedMatrix):
        codes, scale = (np.roll(part, 1, axis=0) for part in (value.codes, value.scale))
        return QuantizedMatrix(value.scheme, codes, scale, value.zero)
    return value


def saturating(weight: Weight, value: Array | QuantizedMatrix) -> Array | QuantizedMatrix:
    return value / 16 if weight.name == "layers.1.v_scale" and isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("damage", [scrambled, saturating])
def test_planted_damage_fails(case: Case, damage: object) -> None:
    result = judge(case, case.artifact(damage.__name__, damage=damage))  # type: ignore[attr-defined,arg-type]
    assert (result.verdict.verdict, result.exit_code) == ("fail", 10)
    assert "mean_kl" in {rule.name for rule in result.verdict.deciding}


def test_damage_to_chinese_alone_is_named(case: Case) -> None:
    from quantkit.runtime.text import ChatText

    folder = case.folder / "tokenizer-zh"
    case.source.write_tokenizer(folder)
    rows = sorted(set(ChatText(folder).encode(ZH)))

    def chinese_only(weight: Weight, value: Array | QuantizedMatrix) -> Array | QuantizedMatrix:
        if weight.kind == "table" and isinstance(value, np.ndarray):
            value = value.copy()
            value[rows] = value[np.roll(rows, 1)]
        return value

    result = judge(case, case.artifact("chinese", damage=chinese_only))
    assert result.verdict.verdict == "fail"
    failed = {rule.name for rule in result.verdict.deciding}
    assert "language zh" in failed
    assert "language en" not in failed


def test_data_that_calibration_saw_is_refused(case: Case, sound: Path) -> None:
    with pytest.raises(RecipeError, match="prove nothing"):
        run_gate(sound, case.source, [case.calibration], calibration=[case.calibration], policy=str(case.policy))


def test_another_source_is_refused(case: Case, sound: Path, tmp_path: Path) -> None:
    other = make_case(tmp_path, "qwen2")
    with pytest.raises(CheckpointError, match="not the model this artifact was built from"):
        run_gate(sound, other.source, [case.held_out], policy=str(case.policy))


def test_the_command_judges_and_exits_by_verdict(case: Case, sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data", str(case.held_out), "--prompts", str(case.prompts), "--policy", str(case.policy)]
    code = quantkit(["gate", str(sound), *given, "--max-new-tokens", "6", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 12
    assert found["verdict"]["verdict"] == "pending-review"
    assert found["data"]["conversations"] == 16
    assert found["answers"]["prompts"] == 4
    assert max(max(pair) for pair in found["answers"]["lengths"]) == 6


def test_the_report_shows_what_was_judged_and_adds_up(sound: Path, judged: GateResult) -> None:
    from quantkit.artifact.read import open_artifact

    opened = open_artifact(sound)
    found = gather(sound)
    assert found.gate is not None
    assert found.gate["variants"] == json.loads(json.dumps(judged.details["variants"]))
    scales = sum(t.size for name, t in opened.tensors.items() if name.endswith(("k_scale", "v_scale")))
    assert found.memory.after == opened.weight_bytes - scales
    assert found.memory.before == opened.source_weight_bytes
    assert (found.memory.kv_before, found.memory.kv_after) == (512, 256)
    page = write_report(sound)
    assert page == sound / "evidence" / "report" / "report.html"
    assert "Pending review" in page.read_text(encoding="utf-8")
    assert open_artifact(sound).payload_digest == opened.payload_digest


def test_worst_items_hold_what_each_model_finds_likeliest(judged: GateResult) -> None:
    for item in judged.details["worst"]:
        for side in ("baseline", "artifact"):
            likely = [choice["probability"] for choice in item[side]]
            assert likely == sorted(likely, reverse=True)
            assert 0 < sum(likely) < 1 + 1e-5


def test_a_report_of_broken_evidence_is_refused(sound: Path, judged: GateResult) -> None:
    path = sound / "evidence" / "gate" / "gate.json"
    whole = path.read_text(encoding="utf-8")
    try:
        path.write_text(
            json.dumps({"payload_digest": judged.details["payload_digest"], "verdict": {"verdict": "pass"}})
        )
        with pytest.raises(CheckpointError, match="not of the form"):
            write_report(sound)
    finally:
        path.write_text(whole, encoding="utf-8")
