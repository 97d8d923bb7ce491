"""From answers to exit codes: sample, record, sign-off and waiver of a real artifact, through the commands."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact.people import FOLDER
from quantkit.artifact.read import open_artifact
from quantkit.cli.app import run as quantkit
from quantkit.errors import CheckpointError
from quantkit.review.answers import answer_of
from quantkit.review.record import judge
from quantkit.review.sample import Sample, read_sample
from quantkit.review.status import NotDecided, open_sample, review_status, sign, waive
from quantkit.runtime.admission import read_standing
from tests.review_case import (
    QUICK,
    T0,
    answers,
    copy_of,
    make_artifact,
    rate,
    say,
    write_answers,
    write_run,
    write_verdict,
)

TODAY = date(2026, 11, 29)


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    artifact = make_artifact(tmp_path_factory.mktemp("review"))
    write_answers(artifact, answers(40, identical=5, critical=2))
    write_run(artifact, QUICK, seed=5)
    write_verdict(artifact)
    return artifact


@pytest.fixture
def artifact(packaged: Path, tmp_path: Path) -> Path:
    return copy_of(packaged, tmp_path / "artifact")


def folder_of(artifact: Path) -> Path:
    return artifact / FOLDER


def standing(artifact: Path) -> str:
    return read_standing(artifact, open_artifact(artifact, check="sizes").payload_digest).verdict


def rated(artifact: Path, worse: int = 0, severity: str = "major") -> Sample:
    """All of the first pass judged, `worse` pairs of the random slice as regressions."""
    sample = open_sample(artifact)
    keys = [key for key, item in sample.items.items() if item.stage == 0 and not item.answer.identical]
    rate(folder_of(artifact), sample, dict.fromkeys(keys[:worse], ("worse", severity)))
    return sample


def test_the_sample_follows_the_recipes_plan_and_seed(artifact: Path) -> None:
    sample = open_sample(artifact)
    assert (sample.plan, sample.seed, sample.prompts) == (QUICK, 5, 40)
    assert open_sample(artifact) == sample


def test_until_somebody_judges_the_sample_follows_the_answers_and_then_no_more(artifact: Path) -> None:
    first = open_sample(artifact)
    write_answers(artifact, answers(50))
    second = open_sample(artifact)
    assert second.id != first.id
    rate(folder_of(artifact), second, most=1)
    write_answers(artifact, answers(60))
    assert open_sample(artifact).id == second.id


def test_pending_until_the_plan_is_met_and_signed_then_pass_everywhere(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = str(artifact)
    assert quantkit(["review", "status", here]) == 12
    assert standing(artifact) == "pending-review"
    rated(artifact)
    assert quantkit(["review", "status", here]) == 12
    assert f"quantkit review sign {here} --reviewer NAME" in capsys.readouterr().out
    assert quantkit(["review", "sign", here, "--reviewer", "Ann Müller"]) == 0
    assert quantkit(["review", "status", here]) == 0
    assert quantkit(["review", "verify", here]) == 0
    assert "signed by Ann Müller: accept" in capsys.readouterr().out
    assert standing(artifact) == "pass"
    assert quantkit(["inspect", here]) == 0
    assert "pass by policy tiny" in capsys.readouterr().out


def test_a_reject_needs_no_signature_to_show_and_one_to_keep_the_server_away(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rated(artifact, worse=2)
    assert quantkit(["review", "status", str(artifact)]) == 10
    assert "2 major regressions; the plan rejects at 2" in capsys.readouterr().out
    assert quantkit(["review", "sign", str(artifact), "--reviewer", "Ann"]) == 10
    found = read_standing(artifact, open_artifact(artifact, check="sizes").payload_digest)
    assert found.verdict == "fail"
    assert "people rejected it: signed by Ann" in found.rules[-1]["text"]
    write_verdict(artifact, "pass")
    assert standing(artifact) == "fail"


def test_an_undecided_review_cannot_be_signed(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantkit(["review", "sign", str(artifact), "--reviewer", "Ann"]) == 12
    assert "not decided yet" in capsys.readouterr().err
    rated(artifact, worse=1)
    with pytest.raises(NotDecided, match="pairs to look at"):
        sign(artifact, "Ann")
    assert not (folder_of(artifact) / "signoff.json").exists()


def test_a_sign_off_covers_the_record_it_was_given_for(artifact: Path) -> None:
    sample = rated(artifact)
    sign(artifact, "Ann")
    rate(folder_of(artifact), sample, most=1, reviewer="Bo")
    assert review_status(artifact).verdict == "pending-review"
    assert standing(artifact) == "pending-review"
    sign(artifact, "Bo")
    assert standing(artifact) == "pass"


def test_a_tail_cut_off_with_its_head_is_seen_by_the_sign_off(artifact: Path) -> None:
    rated(artifact)
    sign(artifact, "Ann")
    place = folder_of(artifact)
    lines = (place / "record.jsonl").read_bytes().splitlines(keepends=True)
    from hashlib import sha256

    (place / "record.jsonl").write_bytes(b"".join(lines[:-1]))
    head = json.loads((place / "head.json").read_text())
    head |= {"lines": len(lines) - 1, "sha256": sha256(lines[-2][:-1]).hexdigest()}
    (place / "head.json").write_text(json.dumps(head))
    with pytest.raises(CheckpointError, match=r"lines and \d+ were signed: the end is missing"):
        review_status(artifact)
    with pytest.raises(CheckpointError, match="were signed"):
        standing(artifact)
    assert quantkit(["review", "verify", str(artifact)]) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"payload_digest": "sha256:other"}, "is about another payload"),
        ({"decision": "reject"}, "its own tally decides otherwise"),
        ({"decision": "reject", "tally": {"decision": "reject"}}, "the record it signs says accept"),
        ({"decision": "maybe"}, "not a sign-off"),
        ({"record": {"lines": 3, "sha256": "0" * 64}}, "line 3 was changed since 3 lines were signed"),
        ({"record": {"lines": -1, "sha256": "0" * 64}}, "no number of lines"),
        ({"record": None}, "not a sign-off"),
    ],
)
def test_a_changed_sign_off_is_refused(artifact: Path, change: dict[str, Any], words: str) -> None:
    rated(artifact)
    sign(artifact, "Ann")
    path = folder_of(artifact) / "signoff.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(CheckpointError, match=words):
        review_status(artifact)


def test_a_sample_picked_by_hand_is_refused(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_sample(artifact)
    assert quantkit(["review", "verify", str(artifact)]) == 0
    assert "drawn by its seed" in capsys.readouterr().out
    path = folder_of(artifact) / "sample.json"
    body = json.loads(path.read_text(encoding="utf-8"))
    picked = next(item for item in body["items"] if item["stage"] == 0)
    picked["stage"], picked["inclusion"] = 1, 12 / 40
    path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert quantkit(["review", "verify", str(artifact)]) == 3
    assert "picked by hand" in capsys.readouterr().err
    rate(folder_of(artifact), read_sample(folder_of(artifact), body["payload_digest"]), most=1)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="picked by hand"):
        sign(artifact, "Ann")
    write_answers(artifact, answers(41))
    assert quantkit(["review", "verify", str(artifact)]) == 0
    assert "drawn from answers that are gone" in capsys.readouterr().out


def test_an_artifact_nobody_may_write_to_is_a_clear_error(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of(artifact).write_text("a file where the folder should be")
    assert quantkit(["review", str(artifact), "--no-browser"]) == 3
    assert "cannot be written to" in capsys.readouterr().err


def test_another_payloads_review_is_refused(artifact: Path, tmp_path: Path) -> None:
    rated(artifact)
    digest = open_artifact(artifact, check="sizes").payload_digest
    for path in folder_of(artifact).glob("*.json*"):
        path.write_text(path.read_text(encoding="utf-8").replace(digest, "sha256:" + "e" * 64), encoding="utf-8")
    with pytest.raises(CheckpointError, match="another payload"):
        review_status(artifact)
    assert quantkit(["review", "verify", str(artifact)]) == 3


def test_a_waiver_holds_until_its_day_and_yields_to_a_reject(artifact: Path) -> None:
    waive(artifact, "internal trial only", TODAY + timedelta(days=7), today=TODAY)
    assert review_status(artifact, today=TODAY + timedelta(days=7)).verdict == "pass"
    late = review_status(artifact, today=TODAY + timedelta(days=8))
    assert (late.verdict, late.reason) == ("pending-review", "the waiver ended on 2026-12-06")
    sample = open_sample(artifact)
    number = next(i for i, one in enumerate(sample.showings) if one.kind == "pair")
    judge(folder_of(artifact), sample, "Ann", say(sample, number, "worse", "critical"), T0)
    assert review_status(artifact, today=TODAY).verdict == "fail"


def test_a_waiver_needs_a_reason_and_a_day_to_come(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiving = ["review", "waive", str(artifact)]
    assert quantkit([*waiving, "--reason", "no", "--until", "2999-01-01"]) == 2
    assert quantkit([*waiving, "--reason", "internal trial", "--until", "2020-01-01"]) == 2
    assert quantkit([*waiving, "--reason", "internal trial", "--until", "soon"]) == 2
    assert "no day" in capsys.readouterr().err
    assert not (folder_of(artifact) / "waiver.json").exists()
    assert quantkit([*waiving, "--reason", "internal trial", "--until", "2999-01-01"]) == 0
    assert standing(artifact) == "pass"


def test_a_failed_gate_stays_failed_whatever_people_say(artifact: Path) -> None:
    write_verdict(artifact, "fail")
    rated(artifact)
    sign(artifact, "Ann")
    assert standing(artifact) == "fail"


def test_redrawing_keeps_what_was_judged_aside_and_says_so(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rated(artifact, worse=2)
    assert review_status(artifact).verdict == "fail"
    open_sample(artifact, redraw=True)
    found = review_status(artifact)
    assert (found.verdict, found.set_aside) == ("pending-review", 1)
    assert (folder_of(artifact) / "aside-1" / "record.jsonl").exists()
    quantkit(["review", "status", str(artifact)])
    assert "earlier reviews of this payload set aside (--redraw): 1" in capsys.readouterr().out


def test_status_as_json_holds_the_operating_curve_and_the_interval(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rated(artifact)
    capsys.readouterr()
    assert quantkit(["review", "status", str(artifact), "--json"]) == 12
    found = json.loads(capsys.readouterr().out)
    assert found["operating_curve"][0] == [0.0, 1.0]
    assert found["tally"]["rated"] == 6
    assert 0 < found["tally"]["high"] < 1
    assert found["tally"]["reviewers"][0]["name"] == "Ann"


@pytest.mark.parametrize("recipe", [7, {"gate": 7}, {"gate": {"review": {"plan": "x"}}}, {"gate": {"review": [1]}}])
def test_a_run_record_of_another_form_is_refused(artifact: Path, recipe: Any) -> None:
    path = artifact / "evidence" / "run" / "run.json"
    digest = open_artifact(artifact, check="sizes").payload_digest
    path.write_text(json.dumps({"payload_digest": digest, "recipe": recipe}))
    with pytest.raises(CheckpointError, match="not a run record"):
        open_sample(artifact)


def test_redrawing_without_answers_leaves_everything_where_it_is(artifact: Path) -> None:
    rated(artifact)
    (artifact / "evidence" / "gate" / "answers.jsonl").unlink()
    with pytest.raises(CheckpointError, match="no answers to look at"):
        open_sample(artifact, redraw=True)
    assert review_status(artifact).set_aside == 0


def test_without_answers_the_gate_is_named(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (artifact / "evidence" / "gate" / "answers.jsonl").unlink()
    assert quantkit(["review", str(artifact), "--no-browser"]) == 3
    assert "quantkit gate" in capsys.readouterr().err
    assert quantkit(["review", "status", str(artifact)]) == 12


def test_hostile_answers_survive_the_way_through_the_sample(artifact: Path) -> None:
    text = "</script><img src=x onerror=alert(1)>\u202egnp\x00\x1b[31m\u2028"
    lines = answers(40)
    for line in lines:
        line |= {"candidate": {"text": text}, "criteria": text, "category": text}
    write_answers(artifact, lines)
    sample = open_sample(artifact)
    assert read_sample(folder_of(artifact), sample.payload_digest) == sample
    assert all(item.answer == answer_of(item.answer.as_dict(), "") for item in sample.items.values())
    assert {item.answer.candidate for item in sample.items.values()} == {text}
