"""JUnit XML and Markdown: each rule is told with its outcome, and outside text stays text there too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quantkit.artifact.read import open_artifact
from quantkit.cli.app import run as quantkit
from quantkit.errors import CheckpointError
from quantkit.report import FORMS, render_html, write_report
from quantkit.report.answers import worst_answers
from quantkit.report.junit import render_junit
from quantkit.report.markdown import escaped, render_markdown
from quantkit.report.model import Cell
from quantkit.report.write import render_json
from tests.report_case import HOSTILE, compared, gate, report, review, rule, search
from tests.review_case import answer, answers, copy_of, make_artifact, write_answers

OUTCOMES = {"pass": None, "fail": "failure", "inconclusive": "error", "unproven": "skipped", "unmeasurable": "skipped"}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_rule_is_a_test_case_with_its_outcome(outcome: str) -> None:
    judged = gate()
    judged["verdict"]["rules"] = [rule("mean_kl", outcome, "mean KL is what it is")]
    root = ElementTree.fromstring(render_junit(report(gate=judged)))
    case = root.find("testsuite[@name='tokens']/testcase[@name='mean_kl']")
    assert case is not None
    told = [child for child in case if child.tag != "system-out"]
    assert [child.tag for child in told] == ([OUTCOMES[outcome]] if OUTCOMES[outcome] else [])
    assert all(child.get("message") == "mean KL is what it is" for child in told)


@pytest.mark.parametrize(
    ("verdict", "waiver", "kind"),
    [
        ("pass", None, None),
        ("fail", None, "failure"),
        ("pending-review", None, "error"),
        ("pending-review", "x", "skipped"),
    ],
)
def test_a_review_that_is_not_finished_is_no_success(verdict: str, waiver: str | None, kind: str | None) -> None:
    judged = gate()
    judged["verdict"]["waiver"] = waiver
    root = ElementTree.fromstring(render_junit(report(gate=judged, review=review(verdict=verdict))))
    case = root.find("testsuite[@name='people']/testcase")
    assert case is not None
    assert [child.tag for child in case if child.tag != "system-out"] == ([kind] if kind else [])


def test_counts_of_a_suite_are_those_of_its_cases() -> None:
    judged = gate()
    judged["verdict"]["rules"] = [rule(f"r{i}", outcome, "text") for i, outcome in enumerate(OUTCOMES)]
    suite = ElementTree.fromstring(render_junit(report(gate=judged))).find("testsuite[@name='tokens']")
    assert suite is not None
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5", "failures": "1", "errors": "1", "skipped": "2",
    }  # fmt: skip


def test_an_artifact_that_nobody_judged_is_an_error() -> None:
    root = ElementTree.fromstring(render_junit(report(gate=None)))
    assert len(root.findall(".//error")) == len(root.findall(".//testcase")) == 1


@pytest.mark.parametrize("kind", [*HOSTILE, "noncharacter"])
def test_hostile_text_leaves_xml_and_markdown_whole(kind: str) -> None:
    text = HOSTILE.get(kind, "a\uffff\ufffe")
    made = report(text, gate=gate(text, outcome="fail", verdict="fail"))
    root = ElementTree.fromstring(render_junit(made).encode())
    assert {one.tag for one in root.iter()} == {
        "testsuites",
        "testsuite",
        "testcase",
        "failure",
        "system-out",
        "skipped",
    }
    comment = render_markdown(made)
    comment.encode()
    assert not re.search(r"(?<!\\)<", re.sub("`[^`]*`", "", comment))  # in code nothing is markup
    assert len(comment) < 12_000


def test_markdown_links_mentions_and_formats_nothing_from_outside() -> None:
    text = escaped("@team see [x](https://evil.example) www.evil.example **now** `rm` <b>| a\n# b")
    assert "@team" not in text
    assert "https://" not in text
    assert "www.evil" not in text
    assert "](" not in text
    assert "**" not in text
    assert "\n" not in text
    assert not re.search(r"(?<!\\)[`|<\[]", text)


def test_markdown_begins_with_the_verdict_and_what_decided_it() -> None:
    comment = render_markdown(report(gate=gate("it broke", outcome="fail", verdict="fail")))
    assert "rules hold, 1 fail" in comment
    assert comment.splitlines()[0] == "### fine: Fail"
    assert comment.index("✗ fail: mean\\_kl: it broke") < comment.index("weights **")
    assert "| mean KL | 0.1 | ≤ 0.24 |" in comment


def test_json_holds_everything_the_page_shows() -> None:
    found = json.loads(render_json(report()))
    assert found["verdict"] == "pending-review"
    assert found["answers"][0]["failed"] == ["fine"]
    assert found["search"]["frontier"][0] == [4.0, 0.1]
    assert found["layers"][0]["error_of_rtn"] == 0.4


def test_the_worst_answers_are_those_lost_then_those_that_stray_furthest(tmp_path: Path) -> None:
    checks = [{"kind": "number", "baseline": True, "candidate": False}]
    lines = [answer(i, divergence=i / 100, checks=checks if i < 2 else []) for i in range(12)]
    path = tmp_path / "answers.jsonl"
    rows = [{"payload_digest": "d", "kind": "answers", "version": 1}, *lines, answer(20, identical=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = worst_answers(path, "d")
    assert [one.id for one in found] == ["p001", "p000", "p011", "p010", "p009", "p008", "p007", "p006"]
    assert [one.lost for one in found[:3]] == [True, True, False]
    assert found[0].failed == ("number",)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_artifact(tmp_path_factory.mktemp("forms"))
    write_answers(made, answers(9))
    return made


def test_the_command_prints_one_form_or_writes_all(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begins = {"html": "<!doctype html>", "json": "{", "junit": "<?xml", "markdown": "### "}
    for form, start in begins.items():
        assert quantkit(["report", str(artifact), "--format", form]) == 0
        assert capsys.readouterr().out.startswith(start)
    assert not (artifact / "evidence" / "report").exists()
    assert quantkit(["report", str(artifact)]) == 0
    assert {path.name for path in (artifact / "evidence" / "report").iterdir()} == {file for file, _ in FORMS.values()}


def test_the_command_writes_where_it_is_told(artifact: Path, tmp_path: Path) -> None:
    assert quantkit(["report", str(artifact), "--format", "junit", "-o", str(tmp_path / "a" / "out.xml")]) == 0
    assert ElementTree.parse(tmp_path / "a" / "out.xml").getroot().tag == "testsuites"


def test_two_forms_at_once_are_refused(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantkit(["report", str(artifact), "--json", "--format", "junit"]) == 2
    assert "different forms" in capsys.readouterr().err


def test_a_folder_is_no_file_to_write_to(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantkit(["report", str(artifact), "-o", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [{"groups": 5}, {"groups": [{"group": "x", "options": []}]}, {"frontier": [["a", "b"]]}, {"frontier": [[1]]},
     {"average_bits": None},
     {"groups": [{"group": "x", "weights": 0, "options": [{"scheme": "W", "bits": 4, "sensitivity": 1}]}]}],
    ids=str,
)  # fmt: skip
def test_a_search_of_another_form_is_refused(artifact: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    made = copy_of(artifact, tmp_path / "artifact")
    digest = open_artifact(made, check="sizes").payload_digest
    (made / "evidence" / "run").mkdir(exist_ok=True)
    path = made / "evidence" / "run" / "search.json"
    path.write_text(json.dumps({"payload_digest": digest, **search(), **change}))
    with pytest.raises(CheckpointError, match="not of the form"):
        write_report(made)
    path.write_text(json.dumps({"payload_digest": "sha256:other", **search()}))
    with pytest.raises(CheckpointError, match="another payload"):
        write_report(made)


def test_a_report_of_a_large_model_is_small_enough_to_mail() -> None:
    kinds = ("qkv", "o", "gate_up", "down")
    layers = tuple(Cell(f"layers.{i}.{k}", i, k, "W4A16_G64", 4, 0.01, 0.5) for i in range(80) for k in kinds)
    long = compared(baseline="一二" * 4000, candidate="一三" * 4000)
    assert len(render_html(report(layers=layers, answers=(long,) * 8)).encode()) < 600_000
