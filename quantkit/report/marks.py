"""Inline SVG marks. Horizontal positions are percentages, so a mark fills whatever width it is given and text beside
it keeps its size; colours come from classes, so that they follow dark mode and print.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from quantkit.gate.metrics import LADDER
from quantkit.report.svg import anchor, svg, tag

LEAST = 1e-6
"""Smallest KL that a scale shows."""
MOST_TICKS = 5


@dataclass(frozen=True)
class LogScale:
    """Maps positive values to percent of the width; smaller and larger ones land on its ends."""

    low: float
    high: float

    @staticmethod
    def around(values: Sequence[float]) -> LogScale:
        """Whole decades around the `values` above LEAST."""
        shown = [v for v in values if v > LEAST] or [LEAST, 10 * LEAST]
        low, high = 10.0 ** math.floor(math.log10(min(shown))), 10.0 ** math.ceil(math.log10(max(shown)))
        return LogScale(low, high if high > low else low * 10)

    def at(self, value: float) -> float:
        """Percent, 2 to 98."""
        share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return 2 + 96 * min(1.0, share)

    def ticks(self) -> list[float]:
        """The decades, at most MOST_TICKS of them."""
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        return [10.0**n for n in range(first, last + 1, math.ceil((last - first + 1) / MOST_TICKS))]


def forest(spans: Sequence[tuple[Mapping[str, float], str]], scale: LogScale) -> Markup:
    """Estimates (`value`, `low`, `high`) with the series each belongs to, one below the other."""
    height = 6 + 10 * len(spans)
    parts = [_grid(scale, height)]
    for row, (span, series) in enumerate(spans):
        y = 8 + 10 * row
        parts.append(_line(scale.at(span["low"]), scale.at(span["high"]), y, f"s-{series} w3"))
        parts.append(tag('<circle class="f-{}" cx="{:.2f}%" cy="{}" r="3.5"/>', series, scale.at(span["value"]), y))
    return svg(height, "; ".join(f"{s} {m['value']:.3g}, {m['low']:.3g} to {m['high']:.3g}" for m, s in spans), parts)


def change(row: Mapping[str, Any], reach: float) -> Markup:
    """A change of a share (`change`, `low`, `high`), zero in the middle, `reach` to both sides."""

    def at(value: float) -> float:
        return 50 + 46 * max(-1.0, min(1.0, value / reach))

    colour = "fail" if row["high"] < 0 else "artifact"
    parts = [
        tag('<line class="zero" x1="50%" x2="50%" y1="0" y2="16"/>'),
        _line(at(row["low"]), at(row["high"]), 8, f"s-{colour} w3"),
        tag('<circle class="f-{}" cx="{:.2f}%" cy="8" r="3.5"/>', colour, at(row["change"])),
    ]
    return svg(16, f"{row['change']:+.1%}, {row['low']:+.1%} to {row['high']:+.1%}", parts)


def quantiles(values: Sequence[float], series: str, scale: LogScale) -> Markup:
    """KL at the probabilities LADDER: thin 5 to 95 %, thick 25 to 75 %, ring at 50 %, ticks at 99 and 99.9 %."""
    at = {p: scale.at(v) for p, v in zip(LADDER, values, strict=True)}
    parts = [
        _grid(scale, 24),
        _line(at[0.05], at[0.95], 12, f"s-{series} w1"),
        _line(at[0.25], at[0.75], 12, f"s-{series} w7"),
        tag('<circle class="dot s-{}" cx="{:.2f}%" cy="12" r="4.5"/>', series, at[0.5]),
    ]
    for p in (0.99, 0.999):
        parts.append(tag('<line class="s-{} w2" x1="{:.2f}%" x2="{:.2f}%" y1="5" y2="19"/>', series, at[p], at[p]))
    return svg(24, ", ".join(f"{100 * p:g} % below {v:.2g}" for p, v in zip(LADDER, values, strict=True)), parts)


def axis(scale: LogScale) -> Markup:
    """The scale's decades in words, to stand under marks that use it."""
    tick = '<text class="tick" x="{:.2f}%" y="12" text-anchor="{}">{:g}</text>'
    return svg(16, "logarithmic scale", [tag(tick, scale.at(v), anchor(scale.at(v)), v) for v in scale.ticks()])


def stacked(amounts: Sequence[int], total: int) -> Markup:
    """A bar of segments, coloured by their place; `total` fills the width."""
    x, parts = 0.0, []
    for i, amount in enumerate(amounts):
        width = 100 * amount / total
        parts.append(tag('<rect class="b-{}" x="{:.3f}%" y="0" width="{:.3f}%" height="22"/>', i, x, width))
        x += width
    return svg(22, f"{sum(amounts):,} of {total:,} bytes", parts)


def swatch(place: int) -> Markup:
    """The colour of a segment of `stacked`."""
    box = '<svg width="12" height="12" aria-hidden="true"><rect class="b-{}" width="12" height="12"/></svg>'
    return tag(box, place)


def share(part: float, series: str) -> Markup:
    """A small bar for a probability."""
    return svg(
        8, f"{part:.1%}", [tag('<rect class="f-{}" x="0" y="0" width="{:.1f}%" height="8"/>', series, 100 * part)]
    )


def _grid(scale: LogScale, height: int) -> Markup:
    line = '<line class="grid" x1="{:.2f}%" x2="{:.2f}%" y1="0" y2="{}"/>'
    return Markup("").join(tag(line, scale.at(v), scale.at(v), height) for v in scale.ticks())


def _line(x1: float, x2: float, y: float, classes: str) -> Markup:
    return tag('<line class="{}" x1="{:.2f}%" x2="{:.2f}%" y1="{}" y2="{}"/>', classes, x1, x2, y, y)
