"""A report with one text in every place that text from outside can reach, and a page's tags and text."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from quantkit.gate.metrics import LADDER
from quantkit.report.model import Bytes, Cell, Compared, Memory, Report, Stage
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
    shared = {"value": 0.5, "low": 0.4, "high": 0.6, "limit": 0.6, "side": "upper", "share_of": "RTN-INT4",
              "section": "tokens"}  # fmt: skip
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
        "answers": answers(text),
        "audit": {"matrices": [{"tensor": text, "rms": 0.3}], "plain": 9, "changed": [], "cache": [{"name": text}]},
        "worst": [{"id": text, "language": text, "category": text, "mean_kl": 0.3, "kl": 2.0, "position": 40,
                   "before": text, "token": text, "after": text, "baseline": choices, "artifact": choices}],
    }  # fmt: skip


def answers(text: str = "fine") -> dict[str, Any]:
    span = {"change": -0.25, "low": -0.5, "high": 0.1, "losses": 1, "gains": 0, "baseline": 3, "candidate": 2}
    row = {"prompts": 4, "checked": 4, "same_text": 1, "measurable": True, **span}
    none = {**row, "measurable": False, "baseline": 0}
    score = {"what": text, "n": 4, "measurable": True, "mcnemar_p": 1.0, "lost": [text], "gained": [], **span}
    return {
        "prompts": 4,
        "left_out": [text],
        "divergence_is": text,
        "scores": {"task": score, "json": {**score, "measurable": False}, "refusal": {"what": text, "n": 0}},
        "rows": [
            {"category": category, "language": language, **found}
            for category, language, found in
            (("*", "*", row), ("*", text, row), (text, "*", row), (text, text, row), ("sql", text, none))
        ],
        "metrics": {text: {text: [1.0, 2.0]}},
        "first_divergences": [None, 0, 7, 7],
        "lengths": [[3, 3], [9, 12], [40, 8], [40, 40]],
    }  # fmt: skip


def compared(text: str = "fine", **changes: Any) -> Compared:
    made = Compared(
        id=text, category=text, language=text, critical=True, prompt=(("user", text),), criteria=text, baseline=text,
        candidate=f"it is {text}, or so", tokens=(4, 9), first_divergence=0, divergence=0.5, failed=(text,), lost=True,
    )  # fmt: skip
    return replace(made, **changes)


def review(text: str = "fine", verdict: str = "pending-review") -> dict[str, Any]:
    plan = Plan()
    reviewer = {"name": text, "judged": 60, "catches": 7, "catches_failed": 1, "repeats": 4, "repeats_alike": 3,
                "median_seconds": 12.5, "counted": False}  # fmt: skip
    tally = {"rated": 60, "needed": 60, "identical": 9, "others": 3, "others_needed": 3, "defects": 2,
             "others_defects": 1, "rate": 2 / 60, "low": 0.004, "high": 0.115, "alpha": 0.71, "notes": [text],
             "outcomes": {"better": 5, "worse": 7, "tie": 40, "both-bad": 8}, "reviewers": [reviewer]}  # fmt: skip
    return {"verdict": verdict, "reason": text, "plan_text": str(plan), "operating_curve": plan.operating_curve(),
            "tally": tally, "record": {"lines": 80, "sha256": "f" * 64}, "set_aside": 1}  # fmt: skip


def search(text: str = "fine") -> dict[str, Any]:
    options = [
        {"scheme": "W8A16", "bits": 8.0, "sensitivity": 0.001},
        {"scheme": text, "bits": 4.0, "sensitivity": 0.1},
    ]
    return {
        "method": "gradient", "budget_bits": 6.0, "average_bits": 6.0, "bytes": 600, "sensitivity": 0.02,
        "groups": [{"group": text, "weights": 800, "chosen": "W8A16", "options": options}],
        "frontier": [[4.0, 0.1], [6.0, 0.02], [8.0, 0.001], [16.0, 0.0]],
        "checked": [{"group": text, "scheme": text, "predicted": 0.1, "measured": 0.2}],
    }  # fmt: skip


def kernels(text: str = "fine") -> dict[str, Any]:
    one = {"name": text, "kernel": text, "bucket_classes": [text], "registers": 64, "spill_bytes": 0,
           "shared_bytes": 4096, "num_warps": 4, "cubin_bytes": 9000, "versions": {}}  # fmt: skip
    return {"buckets": {"decode": [1, 2], "prefill": [128], "planned_from": text},
            "targets": {text: {"kernels": [one], "missing": {"decode": {"layers.0.qkv": text}}}}}  # fmt: skip


def report(text: str = "fine", **changes: Any) -> Report:
    made = Report(
        name=text,
        payload_digest="sha256:" + "a" * 64,
        source={"location": text, "fingerprint": text},
        memory=Memory((Bytes("embedding", 200, 200), Bytes("INT8", 800, 400)), "INT8", 512, 256, 700),
        layers=(Cell("layers.0.qkv", 0, "qkv", "W8A16", 8, 0.1, 0.4), Cell("lm_head", None, "lm_head", "FP16", 16)),
        gate=gate(text),
        calibration={"samples": 64, "fingerprint": text},
        checks={},
        run={"started": text, "seconds": 10.0, "peak_anon_bytes": 2**30, "environment": {text: text}},
        stages=(Stage(text, 1.5, 2**28, True),),
        commands=(f"quantkit build {text}",),
        version="0.1.0",
        review=review(text),
        answers=(compared(text),),
        search=search(text),
        gptq={"fallbacks": [text], "damping": {text: 0.01}},
        kernels=kernels(text),
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
