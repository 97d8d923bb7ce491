"""Maps of the model: layers across, kinds of matrices down, one cell a decision unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from quantkit.report.model import Cell
from quantkit.report.svg import tag

CELL = 20
"""Pixels of one cell."""
BAND = 12
"""Layers in one row of a map: what a phone is wide."""
_LEFT, _TOP = 62, 16
_SHADES = (0.1, 0.25, 0.5, 0.75)
"""Shares of rounding's error from which the next shade is used."""

Draw = Callable[[Cell, int, int], list[Markup]]
"""A cell's marks, its corner at (x, y)."""


def precision_maps(cells: Sequence[Cell]) -> list[Markup]:
    """Bits in colour and as a number, in rows of BAND layers; a bar as long as the root of the predicted cost."""
    most = max((cell.sensitivity or 0.0 for cell in cells), default=0.0)

    def draw(cell: Cell, x: int, y: int) -> list[Markup]:
        parts = _box(f"p{cell.bits}", f"p{cell.bits}t", cell.bits, x, y, 13 if most else 14)
        if most and cell.sensitivity is not None:
            length = (CELL - 6) * math.sqrt(max(0.0, cell.sensitivity) / most)
            bar = '<rect class="p{}t" x="{}" y="{}" width="{:.1f}" height="2.5"/>'
            parts.append(tag(bar, cell.bits, x + 3, y + 15, max(1.0, length)))
        return parts

    return _bands(cells, "bits", draw)


def error_maps(cells: Sequence[Cell]) -> list[Markup]:
    """GPTQ's error in percent of rounding's, the darker the less was gained; empty where nothing was quantized so."""
    if all(cell.error_of_rtn is None for cell in cells):
        return []

    def draw(cell: Cell, x: int, y: int) -> list[Markup]:
        if cell.error_of_rtn is None:
            return []
        shade = sum(cell.error_of_rtn > bound for bound in _SHADES)
        return _box(f"e{shade}", f"e{shade}t", f"{min(99, round(100 * cell.error_of_rtn))}", x, y, 14)

    return _bands(cells, "error", draw)


def _bands(cells: Sequence[Cell], what: str, draw: Draw) -> list[Markup]:
    kinds = list(dict.fromkeys(cell.kind for cell in cells if cell.layer is not None))
    layers = sorted({cell.layer for cell in cells if cell.layer is not None})
    bands = [layers[start : start + BAND] for start in range(0, len(layers), BAND)]
    return [_band([c for c in cells if c.layer in band], kinds, band, what, draw) for band in bands]


def _band(cells: Sequence[Cell], kinds: Sequence[str], layers: Sequence[int], what: str, draw: Draw) -> Markup:
    label = '<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>'
    parts = [tag(label, _LEFT + CELL * i + CELL // 2, 11, "middle", layer) for i, layer in enumerate(layers)]
    parts += [tag(label, _LEFT - 6, _TOP + CELL * row + 14, "end", kind) for row, kind in enumerate(kinds)]
    for cell in cells:
        if cell.layer is not None:
            parts += draw(cell, _LEFT + CELL * layers.index(cell.layer), _TOP + CELL * kinds.index(cell.kind))
    width, height = _LEFT + CELL * len(layers), _TOP + CELL * len(kinds) + 6
    frame = '<svg class="map" role="img" aria-label="{} of layers {} to {}" width="{}" height="{}">{}</svg>'
    return tag(frame, what, layers[0], layers[-1], width, height, Markup("").join(parts))


def _box(fill: str, ink: str, text: object, x: int, y: int, drop: int) -> list[Markup]:
    """A filled cell with a text whose foot is `drop` pixels down."""
    box = '<rect class="{}" x="{}" y="{}" width="{}" height="{}" rx="3"/>'
    written = '<text class="pt {}" x="{}" y="{}" text-anchor="middle">{}</text>'
    return [
        tag(box, fill, x + 1, y + 1, CELL - 2, CELL - 2),
        tag(written, ink, x + CELL // 2, y + drop, text),
    ]
