"""The report as JUnit XML: every rule a test case, so that a build server lists what is broken and what is open.

A broken rule is a failure. One whose interval straddles its limit, and a review that people have not finished, are
errors: the question could not be answered yet, and the build must not go green. What is surely
neither inside its limit nor beyond it, and what this model cannot do in the first place, is skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from quantkit.report.escape import MOST, shorten, shown
from quantkit.report.model import Report

_KINDS = {"fail": "failure", "inconclusive": "error", "unproven": "skipped", "unmeasurable": "skipped"}
_PEOPLE = {"fail": "fail", "pending-review": "inconclusive", "pass": "pass"}


def render_junit(report: Report) -> str:
    """The whole file. Names and messages are made visible first: XML has no way to hold control characters."""
    root = Element("testsuites", name=_text(report.name))
    if report.gate is None:
        _suite(root, "gate", [{"name": "verdict", "outcome": "inconclusive", "text": "not judged: run quantkit gate"}])
        return _written(root)
    sections: dict[str, list[Mapping[str, Any]]] = {}
    for rule in report.gate["verdict"]["rules"]:
        sections.setdefault(str(rule.get("section", "tokens")), []).append(rule)
    for section, rules in sections.items():
        _suite(root, section, rules)
    _suite(root, "people", [_people(report)])
    return _written(root)


def _people(report: Report) -> Mapping[str, Any]:
    """People's word as a rule; where a waiver in the recipe let the figures decide, that is why it is skipped."""
    review, waiver = report.review or {}, (report.gate or {})["verdict"]["waiver"]
    word, reason = review.get("verdict", "pending-review"), review.get("reason", "nobody has looked")
    if word == "pending-review" and waiver is not None:
        return {"name": "review", "outcome": "unproven", "text": f"waived: {waiver}"}
    return {"name": "review", "outcome": _PEOPLE[word], "text": reason}


def _suite(root: Element, name: str, rules: Sequence[Mapping[str, Any]]) -> None:
    kinds = [_KINDS.get(rule["outcome"], "") for rule in rules]
    counts = {f"{kind}s" if kind != "skipped" else kind: str(kinds.count(kind)) for kind in set(_KINDS.values())}
    suite = SubElement(
        root, "testsuite", {"name": _text(name), "tests": str(len(rules)), **dict(sorted(counts.items()))}
    )
    for rule, kind in zip(rules, kinds, strict=True):
        case = SubElement(suite, "testcase", classname=f"quantkit.{_text(name)}", name=_text(rule["name"]))
        text = _text(rule["text"])
        if kind == "skipped":
            SubElement(case, kind, message=text)
        elif kind:
            SubElement(case, kind, message=text, type=_text(rule["outcome"])).text = text
        else:
            SubElement(case, "system-out").text = text


def _written(root: Element) -> str:
    indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'


def _text(value: object) -> str:
    return shown(shorten(str(value), MOST))
