"""A roofline as SVG: operations a byte across, operations a second up, both logarithmic, a roof for each ceiling."""

from __future__ import annotations

import math

from figures import Figure

WIDTH, HEIGHT, LEFT, EDGE = 760, 420, 60, 40
ACROSS, UP = (0.1, 1e4), (1e9, 1e13)
COLOURS = {"linear": "#1664c0", "attention": "#c05016"}


def x_of(intensity: float) -> float:
    return LEFT + (WIDTH - LEFT - 20) * _place(intensity, *ACROSS)


def y_of(rate: float) -> float:
    return HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * _place(rate, *UP)


def _place(value: float, low: float, high: float) -> float:
    return math.log(min(max(value, low), high) / low) / math.log(high / low)


def roofline(figures: list[Figure], title: str) -> str:
    """The picture; each point tells on hovering what it is."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="white"/>',
        _text(LEFT, 20, title),
        _text(6, 36, "G operations/s"),
        _text(WIDTH / 2, HEIGHT - 5, "operations a byte", "middle"),
    ]
    for power in range(-1, 5):
        x = x_of(10.0**power)
        parts += [_line(x, EDGE, x, HEIGHT - EDGE), _text(x, HEIGHT - 22, f"{10.0**power:g}", "middle")]
    for power in range(9, 14):
        y = y_of(10.0**power)
        parts += [_line(LEFT, y, WIDTH - 20, y), _text(LEFT - 6, y + 4, f"{10.0 ** (power - 9):g}", "end")]
    for read, ceiling in sorted({(figure.read, figure.ceiling) for figure in figures}):
        roof = [(ACROSS[0], ACROSS[0] * read), (ceiling / read, ceiling), (ACROSS[1], ceiling)]
        points = " ".join(f"{x_of(intensity):.0f},{y_of(rate):.0f}" for intensity, rate in roof)
        parts.append(f'<polyline points="{points}" fill="none" stroke="#888"/>')
    for figure in figures:
        x, y = x_of(figure.operations / figure.moved), y_of(figure.operations / figure.seconds)
        note = f"<title>{figure.op} {figure.form} {figure.case}</title>"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[figure.op]}">{note}</circle>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{text}</text>'
