"""The review page in a real Chromium: a stranger rates by keyboard, undoes, reloads, goes on; the record verifies."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantkit.artifact.people import FOLDER
from quantkit.cli.app import run as quantkit
from quantkit.review.record import read_record
from quantkit.review.status import open_sample, review_status
from tests.browser.chromium import Page
from tests.review_case import QUICK, answers, copy_of, make_artifact, write_answers, write_run, write_verdict

pytestmark = pytest.mark.browser
COMMAND = (sys.executable, "-c", "from quantkit.cli import main; main()", "review")
HOSTILE = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>&amp;\u202egnp"


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    artifact = make_artifact(tmp_path_factory.mktemp("browser"))
    write_answers(artifact, answers(40, identical=4, critical=2))
    write_run(artifact, QUICK)
    write_verdict(artifact)
    return artifact


class Review:
    """`quantkit review ARTIFACT --no-browser`, running; a context manager."""

    def __init__(self, artifact: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, str(artifact), "--no-browser", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def __enter__(self) -> Review:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def artifact(packaged: Path, tmp_path: Path) -> Path:
    return copy_of(packaged, tmp_path / "artifact")


@pytest.fixture
def page() -> Iterator[Page]:
    with Page(1440, 900) as opened:
        yield opened


def start(page: Page, url: str, name: str = "Ann Müller") -> None:
    page.open(url)
    page.wait("document.activeElement.id === 'reviewer'")
    page.type(name)
    page.press("Enter")
    page.wait("!document.getElementById('pair').hidden")


def keep(page: Page, *keys: str) -> None:
    """Press keys, and wait until the judgement is kept and the next thing is there."""
    before = page.evaluate("document.getElementById('progress').textContent")
    page.press(*keys, "Enter")
    page.wait(f"document.getElementById('progress').textContent !== {json.dumps(before)}")
    page.wait(
        "document.getElementById('told').textContent.startsWith('Kept') || !document.getElementById('done').hidden"
    )


def shown(page: Page) -> str:
    return str(
        page.evaluate("document.getElementById('request').innerText + document.getElementById('answers').innerText")
    )


def test_three_pairs_by_keyboard_undo_reload_and_a_record_that_verifies(
    artifact: Path, page: Page, capsys: pytest.CaptureFixture[str]
) -> None:
    with Review(artifact) as review:
        start(page, review.url)
        keep(page, "1", "n")
        keep(page, "2", "m", "w", "i")
        third = shown(page)
        page.press("4", "k")
        page.type("两个都不行, neither will do")
        keep(page)
        assert "3 of 11" in page.text()
        page.press("u")
        page.wait("document.getElementById('told').textContent.startsWith('Undone')")
        assert shown(page) == third
        assert page.evaluate("document.getElementById('undo').disabled")
        page.press("u")
        page.wait("document.getElementById('told').textContent.startsWith('Nothing to undo')")
        page.reload()
        page.wait("document.getElementById('progress').textContent.startsWith('2 of 11')")
        assert shown(page) == third
        keep(page, "3")
        assert page.problems == []
        assert {url.split("/")[2] for url in page.requests if url.startswith("http")} == {review.url.split("/")[2]}
    sample = open_sample(artifact)
    record = read_record(artifact / FOLDER, sample)
    assert [(line["kind"], line.get("choice"), line.get("severity")) for line in record.chain.lines] == [
        ("judgement", "first", "none"),
        ("judgement", "second", "minor"),
        ("judgement", "both-bad", "none"),
        ("retraction", None, None),
        ("judgement", "tie", "none"),
    ]
    assert record.chain.lines[1]["reasons"] == ["facts", "instruction"]
    assert record.chain.lines[2]["comment"] == "两个都不行, neither will do"
    assert [one.reviewer for one in record.judgements] == ["Ann Müller"] * 3
    assert quantkit(["review", "verify", str(artifact)]) == 0
    assert "whole. 5 lines, not signed; sample drawn by its seed" in capsys.readouterr().out


def test_names_come_only_after_the_vote_and_nothing_is_kept_without_a_degree(artifact: Path, page: Page) -> None:
    with Review(artifact) as review:
        start(page, review.url)
        assert not re.search("original model|quantized model|a check", page.text())
        keep(page, "3")
        assert not re.search("original model|quantized model|a check", page.text())
        told = ""
        for _ in range(2):
            keep(page, "3")
            told += page.text()
        assert re.search("Of the pair before that, .*(answer 1 was the (original|quantized) model's|a check)", told)
        page.press("1", "Enter")
        assert "Press n, m, j or c" in page.text()
        assert "3 of 11" in page.text()
        page.press("Escape", "Enter")
        assert page.evaluate("document.getElementById('detail').hidden")
        assert len(read_record(artifact / FOLDER, open_sample(artifact)).judgements) == 3


def test_rated_to_the_end_and_signed_the_command_ends_with_a_pass(artifact: Path, page: Page) -> None:
    with Review(artifact, "--reviewer", "Bo") as review:
        page.open(review.url)
        page.wait("!document.getElementById('pair').hidden")
        assert "judged by Bo" in page.text()
        for _ in range(11):
            keep(page, "3")
        assert "Accepted by the plan" in page.text()
        assert "0 of 6 answers" in page.text()
        page.press("s")
        page.wait("document.querySelector('.signed').textContent === 'Signed by Bo: accept.'")
        assert review.process.wait(timeout=20) == 0
    assert review_status(artifact).verdict == "pass"


def test_a_critical_judgement_asks_once_more_ends_the_review_and_stands(artifact: Path, page: Page) -> None:
    with Review(artifact) as review:
        start(page, review.url)
        while page.evaluate("document.getElementById('done').hidden"):
            before = page.evaluate("document.getElementById('progress').textContent")
            page.press("1", "c", "Enter")
            page.wait("document.getElementById('told').textContent.includes('cannot be undone')")
            assert page.evaluate("document.getElementById('progress').textContent") == before
            keep(page)
            assert page.evaluate("document.getElementById('undo').disabled")
        assert "Rejected" in page.text()
        assert "A critical regression at p" in page.text()
        assert page.evaluate("document.getElementById('take-back').disabled")
        review.process.send_signal(signal.SIGINT)
        assert review.process.wait(timeout=20) == 10


def test_hostile_text_stays_text(artifact: Path, page: Page) -> None:
    lines = answers(40)
    for line in lines:
        line |= {"candidate": {"text": HOSTILE}, "baseline": {"text": f"{HOSTILE}!"}}
        line |= {"category": HOSTILE, "criteria": HOSTILE, "messages": [{"role": HOSTILE, "content": HOSTILE}]}
    write_answers(artifact, lines)
    with Review(artifact) as review:
        start(page, review.url, HOSTILE.replace("\u202e", ""))
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert page.evaluate("document.title") == "artifact: quantkit review"
        assert page.text().count("<img src=x") >= 4
        assert "[U+202E]gnp" in page.text()
        assert page.problems == []


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1440, 900)])
def test_everything_fits_and_can_be_reached(artifact: Path, page: Page, width: int, height: int) -> None:
    long = "This answer goes on for a while, as answers do; 它也包含中文。" * 12 + "x" * 300
    lines = [
        line | {"candidate": {"text": long}, "baseline": {"text": long[:-200] + " an end"}} for line in answers(40)
    ]
    write_answers(artifact, lines)
    with Review(artifact) as review:
        page.resize(width, height, touch=width < 500)
        start(page, review.url)
        for keys in ((), ("1",), ("Escape", "4")):
            page.press(*keys)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            panel = page.evaluate("document.getElementById('panel').getBoundingClientRect().toJSON()")
            assert panel["bottom"] <= height + 1
            assert panel["height"] < 0.5 * height
            small = page.evaluate(
                "[...document.querySelectorAll('#choices button, #severities button, #keep')]"
                ".filter((b) => b.offsetParent && b.getBoundingClientRect().height < 40).length"
            )
            assert small == 0


def test_a_second_tab_is_told_that_the_pair_is_judged_and_shows_the_next(artifact: Path, page: Page) -> None:
    with Review(artifact) as review, Page(800, 700) as other:
        start(page, review.url)
        start(other, review.url)
        keep(page, "3")
        other.press("3", "Enter")
        other.wait("document.getElementById('told').textContent.includes('judged this pair already')")
        assert "1 of 11" in other.text()


def test_a_button_reached_by_tab_is_pressed_by_enter(artifact: Path, page: Page) -> None:
    with Review(artifact) as review:
        start(page, review.url)
        page.press("1")
        page.wait("!document.getElementById('detail').hidden")
        page.evaluate("document.querySelector('[data-severity=major]').focus()")
        page.press("Enter")
        page.wait("document.querySelector('[data-severity=major]').getAttribute('aria-pressed') === 'true'")
        assert "0 of 11" in page.text()


def test_a_first_rating_takes_four_keys_from_a_link_and_a_name(artifact: Path, page: Page) -> None:
    with Review(artifact) as review:
        start(page, review.url, "X")
        how = page.evaluate("document.getElementById('how').innerText")
        assert "Which answer would you rather send?" in how
        assert page.evaluate("document.getElementById('how').getBoundingClientRect().height") < 40
        keep(page, "1", "m")
        assert "1 of 11" in page.text()
