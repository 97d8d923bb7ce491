"""The page stays offline, strict and readable whatever the model says."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from quantkit.gate.metrics import LADDER
from quantkit.report.escape import shorten, signs, visible
from quantkit.report.html import render_html
from quantkit.report.marks import LogScale
from quantkit.report.model import Bytes, Cell, Memory, Report, Stage
from quantkit.review.plan import Plan

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "attribute": '"><img src=x onerror=alert(1)>',
    "template": "{{ 7 * 7 }}{% raw %}",
    "direction": "evil\u202egnp.exe\u2066\u2069",
    "nul": "a\x00b\x1b[31m\x7f",
    "hidden": "pay\u200bload\ufeff\u2028",
    "entity": "&lt;b&gt; &#x3c;i&#x3e;",
    "style": "</style><style>body{display:none}",
    "long": "A" * 50_000,
    "surrogate": "\ud800",
}


def variant(kl: float) -> dict[str, Any]:
    names = ("median_kl", "p99_kl", "p999_kl", "max_kl", "mean_kl", "ppl_base", "ppl_cand", "ppl_ratio", "rms_dp")
    quantiles = [kl * p for p in LADDER]
    return dict.fromkeys(names, kl) | {
        "mean_kl_se": kl / 10, "same_top1": 0.9, "same_top1_se": 0.01, "ppl_ratio_se": 0.001, "tokens": 5000,
        "kl_quantiles": quantiles, "dp_quantiles": quantiles, "conversations": 12,
    }  # fmt: skip


def rule(name: str, outcome: str, text: str) -> dict[str, Any]:
    shared = {"value": 0.5, "low": 0.4, "high": 0.6, "limit": 0.6, "side": "upper", "share_of": "RTN-INT4"}
    return {"name": name, "outcome": outcome, "text": text, **shared}


def gate(text: str = "fine", outcome: str = "pass", verdict: str = "pending-review") -> dict[str, Any]:
    span = {"value": 0.1, "low": 0.05, "high": 0.2}
    choices = [{"token": text, "probability": 0.7}]
    return {
        "verdict": {
            "verdict": verdict,
            "tokens": outcome,
            "policy": "standard",
            "policy_class": text,
            "coverage": {"backend": "cpu", "isa": "avx2", "compute": "exact", "kv_format": "INT8", "threads": 2},
            "rules": [rule("lost_top1", "pass", "top choices hold"), rule("mean_kl", outcome, f"mean_kl: {text}")],
            "notes": [text],
            "waiver": text,
        },
        "policy": {"confidence": 0.95},
        "data": {
            "files": [text], "disjoint_from": [text], "fingerprint": "f" * 64, "available": 51, "conversations": 12,
            "tokens": 6000, "scored": 5000, "cut": 1,
            "cells": [{"language": text, "category": text, "conversations": 2, "tokens": 400}],
        },
        "variants": {name: variant(kl) for name, kl in
                     (("noise floor", 0.0), ("artifact", 0.1), ("RTN-INT8", 0.01), ("RTN-INT4", 0.4))},
        "domains": [{"kind": "language", "value": text, "conversations": 6, "tokens": 3000, "mean_kl": span,
                     "p99_kl": 0.5, "same_top1": 0.9, "ladder": {"RTN-INT4": span}}],
        "worst": [{"id": text, "language": text, "category": text, "mean_kl": 0.3, "kl": 2.0, "position": 40,
                   "before": text, "token": text, "after": text, "baseline": choices, "artifact": choices}],
    }  # fmt: skip


def report(text: str = "fine", **changes: Any) -> Report:
    made = Report(
        name=text,
        payload_digest="sha256:" + "a" * 64,
        source={"location": text, "fingerprint": text},
        memory=Memory((Bytes("embedding", 200, 200), Bytes("INT8", 800, 400)), "INT8", 512, 256, 700),
        layers=(Cell("layers.0.qkv", 0, "qkv", "W8A16", 8), Cell("lm_head", None, "lm_head", "FP16", 16)),
        gate=gate(text),
        calibration={"samples": 64, "fingerprint": text},
        checks={},
        run={"started": text, "seconds": 10.0, "peak_anon_bytes": 2**30, "environment": {text: text}},
        stages=(Stage(text, 1.5, 2**28, True),),
        commands=(f"quantkit build {text}",),
        version="0.1.0",
    )
    return replace(made, **changes)


class Page(HTMLParser):
    """Every tag with its attributes, and the text a reader sees."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


