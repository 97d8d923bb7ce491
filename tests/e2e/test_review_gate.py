"""The gate leaves the last word to people: exit 12 until their plan is met and signed, then 0; 10 when they reject."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from quantkit.artifact.people import FOLDER
from quantkit.artifact.read import open_artifact
from quantkit.cli.app import run as quantkit
from quantkit.report import gather
from quantkit.review.plan import Plan, Stage
from quantkit.review.record import judge
from quantkit.review.sample import read_sample
from quantkit.review.status import open_sample
from quantkit.runtime.admission import NotAdmitted
from quantkit.runtime.load import EngineOptions, load_artifact
from tests.e2e.gate_case import Case, make_case
from tests.review_case import T0, copy_of, rate, say, write_run


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("people"))


@pytest.fixture(scope="module")
def judged(case: Case) -> Path:
    artifact = case.artifact("artifact")
    write_run(artifact, Plan((Stage(3, 0, 1),), worst=1, critical=0))
    assert gate(case, artifact) == 12
    return artifact


def gate(case: Case, artifact: Path) -> int:
    options = {"--data": case.held_out, "--calibration": case.calibration, "--prompts": case.prompts}
    words = [str(word) for pair in (options | {"--policy": case.policy}).items() for word in pair]
    return quantkit(["gate", str(artifact), "--source", case.source.location, *words])


def differing(artifact: Path) -> None:
    """Make every candidate's answer in the evidence another one: a tiny model at 8 bits may say the same."""
    path = artifact / "evidence" / "gate" / "answers.jsonl"
    head, *rows = path.read_text(encoding="utf-8").splitlines()
    changed = [json.loads(row) for row in rows]
    for row in changed:
        row["candidate"]["text"] += " indeed"
    path.write_text(
        "\n".join([head, *(json.dumps(row, ensure_ascii=False) for row in changed)]) + "\n", encoding="utf-8"
    )


def test_accepted_and_signed_the_same_gate_passes(
    case: Case, judged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = copy_of(judged, tmp_path / "artifact")
    differing(artifact)
    sample = open_sample(artifact)
    assert sample.showings
    rate(artifact / FOLDER, sample)
    assert quantkit(["review", "sign", str(artifact), "--reviewer", "Ann"]) == 0
    capsys.readouterr()
    assert gate(case, artifact) == 0
    said = capsys.readouterr().out
    assert said.startswith("pass  (policy tiny")
    assert "accepted by Ann" in said
    assert load_artifact(artifact, EngineOptions(threads=1)).standing.verdict == "pass"


@pytest.mark.slow
def test_rejected_and_signed_it_fails_and_is_not_served(case: Case, judged: Path, tmp_path: Path) -> None:
    artifact = copy_of(judged, tmp_path / "artifact")
    differing(artifact)
    sample = open_sample(artifact)
    number = next(i for i, one in enumerate(sample.showings) if one.kind == "pair")
    judge(artifact / FOLDER, sample, "Ann", say(sample, number, "worse", "critical"), T0)
    assert gate(case, artifact) == 10
    assert quantkit(["review", "sign", str(artifact), "--reviewer", "Ann"]) == 10
    with pytest.raises(NotAdmitted, match="people rejected it: signed by Ann"):
        load_artifact(artifact, EngineOptions(threads=1))


@pytest.mark.slow
def test_a_build_readies_the_sample_and_a_second_one_passes_once_people_signed(case: Case, tmp_path: Path) -> None:
    plan = {"stages": [{"items": 3, "accept": 0, "reject": 1}], "worst": 0, "critical": 0}
    content = {
        "version": 1,
        "name": "tiny",
        "model": {"source": case.source.location},
        "calibration": {"data": [str(case.calibration)], "max_samples": 8, "max_tokens": 128},
        "quantization": {"schemes": ["W8A16"], "budget_bits": 10.0, "method": "rtn", "sensitivity": "weight"},
        "gate": {"data": [str(case.held_out)], "prompts": [str(case.prompts)], "policy": str(case.policy)},
    }
    content["gate"]["review"] = {"plan": plan}  # type: ignore[index]
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert quantkit(["build", str(recipe), "--out", str(out)]) == 12
    sample = read_sample(out / FOLDER, open_artifact(out, check="sizes").payload_digest)
    assert sample is not None
    assert [stage.items for stage in sample.plan.stages] == [3]
    rate(out / FOLDER, sample)
    assert quantkit(["review", "sign", str(out), "--reviewer", "Ann"]) == 0
    assert quantkit(["build", str(recipe), "--out", str(out)]) == 0
    assert gather(out).verdict == "pass"
