"""What every mark is made of: tags with their values escaped, and the frame around them.

Everything in a mark is a number or a word of ours; what is not is escaped (`Markup.format`).
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from quantkit.report.escape import visible


def tag(form: str, *values: object) -> Markup:
    """`form` with values put in, each made visible and escaped unless it is a number or markup already."""
    return Markup(form).format(*(visible(value) if isinstance(value, str) else value for value in values))


def svg(height: int, label: str, parts: Sequence[Markup]) -> Markup:
    """A mark as wide as its place, `height` pixels high; `label` says in words what it shows."""
    frame = '<svg role="img" aria-label="{}" width="100%" height="{}">{}</svg>'
    return tag(frame, label, height, Markup("").join(parts))


def anchor(percent: float) -> str:
    """How a text at that percentage of the width is set, so that it stays inside."""
    return "start" if percent < 8 else "end" if percent > 92 else "middle"
