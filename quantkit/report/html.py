"""The report as one HTML file: no script, nothing fetched, every outside text escaped."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from quantkit.report import charts, maps, marks
from quantkit.report.escape import shorten, signs, visible
from quantkit.report.figures import SERIES, figure_table
from quantkit.report.figures_of_answers import answer_figures, surely_worse
from quantkit.report.model import Cell, Compared, Report
from quantkit.report.tiles import tiles
from quantkit.review.words import Segments, differing

TITLES = {
    "pass": "Pass",
    "fail": "Fail",
    "inconclusive": "Inconclusive",
    "pending-review": "Pending review",
    "not judged": "Not judged",
}
MEANINGS = {
    "pass": "No rule is broken, none is undecided, and people accepted the answers or their look was waived.",
    "fail": "At least one rule is broken with its whole interval, or people rejected the answers.",
    "inconclusive": "No rule is surely broken, but at least one interval straddles its limit: more data would decide.",
    "pending-review": "No rule is broken. People have yet to look at real answers.",
    "not judged": "There is no gate evidence about this payload: run quantkit gate.",
}
SECTIONS = {"tokens": "Tokens", "answers": "Answers", "structure": "What surrounds the weights", "audit": "Audit"}
"""What rules are about, in words."""
TEXT_SHOWN = 1600
"""Characters of an answer shown beside the other model's."""

_PAGE = Path(__file__).parent / "page"
_ORDER = {"fail": 0, "inconclusive": 1, "unproven": 2, "unmeasurable": 3, "pass": 4}


def render_html(report: Report) -> str:
    """The whole page. Its policy (CSP) allows one style sheet, by hash, and nothing else: no script, no request."""
    style = (_PAGE / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    gate = report.gate
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            report=report,
            title=TITLES.get(report.verdict, report.verdict),
            meaning=MEANINGS.get(report.verdict, ""),
            policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
            style=Markup(style),
            tiles=tiles(report),
            look=next((command for command in report.commands if command.startswith("quantkit review")), ""),
            precision=maps.precision_maps(report.layers),
            errors=maps.error_maps(report.layers),
            raised=_raised((report.gptq or {}).get("damping", {})),
            schemes=_schemes(report.layers),
            head=next((cell.scheme for cell in report.layers if cell.layer is None), None),
            gate=gate,
            answers=(gate or {}).get("answers"),
            compared=[(one, *_differing(one)) for one in report.answers],
            **(_judged(gate) if gate is not None else {}),
        )
    )


def _judged(gate: Mapping[str, Any]) -> dict[str, Any]:
    ladder = [(name, series) for name, series in SERIES.items() if name in gate["variants"]]
    spans = [span for row in gate["domains"] for span in (row["mean_kl"], *row["ladder"].values())]
    rules = sorted(gate["verdict"]["rules"], key=lambda rule: _ORDER[rule["outcome"]])
    return {
        "rules": rules,
        "worse": surely_worse(gate),
        "rule_groups": _grouped(rules),
        "counts": {name: sum(rule["outcome"] == name for rule in rules) for name in _ORDER},
        "figures": figure_table(gate),
        "told": answer_figures(gate["answers"]) if gate.get("answers") else None,
        "ladder": ladder,
        "ladder_scale": marks.LogScale.around([v for n, _ in ladder for v in gate["variants"][n]["kl_quantiles"][1:]]),
        "domain_scale": marks.LogScale.around([span[side] for span in spans for side in ("low", "high")]),
    }


def _grouped(rules: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The rules by what they are about, the part with the worst outcome first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for rule in rules:
        groups.setdefault(str(rule.get("section", "tokens")), []).append(rule)
    return [(SECTIONS.get(name, name), found) for name, found in groups.items()]


def _differing(one: Compared) -> tuple[Segments, Segments]:
    return differing(shorten(one.baseline, TEXT_SHOWN), shorten(one.candidate, TEXT_SHOWN))


def _raised(damping: Mapping[str, float | None]) -> list[str]:
    """Groups whose Hessian needed more damping than the least."""
    least = min((value for value in damping.values() if value is not None), default=0.0)
    return [group for group, value in damping.items() if value is not None and value > least]


def _unserved(missing: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    """(reason, kinds of nodes) that a target has no kernel for."""
    kinds: dict[str, list[str]] = {}
    for nodes in missing.values():
        for node, reason in nodes.items():
            kinds.setdefault(reason, []).append(node.rpartition(".")[2])
    return [(reason, ", ".join(dict.fromkeys(found))) for reason, found in kinds.items()]


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, finalize=visible, undefined=StrictUndefined, trim_blocks=True
    )
    made.filters |= {
        "capitalize_first": lambda text: text[:1].upper() + text[1:],
        "bytes": lambda n: f"{n / 1e6:,.1f} MB" if n >= 1_000_000 else f"{n / 1e3:,.1f} kB",
        "grouped": lambda n: f"{n:,}",
        "figure": lambda x, digits=4: f"{x:.{digits}g}",
        "mebi": lambda n: f"{n / 2**20:,.0f} MiB",
        "percent": lambda x, digits=1: f"{x:.{digits}%}",
        "points": lambda x: f"{100 * x:+.1f}".replace("-", "−"),
        "shorten": shorten,
        "signs": signs,
    }
    made.globals |= {
        name: getattr(marks, name) for name in ("axis", "change", "forest", "quantiles", "share", "stacked", "swatch")
    }
    made.globals |= {
        name: getattr(charts, name) for name in ("acceptance_chart", "length_chart", "pareto_chart", "same_chart")
    }
    made.globals["unserved"] = _unserved
    return made


def _schemes(cells: Sequence[Cell]) -> str:
    counts: dict[str, int] = {}
    heads = [cell.scheme for cell in cells if cell.layer is None]
    for cell in cells:
        if cell.layer is not None:
            counts[cell.scheme] = counts.get(cell.scheme, 0) + 1
    said = ", ".join(f"{name} × {count}" for name, count in sorted(counts.items()))
    return f"{said}; head {heads[0]}" if heads else said
