"""Inline SVG marks. Horizontal positions are percentages, so a mark fills whatever width it is given and text beside
it keeps its size; colours come from classes, so that they follow dark mode and print.

Everything in a mark is a number or a word of ours; what is not is escaped (`Markup.format`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from quantkit.gate.metrics import LADDER

LEAST = 1e-6
"""Smallest KL that a scale shows."""
MOST_TICKS = 7
CELL = 20
"""Pixels of one cell of the precision map."""


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
        parts.append(_tag('<circle class="f-{}" cx="{:.2f}%" cy="{}" r="3.5"/>', series, scale.at(span["value"]), y))
    return _svg(height, "; ".join(f"{s} {m['value']:.3g}, {m['low']:.3g} to {m['high']:.3g}" for m, s in spans), parts)


def quantiles(values: Sequence[float], series: str, scale: LogScale) -> Markup:
    """KL at the probabilities LADDER: thin 5 to 95 %, thick 25 to 75 %, ring at 50 %, ticks at 99 and 99.9 %."""
    at = {p: scale.at(v) for p, v in zip(LADDER, values, strict=True)}
    parts = [
        _grid(scale, 24),
        _line(at[0.05], at[0.95], 12, f"s-{series} w1"),
        _line(at[0.25], at[0.75], 12, f"s-{series} w7"),
        _tag('<circle class="dot s-{}" cx="{:.2f}%" cy="12" r="4.5"/>', series, at[0.5]),
    ]
    for p in (0.99, 0.999):
        parts.append(_tag('<line class="s-{} w2" x1="{:.2f}%" x2="{:.2f}%" y1="5" y2="19"/>', series, at[p], at[p]))
    return _svg(24, ", ".join(f"{100 * p:g} % below {v:.2g}" for p, v in zip(LADDER, values, strict=True)), parts)


def axis(scale: LogScale) -> Markup:
    """The scale's decades in words, to stand under marks that use it."""
    tick = '<text class="tick" x="{:.2f}%" y="12" text-anchor="{}">{:g}</text>'
    return _svg(16, "logarithmic scale", [_tag(tick, scale.at(v), _anchor(scale.at(v)), v) for v in scale.ticks()])


def stacked(amounts: Sequence[int], total: int) -> Markup:
    """A bar of segments, coloured by their place; `total` fills the width."""
    x, parts = 0.0, []
    for i, amount in enumerate(amounts):
        width = 100 * amount / total
        parts.append(_tag('<rect class="b-{}" x="{:.3f}%" y="0" width="{:.3f}%" height="22"/>', i, x, width))
        x += width
    return _svg(22, f"{sum(amounts):,} of {total:,} bytes", parts)


def curve(points: Sequence[Sequence[float]], marked: Sequence[float]) -> Markup:
    """An operating curve: chance of acceptance (0 to 1, upwards) over the defect rate, which starts at 0.

    marked: rates to drop a line at, each told with the chance there (of the nearest point).
    """
    height, last = 134, points[-1][0]

    def x(rate: float) -> float:
        return 1 + 98 * rate / last

    def y(chance: float) -> float:
        return 18 + 90 * (1 - chance)

    parts = [_tag('<line class="grid" x1="0" x2="100%" y1="{}" y2="{}"/>', y(v), y(v)) for v in (0.0, 0.5, 1.0)]
    label = '<text class="tick" x="100%" y="{}" text-anchor="end">{:.0%}</text>'
    parts += [_tag(label, y(v) - 4, v) for v in (0.5, 1.0)]
    segment = '<line class="s-artifact w2" x1="{:.2f}%" x2="{:.2f}%" y1="{:.1f}" y2="{:.1f}"/>'
    parts += [_tag(segment, x(a), x(b), y(p), y(q)) for (a, p), (b, q) in itertools.pairwise(points)]
    told = []
    for rate in marked:
        chance = min(points, key=lambda point: abs(point[0] - rate))[1]
        parts.append(_tag('<circle class="f-artifact" cx="{:.2f}%" cy="{:.1f}" r="4"/>', x(rate), y(chance)))
        text = '<text class="tick" x="{:.2f}%" y="{:.1f}" dx="8" dy="-4">{:.0%}</text>'
        parts.append(_tag(text, x(rate), y(chance), chance))
        parts.append(
            _tag('<text class="tick" x="{:.2f}%" y="128" text-anchor="middle">{:.0%} defects</text>', x(rate), rate)
        )
        told.append(f"{chance:.0%} at {rate:.0%} defects")
    return _svg(height, f"chance of acceptance: {', '.join(told)}", parts)


def swatch(place: int) -> Markup:
    """The colour of a segment of `stacked`."""
    box = '<svg width="12" height="12" aria-hidden="true"><rect class="b-{}" width="12" height="12"/></svg>'
    return _tag(box, place)


def share(part: float, series: str) -> Markup:
    """A small bar for a probability."""
    return _svg(
        8, f"{part:.1%}", [_tag('<rect class="f-{}" x="0" y="0" width="{:.1f}%" height="8"/>', series, 100 * part)]
    )


def precision_map(kinds: Sequence[str], layers: Sequence[int], bits: Sequence[Sequence[int | None]]) -> Markup:
    """`bits[kind][layer]` as coloured cells with the number in them, None left empty."""
    left, top = 62, 16
    label = '<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>'
    box = '<rect class="p{}" x="{}" y="{}" width="{}" height="{}" rx="3"/>'
    parts = [_tag(label, left + CELL * i + CELL // 2, 11, "middle", layer) for i, layer in enumerate(layers)]
    for row, kind in enumerate(kinds):
        y = top + CELL * row
        parts.append(_tag(label, left - 6, y + 14, "end", kind))
        for column, value in enumerate(bits[row]):
            if value is not None:
                x = left + CELL * column
                parts.append(_tag(box, value, x + 1, y + 1, CELL - 2, CELL - 2))
                parts.append(
                    _tag(
                        '<text class="pt p{}t" x="{}" y="{}" text-anchor="middle">{}</text>',
                        value,
                        x + 10,
                        y + 14,
                        value,
                    )
                )
    width, height = left + CELL * len(layers), top + CELL * len(kinds) + 6
    frame = '<svg class="map" role="img" aria-label="bits of layers {} to {}" width="{}" height="{}">{}</svg>'
    return _tag(frame, layers[0], layers[-1], width, height, Markup("").join(parts))


def _tag(form: str, *values: object) -> Markup:
    """`form` with values put in, each escaped unless it is markup already."""
    return Markup(form).format(*values)


def _grid(scale: LogScale, height: int) -> Markup:
    line = '<line class="grid" x1="{:.2f}%" x2="{:.2f}%" y1="0" y2="{}"/>'
    return Markup("").join(_tag(line, scale.at(v), scale.at(v), height) for v in scale.ticks())


def _line(x1: float, x2: float, y: float, classes: str) -> Markup:
    return _tag('<line class="{}" x1="{:.2f}%" x2="{:.2f}%" y1="{}" y2="{}"/>', classes, x1, x2, y, y)


def _anchor(percent: float) -> str:
    return "start" if percent < 8 else "end" if percent > 92 else "middle"


def _svg(height: int, label: str, parts: Sequence[Markup]) -> Markup:
    frame = '<svg role="img" aria-label="{}" width="100%" height="{}">{}</svg>'
    return _tag(frame, label, height, Markup("").join(parts))
