"""Charts with two axes, as inline SVG: x in percent of the width, y in pixels, so that text keeps its size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from quantkit.report.escape import shorten
from quantkit.report.svg import anchor, svg, tag

TOP, HEIGHT, FOOT = 20, 120, 18
BINS = 20
MOST_CORNERS = 60
"""Points of a frontier that are drawn."""


@dataclass(frozen=True)
class _Plane:
    """Maps x between `left` and `right` to percent, shares of the height (0 below, 1 above) to pixels."""

    left: float
    right: float

    def x(self, value: float) -> float:
        return 1.5 + 88 * (value - self.left) / max(self.right - self.left, 1e-12)

    @staticmethod
    def y(share: float) -> float:
        return TOP + HEIGHT * (1 - share)

    def curve(self, points: Sequence[tuple[float, float]], classes: str) -> Markup:
        """A line through `(value, share)`, drawn in a square that is stretched to the plane."""
        where = " ".join(f"{self.x(x):.2f},{100 * (1 - y):.2f}" for x, y in points)
        line = (
            '<svg y="{}" width="100%" height="{}" viewBox="0 0 100 100" preserveAspectRatio="none" overflow="visible">'
            '<polyline class="line {}" vector-effect="non-scaling-stroke" points="{}"/></svg>'
        )
        return tag(line, TOP, HEIGHT, classes, where)

    def grid(self, lines: Sequence[tuple[float, str]], feet: Sequence[tuple[float, str]]) -> list[Markup]:
        """Lines across at shares with their words at the right, and words under the plane."""
        across = '<line class="grid" x1="0" x2="100%" y1="{0:.1f}" y2="{0:.1f}"/>'
        word = '<text class="tick" x="{:.2f}%" y="{:.1f}" text-anchor="{}">{}</text>'
        parts = [tag(across, self.y(share)) for share, _ in lines]
        parts += [tag(word, 100, self.y(share) - 3, "end", text) for share, text in lines]
        foot = TOP + HEIGHT + 13
        return parts + [tag(word, self.x(v), foot, anchor(self.x(v)), text) for v, text in feet]


def length_chart(lengths: Sequence[Sequence[int]]) -> Markup:
    """How many answers have how many tokens: `[baseline, candidate]` each; baseline filled, candidate outlined."""
    longest = max((max(pair) for pair in lengths), default=1)
    wide = max(1, math.ceil((longest + 1) / BINS))
    plane = _Plane(0, wide * math.ceil((longest + 1) / wide))
    counts = [[0] * math.ceil((longest + 1) / wide) for _ in range(2)]
    for pair in lengths:
        for side, length in enumerate(pair):
            counts[side][length // wide] += 1
    most = max(map(max, counts))
    parts = plane.grid([(0.0, ""), (1.0, f"{most} answers")], _feet(plane.right, "tokens"))
    bar = '<rect class="{}" x="{:.2f}%" y="{:.1f}" width="{:.2f}%" height="{:.1f}"/>'
    for side, classes in ((0, "f-source faint"), (1, "line s-artifact w2")):
        for place, count in enumerate(counts[side]):
            if count:
                x, y = plane.x(place * wide), plane.y(count / most)
                parts.append(tag(bar, classes, x, y, plane.x((place + 1) * wide) - x, plane.y(0) - y))
    return svg(TOP + HEIGHT + FOOT, "tokens of the answers, baseline and artifact", parts)


def same_chart(first: Sequence[int | None], longest: int) -> Markup:
    """Share of the answers that are still the baseline's, token by token, after so many tokens."""
    plane, total = _Plane(0, max(longest, 1)), max(len(first), 1)
    points, same = [(0.0, 1.0)], len(first)
    for token, group in itertools.groupby(sorted(t for t in first if t is not None)):
        points.append((float(token), same / total))
        same -= len(list(group))
        points.append((float(token), same / total))
    points.append((plane.right, same / total))
    parts = plane.grid([(share, f"{share:.0%}") for share in (0.0, 0.5, 1.0)], _feet(plane.right, "tokens"))
    parts.append(plane.curve(points, "s-artifact w2"))
    return svg(TOP + HEIGHT + FOOT, f"{same / total:.0%} of the answers are the same to their end", parts)