PLAIN_TAGS = {tag for tag, _ in Page(render_html(report())).tags}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text_stays_text(kind: str) -> None:
    html = render_html(report(HOSTILE[kind]))
    page = Page(html)
    assert {tag for tag, _ in page.tags} == PLAIN_TAGS  # not one element more than an innocent page has
    assert not {"script", "img", "iframe", "link", "object"} & PLAIN_TAGS
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        assert not {"href", "src", "action", "data"} & attributes.keys(), tag
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u202a-\u202e\u2028\u2066-\u2069\ufeff\ud800-\udfff]", html)
    html.encode()  # can be written as UTF-8


def test_hostile_text_is_shown_rather_than_dropped() -> None:
    assert "<script>alert(1)</script>" in Page(render_html(report(HOSTILE["script"]))).text
    assert "evil[U+202E]gnp.exe" in Page(render_html(report(HOSTILE["direction"]))).text
    assert "a␀b␛[31m[U+007F]" in Page(render_html(report(HOSTILE["nul"]))).text
    assert "{{ 7 * 7 }}" in Page(render_html(report(HOSTILE["template"]))).text


def test_very_long_tokens_do_not_blow_up_the_page() -> None:
    long = gate("A" * 50_000)
    html = render_html(report(gate={**gate(), "worst": long["worst"]}))
    assert len(html) < len(render_html(report())) + 5_000
    assert "characters …" in html


