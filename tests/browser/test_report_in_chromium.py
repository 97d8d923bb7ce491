"""The report in a real Chromium, from disk: nothing is asked of the network, nothing runs, nothing overflows."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.report.html import render_html
from tests.browser.chromium import Page
from tests.report_case import HOSTILE, report

pytestmark = pytest.mark.browser
TEXTS = {**HOSTILE, "image": "<img src=https://evil.example/x.png>", "css": "url(https://evil.example/x)"}
_OUTSIDE = """[...document.querySelectorAll('body *')].filter(e => !e.closest('svg')
    && (e.getBoundingClientRect().right > innerWidth + 1 || e.getBoundingClientRect().left < -1)).length"""


@pytest.fixture(scope="module")
def browser() -> Page:
    with Page(1440, 900) as opened:
        yield opened


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("kind", ["plain", *TEXTS])
def test_the_report_opens_from_disk_and_asks_for_nothing_else(
    browser: Page, tmp_path: Path, kind: str, width: int
) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_html(report(TEXTS.get(kind, "ordinary words"))), encoding="utf-8")
    browser.resize(width, 900)
    browser.requests.clear()
    browser.open(path.as_uri())
    assert browser.requests == [path.as_uri()]
    assert browser.problems == []
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate(_OUTSIDE) == 0
    assert browser.evaluate("document.scripts.length + document.images.length + frames.length") == 0


def test_the_first_screen_of_a_phone_tells_verdict_and_figures(browser: Page, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_html(report("ordinary words")), encoding="utf-8")
    browser.resize(390, 844)
    browser.open(path.as_uri())
    bottoms = "[...document.querySelectorAll('.banner h2, .tiles li')].map(e => e.getBoundingClientRect().bottom)"
    assert max(browser.evaluate(bottoms)) <= 844
