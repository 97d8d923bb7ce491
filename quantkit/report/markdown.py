"""The report in few lines of Markdown, for the comment under a change: verdict, what decided it, the main figures.

Text from outside is escaped: it cannot format, link, mention anybody or hold HTML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quantkit.gate.rule import tally
from quantkit.report.escape import shorten, shown
from quantkit.report.figures import figure_table
from quantkit.report.figures_of_answers import worth_a_look
from quantkit.report.html import MEANINGS, TITLES
from quantkit.report.model import Report
from quantkit.report.tiles import tiles
from quantkit.runtime.admission import described

RULES = 12
"""Rules listed; what is beyond is counted."""
TEXT = 400
"""Characters of one text from outside."""
_SIGNS = {"fail": "✗", "inconclusive": "?"}
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$])")
_LINKS = re.compile(r"(:)(?=//)|(?<=\bwww)(\.)", re.IGNORECASE)
_FIGURES = ("mean KL", "P99 KL", "same top-1", "perplexity ratio")


def render_markdown(report: Report) -> str:
    """The whole comment."""
    parts = [f"### {escaped(report.name)}: {TITLES.get(report.verdict, escaped(report.verdict))}"]
    parts.append(MEANINGS.get(report.verdict, ""))
    if report.gate is not None:
        parts.append("\n".join(_deciding(report, report.gate)))
    parts.append(" · ".join(f"{tile.label} **{tile.value}** ({tile.beside})" for tile in tiles(report)))
    if report.gate is not None:
        parts.append("\n".join(_table(report.gate)))
    again = "; ".join(f"`{_code(command)}`" for command in report.commands[:2])
    parts.append(f"Payload `{_code(report.payload_digest)}`. Again: {again}")
    return "\n\n".join(part for part in parts if part) + "\n"


def escaped(value: object) -> str:
    """Text on one line in which nothing is markup, a link or a mention."""
    line = " ".join(shown(shorten(str(value), TEXT)).split())
    line = _LINKS.sub(lambda match: f"\\{match.group()}", _SPECIAL.sub(r"\\\1", line))
    return line.replace("@", "@&#8203;")


def _deciding(report: Report, gate: Mapping[str, Any]) -> list[str]:
    rules = [rule for rule in gate["verdict"]["rules"] if rule["outcome"] in _SIGNS]
    rules.sort(key=lambda rule: list(_SIGNS).index(rule["outcome"]))
    lines = [f"- {_SIGNS[rule['outcome']]} {rule['outcome']}: {escaped(rule['text'])}" for rule in rules[:RULES]]
    if len(rules) > RULES:
        lines.append(f"- {len(rules) - RULES} more")
    lines.append(f"- {tally(rule['outcome'] for rule in gate['verdict']['rules'])}")
    lines += [f"- worth a look: {escaped(text)}" for text in worth_a_look(gate)[:RULES]]
    lines.append(f"- covers {escaped(described(gate['verdict']['coverage']))}")
    if report.review:
        lines.append(f"- people: {escaped(report.review['reason'])}")
    if gate["verdict"]["waiver"] is not None:
        lines.append(f"- review waived: {escaped(gate['verdict']['waiver'])}")
    return lines


def _table(gate: Mapping[str, Any]) -> list[str]:
    table = figure_table(gate)
    lines = [f"| | {' | '.join(table.columns)} |", f"|---|{'---:|' * len(table.columns)}"]
    for row in table.rows:
        if row.label in _FIGURES:
            lines.append(f"| {row.label} | {' | '.join(cell.value for cell in row.cells)} |")
    return lines


def _code(text: str) -> str:
    return shown(shorten(text, TEXT)).replace("`", "'").replace("\n", " ")
