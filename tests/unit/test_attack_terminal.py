"""Other people's words in files must not steer the terminal of who looks at them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.artifact.people import FOLDER
from quantkit.cli.app import run
from quantkit.terminal import printable
from tests.review_case import answers, make_artifact, write_answers, write_verdict

EVIL = "\x1b[31mpass\x1b]0;title\x07\u202egnirts\u2066"


def test_letters_of_any_script_stay_and_what_steers_is_written_out() -> None:
    assert printable("Straße 请 😀\nsecond line") == "Straße 请 😀\nsecond line"
    assert printable("\x1b[2J\u202ea\r") == "\\x1b[2J\\u202ea\\r"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_artifact(tmp_path_factory.mktemp("terminal"))
    write_answers(made, answers(4))
    write_verdict(made)
    path = made / "evidence" / "gate" / "verdict.json"
    verdict = json.loads(path.read_text())
    verdict |= {"policy": EVIL, "coverage": {**verdict["coverage"], "isa": EVIL}}
    path.write_text(json.dumps(verdict))
    waiver = {"payload_digest": verdict["payload_digest"], "reason": EVIL, "until": "2999-01-01"}
    (made / FOLDER).mkdir(parents=True, exist_ok=True)
    (made / FOLDER / "waiver.json").write_text(json.dumps(waiver))
    return made


@pytest.mark.parametrize("command", ["inspect", "review status"])
def test_forged_evidence_cannot_steer_the_terminal(
    artifact: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run([*command.split(), str(artifact)])
    told = capsys.readouterr()
    assert "\\x1b[31mpass" in told.out
    assert not [c for c in told.out + told.err if not c.isprintable() and c != "\n"]
