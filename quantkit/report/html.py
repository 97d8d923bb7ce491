"""The report as one HTML file: no script, nothing fetched, every outside text escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from quantkit.report import marks
from quantkit.report.escape import shorten, signs, visible
from quantkit.report.figures import SERIES, figure_table
from quantkit.report.model import Cell, Report

TITLES = {
    "pass": "Pass",
    "fail": "Fail",
    "inconclusive": "Inconclusive",
    "pending-review": "Pending review",
    "not judged": "Not judged",
}
MEANINGS = {
    "pass": "Every rule holds with its whole interval, and people accepted the answers or their look was waived.",
    "fail": "At least one rule is broken with its whole interval, or people rejected the answers.",
    "inconclusive": "No rule is surely broken, but at least one interval straddles its limit: more data would decide.",
    "pending-review": "Every token rule holds. People have yet to look at real answers.",
    "not judged": "There is no gate evidence about this payload: run quantkit gate.",
}
BAND = 12
"""Layers in one row of the precision map."""

_HERE = Path(__file__).parent
_ORDER = {"fail": 0, "inconclusive": 1, "unproven": 2, "unmeasurable": 3, "pass": 4}


def render_html(report: Report) -> str:
    """The whole page. Its policy (CSP) allows one style sheet, by hash, and nothing else: no script, no request."""
    style = (_HERE / "style.css").read_text(encoding="utf-8")
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
            bands=_bands(report.layers),
            schemes=_schemes(report.layers),
            head=next((cell.scheme for cell in report.layers if cell.layer is None), None),
            gate=gate,
            **(_judged(gate) if gate is not None else {}),
        )
    )


def _judged(gate: Mapping[str, Any]) -> dict[str, Any]:
    ladder = [(name, series) for name, series in SERIES.items() if name in gate["variants"]]
    spans = [span for row in gate["domains"] for span in (row["mean_kl"], *row["ladder"].values())]
    return {
        "rules": sorted(gate["verdict"]["rules"], key=lambda rule: _ORDER[rule["outcome"]]),
        "figures": figure_table(gate),
        "ladder": ladder,
        "ladder_scale": marks.LogScale.around([v for n, _ in ladder for v in gate["variants"][n]["kl_quantiles"][1:]]),
        "domain_scale": marks.LogScale.around([span[side] for span in spans for side in ("low", "high")]),
    }


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, finalize=visible, undefined=StrictUndefined, trim_blocks=True
    )
    made.filters |= {
        "capitalize_first": lambda text: text[:1].upper() + text[1:],
        "bytes": lambda n: f"{n / 1e6:,.1f} MB" if n >= 1_000_000 else f"{n / 1e3:,.1f} kB",
        "grouped": lambda n: f"{n:,}",
        "figure": lambda x, digits=4: f"{x:.{digits}g}",
        "mebi": lambda n: f"{n / 2**20:,.0f} MiB",
        "percent": lambda x, digits=1: f"{x:.{digits}%}",
        "shorten": shorten,
        "signs": signs,
    }
    made.globals |= {
        name: getattr(marks, name) for name in ("axis", "curve", "forest", "quantiles", "share", "stacked", "swatch")
    }
    return made


def _bands(cells: Sequence[Cell]) -> list[Markup]:
    """The precision map in rows of BAND layers."""
    kinds = list(dict.fromkeys(cell.kind for cell in cells if cell.layer is not None))
    bits = {(cell.kind, cell.layer): cell.bits for cell in cells}
    layers = sorted({cell.layer for cell in cells if cell.layer is not None})
    bands = [layers[start : start + BAND] for start in range(0, len(layers), BAND)]
    return [
        marks.precision_map(kinds, band, [[bits.get((kind, layer)) for layer in band] for kind in kinds])
        for band in bands
    ]


def _schemes(cells: Sequence[Cell]) -> str:
    counts: dict[str, int] = {}
    for cell in cells:
        counts[cell.scheme] = counts.get(cell.scheme, 0) + 1
    return ", ".join(f"{name} × {count}" for name, count in sorted(counts.items()))