def pareto_chart(search: Mapping[str, Any]) -> Markup:
    """Best predicted divergence (logarithmic) over bits a weight, with the allocation chosen and single schemes."""
    marks = [(name, bits, cost, "hollow s-int4", -8) for name, bits, cost in _single_schemes(search) if cost > 0]
    if search["sensitivity"] > 0:
        marks.append(("chosen", search["average_bits"], search["sensitivity"], "f-artifact", 16))
    widest = max((bits for _, bits, *_ in marks), default=16.0) + 1
    corners = [(bits, cost) for bits, cost in search["frontier"] if cost > 0 and bits <= widest]
    corners = corners[:: math.ceil(len(corners) / MOST_CORNERS) or 1] + corners[-1:]
    costs = [cost for _, cost in corners] + [cost for _, _, cost, *_ in marks]
    if not costs:
        return Markup("")
    low, high = math.floor(math.log10(min(costs))), math.ceil(math.log10(max(costs)))
    high = max(high, low + 1)
    bits_seen = [bits for bits, _ in corners] + [bits for _, bits, *_ in marks]
    plane = _Plane(math.floor(min(bits_seen)), math.ceil(max(bits_seen)))

    def share(cost: float) -> float:
        return (math.log10(cost) - low) / (high - low)

    lines = [((n - low) / (high - low), f"{10.0**n:g}") for n in range(low, high + 1, math.ceil((high - low) / 4))]
    step = math.ceil((plane.right - plane.left) / 6)
    feet = [(float(n), str(n)) for n in range(int(plane.left), int(plane.right), step)]
    feet.append((plane.right, f"{plane.right:g} bits"))
    parts = plane.grid(lines, feet)
    parts.append(plane.curve([(bits, share(cost)) for bits, cost in corners], "s-source w2"))
    for name, bits, cost, classes, dy in marks:
        x, y = plane.x(bits), plane.y(share(cost))
        parts.append(tag('<circle class="{}" cx="{:.2f}%" cy="{:.1f}" r="5"/>', classes, x, y))
        word = '<text class="tick strong" x="{:.2f}%" y="{:.1f}" dy="{}" text-anchor="{}">{}</text>'
        parts.append(tag(word, x, y, dy, anchor(x), shorten(name, 24)))
    label = f"chosen: {search['average_bits']:.3g} bits, predicted {search['sensitivity']:.3g}"
    return svg(TOP + HEIGHT + FOOT, label, parts)


def acceptance_chart(points: Sequence[tuple[float, float]], marked: Sequence[float]) -> Markup:
    """An operating curve: chance of acceptance (0 to 1) over the defect rate, which starts at 0.

    marked: rates to tell the chance at (of the nearest point).
    """
    plane = _Plane(0, points[-1][0])
    told = [(rate, min(points, key=lambda point: abs(point[0] - rate))[1]) for rate in marked]
    feet = [*((rate, f"{rate:.0%}") for rate in marked), (plane.right, f"{plane.right:.0%} defects")]
    parts = plane.grid([(v, f"{v:.0%}") for v in (0.0, 0.5, 1.0)], feet)
    parts.append(plane.curve(points, "s-artifact w2"))
    for rate, chance in told:
        x, y = plane.x(rate), plane.y(chance)
        parts.append(tag('<circle class="f-artifact" cx="{:.2f}%" cy="{:.1f}" r="4"/>', x, y))
        word = '<text class="tick strong" x="{:.2f}%" y="{:.1f}" dx="8" dy="-4">{:.0%}</text>'
        parts.append(tag(word, x, y, chance))
    words = ", ".join(f"{chance:.0%} at {rate:.0%} defects" for rate, chance in told)
    return svg(TOP + HEIGHT + FOOT, f"chance of acceptance: {words}", parts)


def _single_schemes(search: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """(scheme, bits a weight, predicted cost) of every scheme that all groups may take, when all of them do."""
    groups = search["groups"]
    tables = [{option["scheme"]: option for option in row["options"]} for row in groups]
    weights = sum(row["weights"] for row in groups)
    found = []
    for name in tables[0] if tables else ():
        if all(name in table for table in tables):
            bits = (
                sum(row["weights"] * table[name]["bits"] for row, table in zip(groups, tables, strict=True)) / weights
            )
            found.append((name, bits, sum(table[name]["sensitivity"] for table in tables)))
    return found


def _feet(right: float, unit: str) -> list[tuple[float, str]]:
    return [(0.0, "0"), (right / 2, f"{right / 2:g}"), (right, f"{right:g} {unit}")]