def test_the_policy_allows_the_style_sheet_by_hash_and_nothing_else() -> None:
    html = render_html(report())
    style = re.search("<style>(.*?)</style>", html, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style.group(1).encode()).digest()).decode()
    policy = next(a["content"] for t, a in Page(html).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in style.group(1)
    assert "@import" not in style.group(1)


def test_nothing_names_another_host() -> None:
    assert not re.search("https?://", render_html(report()))


def test_failures_come_first() -> None:
    html = render_html(report(gate=gate("it broke", outcome="fail", verdict="fail")))
    banner = html.index("Fail</h2>")
    assert banner < html.index("mean_kl: it broke") < html.index("top choices hold")


def test_a_report_without_a_verdict_says_so() -> None:
    text = Page(render_html(report(gate=None, run=None, stages=()))).text
    assert "Not judged" in text
    assert "run quantkit gate" in text


def test_chinese_text_is_kept_as_it_is() -> None:
    assert "发票总结一下" in Page(render_html(report("发票总结一下"))).text


def test_limits_that_are_shares_are_shown_as_numbers() -> None:
    text = " ".join(Page(render_html(report())).text.split())
    assert "≤ 0.24" in text  # 0.6 × RTN-INT4's mean KL of 0.4
    assert "≥ 94.0%" in text  # lost at most 0.6 × RTN-INT4's 10 %


def test_visible_keeps_ordinary_text_and_names_the_rest() -> None:
    assert visible("Käse 发票\n\tx") == "Käse 发票\n\tx"
    assert visible("\u202e") == "[U+202E]"
    assert visible(None) == ""


def test_signs_show_blanks() -> None:
    assert signs(" a\n") == "␣a⏎"
    assert signs("") == "∅"


def test_shorten_says_how_much_is_missing() -> None:
    assert shorten("x" * 10, 10) == "x" * 10
    assert shorten("a" * 50 + "b" * 50, 20) == "a" * 10 + " [… 80 characters …] " + "b" * 10


def test_a_log_scale_spans_whole_decades_and_holds_what_lies_outside() -> None:
    scale = LogScale.around([0.03, 2.0, 0.0])
    assert (scale.low, scale.high) == (0.01, 10.0)
    assert scale.at(0.0) == scale.at(0.01) == 2.0
    assert scale.at(1e9) == 98.0
    assert scale.at(0.1) == pytest.approx(2 + 96 / 3)
    assert LogScale.around([]).ticks()


def test_calibration_shows_what_it_covers_beside_the_profile() -> None:
    span = {"p50": 10, "p95": 20, "p99": 30, "max": 40}
    stratum = {
        "category": HOSTILE["script"], "language": "en", "samples": 3, "tokens": 1234, "share": 0.75,
        "wanted_share": 0.8, "lengths": span, "prompt": span, "output": None, "wanted_prompt": span,
        "wanted_output": None,
    }  # fmt: skip
    coverage = {
        "loaded": 296, "outside": 0, "duplicates": 1, "near_duplicates": 2, "refused": 0, "samples": 3, "tokens": 1234,
        "truncated_tokens": 0, "pii": {"email": 4}, "profile": True, "lengths": span, "strata": [stratum],
        "missing": [{"category": "sql", "language": "zh", "samples": 0, "wanted": 5}],
    }  # fmt: skip
    made = report(calibration={"samples": 3, "fingerprint": "f", "coverage": coverage})
    shown = " ".join(Page(render_html(made)).text.split())
    assert "2 near duplicates" in shown
    assert "Personal data replaced before tokenizing: 4 email." in shown
    assert "sql zh (0 of 5)" in shown
    assert "75.0%, 80.0%" in shown
    assert "10 / 20 / 30 ≤ 10 / 20 / 30" in shown


def people(text: str = "fine", verdict: str = "pass") -> dict[str, Any]:
    plan = Plan()
    reviewer = {"name": text, "judged": 60, "catches": 7, "catches_failed": 1, "repeats": 4, "repeats_alike": 3,
                "median_seconds": 12.5, "counted": False}  # fmt: skip
    tally = {"rated": 60, "needed": 60, "identical": 9, "others": 3, "others_needed": 3, "defects": 2,
             "others_defects": 1, "rate": 2 / 60, "low": 0.004, "high": 0.115, "alpha": 0.71, "notes": [text],
             "outcomes": {"better": 5, "worse": 7, "tie": 40, "both-bad": 8}, "reviewers": [reviewer]}  # fmt: skip
    return {"verdict": verdict, "reason": text, "plan_text": str(plan), "operating_curve": plan.operating_curve(),
            "tally": tally, "record": {"lines": 80, "sha256": "f" * 64}, "set_aside": 1}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_human_section_shows_rate_reviewers_and_the_plans_odds(kind: str) -> None:
    html = render_html(report(review=people(HOSTILE[kind])))
    page = Page(html)
    shown = " ".join(page.text.split())
    assert "60 of 60 answers are judged, 9 of them word for word the original's" in shown
    assert "3.3% (0.4% to 11.5%, exact 95 % interval)" in shown
    assert "(not counted) 60 12.5 s 1 of 7 3 of 4" in shown
    assert "Krippendorff's α 0.71" in shown
    assert 'aria-label="chance of acceptance: 94% at 1% defects, 10% at 5% defects"' in html
    assert {tag for tag, _ in page.tags} <= PLAIN_TAGS | {"circle", "line", "text", "ul", "li", "bdi", "svg"}


def test_peoples_word_is_in_the_verdict() -> None:
    assert report(gate=gate(verdict="pending-review"), review=people(verdict="pass")).verdict == "pass"
    assert report(gate=gate(verdict="pass"), review=people(verdict="fail")).verdict == "fail"
    assert report(gate=gate(verdict="fail"), review=people(verdict="pass")).verdict == "fail"
    assert report(gate=gate(verdict="pending-review"), review=None).verdict == "pending-review"
    undrawn = people("Nobody has signed") | {"tally": None}
    assert "no answers were drawn" in render_html(report(review=undrawn))


def test_coverage_of_an_artifact_from_an_earlier_release_is_still_shown() -> None:
    span = {"p50": 10, "p95": 20, "max": 40}
    stratum = {"category": "sql", "language": "en", "samples": 3, "tokens": 1234, "lengths": span}
    coverage = {"loaded": 66, "duplicates": 1, "refused": 0, "samples": 3, "tokens": 1234, "truncated_tokens": 0,
                "lengths": span, "languages": {"en": 3}, "categories": {"sql": 3}, "strata": [stratum]}  # fmt: skip
    made = report(calibration={"samples": 3, "fingerprint": "f", "coverage": coverage})
    assert "1,234 tokens, chosen from 66 rows" in " ".join(Page(render_html(made)).text.split())
