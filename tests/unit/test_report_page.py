"""The page stays offline, strict and readable whatever the model says."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from quantkit.report.escape import shorten, signs, visible
from quantkit.report.figures import figure_table
from quantkit.report.html import render_html
from quantkit.report.marks import LogScale
from tests.report_case import HOSTILE, Page, answers, compared, gate, report, review, rule

PLAIN_TAGS = {tag for tag, _ in Page(render_html(report())).tags}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text_stays_text(kind: str) -> None:
    html = render_html(report(HOSTILE[kind]))
    page = Page(html)
    assert {tag for tag, _ in page.tags} == PLAIN_TAGS  # not one element more than an innocent page has
    assert not {"script", "img", "iframe", "link", "object"} & PLAIN_TAGS
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        assert not {"src", "action", "data"} & attributes.keys(), tag
        assert str(attributes.get("href", "#")).startswith("#"), tag  # places on the page itself
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u202a-\u202e\u2028\u2066-\u2069\ufeff\ud800-\udfff]", html)
    html.encode()  # can be written as UTF-8


def test_hostile_text_is_shown_rather_than_dropped() -> None:
    assert "<script>alert(1)</script>" in Page(render_html(report(HOSTILE["script"]))).text
    assert "evil[U+202E]gnp.exe" in Page(render_html(report(HOSTILE["direction"]))).text
    assert "a␀b␛[31m[U+007F]" in Page(render_html(report(HOSTILE["nul"]))).text
    assert "{{ 7 * 7 }}" in Page(render_html(report(HOSTILE["template"]))).text


def test_very_long_tokens_do_not_blow_up_the_page() -> None:
    long = gate("A" * 50_000)
    html = render_html(report(gate={**gate(), "worst": long["worst"]}, answers=(compared("A" * 50_000),)))
    assert len(html) < len(render_html(report())) + 14_000
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


def test_what_people_reject_is_the_first_thing_said() -> None:
    html = render_html(report(review=review("a critical regression at p7", verdict="fail"), gate=gate()))
    assert html.index("Fail</h2>") < html.index("a critical regression at p7") < html.index("of 2 rules hold")


def test_a_banner_where_nothing_broke_counts_the_rules_instead_of_listing_them() -> None:
    text = " ".join(Page(render_html(report())).text.split())
    banner = text[: text.index("The artifact, as served")]
    assert "2 of 2 rules hold" in banner
    assert "top choices hold" not in banner


def test_a_loss_that_chance_does_not_explain_is_worth_a_look_though_it_does_not_fail() -> None:
    judged = gate()
    judged["answers"]["scores"]["loop_free"] = {**judged["answers"]["scores"]["task"], "mcnemar_p": 0.01}
    judged["verdict"]["rules"] += [
        rule("loop_free", "unproven", "ten answers run in a loop"), rule("task", "unproven", "may be nothing"),
    ]  # fmt: skip
    text = " ".join(Page(render_html(report(gate=judged))).text.split())
    banner = text[: text.index("The artifact, as served")]
    assert "Worth a look: ten answers run in a loop" in banner
    assert "may be nothing" not in banner


def test_evidence_of_an_earlier_release_is_shown_without_the_parts_it_lacks() -> None:
    old = {key: value for key, value in gate().items() if key not in ("answers", "audit")}
    for one in old["verdict"]["rules"]:
        del one["section"]
    made = report(gate=old, review=None, answers=(), search=None, gptq=None, kernels=None)
    page = Page(render_html(made))
    assert "Pending review" in page.text
    for absent in ("Worst answers", "By kind and language", "Kernels and buckets", "other budgets"):
        assert absent not in page.text


def test_probabilities_that_an_earlier_release_recorded_wrongly_are_not_shown() -> None:
    old = gate()
    old["worst"][0]["baseline"] = [{"token": "odd", "probability": 6177.967}, {"token": "even", "probability": 0.9}]
    text = Page(render_html(report(gate=old))).text
    assert "recorded wrongly by an earlier release" in text
    assert "617796.7%" not in text
    assert "70.0%" in text  # the artifact's are


def test_flips_are_counted_both_ways() -> None:
    text = " ".join(Page(render_html(report())).text.split())
    assert "right before 2 1 wrong before 0 1" in text  # of 4: both 2, lost 1, gained 0, neither 1


def test_a_row_that_cannot_be_measured_says_so_and_has_no_interval() -> None:
    text = " ".join(Page(render_html(report())).text.split())
    assert "not measurable: the unquantized model has 3 of 4 right" in text  # a score, in the table
    assert "Not measurable on this model, right before → now: sql fine 0 → 2 of 4." in text


def test_rows_with_the_greatest_loss_stand_first() -> None:
    told = answers()
    cell = {**told["rows"][3], "language": "en"}
    told["rows"] = [{**cell, "category": "sales", "change": 0.2}, {**cell, "category": "rag", "change": -0.4}]
    text = Page(render_html(report(gate=gate() | {"answers": told}))).text
    assert text.index("rag") < text.index("sales")


def test_words_that_only_one_answer_has_are_marked() -> None:
    html = render_html(report(answers=(compared(baseline="the lamp is red", candidate="the lamp is blue"),)))
    assert "the lamp is <mark>red</mark>" in html
    assert "the lamp is <mark>blue</mark>" in html


def test_chinese_answers_are_marked_by_character() -> None:
    html = render_html(report(answers=(compared(baseline="明天下午三点", candidate="明天下午四点"),)))
    assert "明天下午<mark>三</mark>点" in html


def test_a_report_without_a_verdict_says_so() -> None:
    text = Page(render_html(report(gate=None, run=None, stages=(), answers=()))).text
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


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_human_section_shows_rate_reviewers_and_the_plans_odds(kind: str) -> None:
    html = render_html(report(review=review(HOSTILE[kind])))
    page = Page(html)
    shown = " ".join(page.text.split())
    assert "60 of 60 answers are judged, 9 of them word for word the original's" in shown
    assert "3.3% (0.4% to 11.5%, exact 95 % interval)" in shown
    assert "(not counted) 60 12.5 s 1 of 7 3 of 4" in shown
    assert "Krippendorff's α 0.71" in shown
    assert 'aria-label="chance of acceptance: 94% at 1% defects, 10% at 5% defects"' in html
    assert {tag for tag, _ in page.tags} <= PLAIN_TAGS | {"circle", "line", "text", "ul", "li", "bdi", "svg"}


def test_peoples_word_is_in_the_verdict() -> None:
    assert report(gate=gate(verdict="pending-review"), review=review(verdict="pass")).verdict == "pass"
    assert report(gate=gate(verdict="pass"), review=review(verdict="fail")).verdict == "fail"
    assert report(gate=gate(verdict="fail"), review=review(verdict="pass")).verdict == "fail"
    assert report(gate=gate(verdict="pending-review"), review=None).verdict == "pending-review"
    undrawn = review("Nobody has signed") | {"tally": None}
    assert "no answers were drawn" in render_html(report(review=undrawn))


def test_coverage_of_an_artifact_from_an_earlier_release_is_still_shown() -> None:
    span = {"p50": 10, "p95": 20, "max": 40}
    stratum = {"category": "sql", "language": "en", "samples": 3, "tokens": 1234, "lengths": span}
    coverage = {"loaded": 66, "duplicates": 1, "refused": 0, "samples": 3, "tokens": 1234, "truncated_tokens": 0,
                "lengths": span, "languages": {"en": 3}, "categories": {"sql": 3}, "strata": [stratum]}  # fmt: skip
    made = report(calibration={"samples": 3, "fingerprint": "f", "coverage": coverage})
    assert "1,234 tokens, chosen from 66 rows" in " ".join(Page(render_html(made)).text.split())


def test_identical_answers_do_not_count_as_looked_at() -> None:
    shown = " ".join(Page(render_html(report(review=review("fine")))).text.split())
    assert "51 of 51" in shown
    assert "2 defects; 9 more pairs are identical" in shown


def test_perplexities_stand_beside_each_other_on_the_same_tokens_only() -> None:
    found = gate()
    found["variants"]["RTN-INT8"] |= {"tokens": 1000, "ppl_cand": 27.65}
    row = next(row for row in figure_table(found).rows if row.label == "perplexity")
    assert "27.65" not in [cell.value for cell in row.cells]
    assert len(row.cells) == len(figure_table(found).columns)
