"""`quantkit search`: which scheme each group should get, what that costs and saves, without quantizing anything."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.paths import OutPath, RecipePath, Sets, artifact_folder
from quantkit.terminal import printable

if TYPE_CHECKING:
    from quantkit.build.search import Found, Point

_COLUMNS, _ROWS = 64, 14
_UNITS = {
    "gradient": "predicted mean KL divergence, nats a token",
    "weight": "squared error of the group's own output",
    "none": "not weighed: every group is pinned",
}


def search(
    recipe: RecipePath,
    budget_bits: Annotated[
        list[float] | None,
        typer.Option(
            "--budget-bits", help="Bits a weight, instead of the recipe's budget; further ones are compared with it."
        ),
    ] = None,
    allocation: Annotated[
        Path | None,
        typer.Option("--allocation", "-o", help="File to write, for `quantization.allocation` of a recipe."),
    ] = None,
    out: OutPath = None,
    set_: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Weigh every scheme for every group and choose under the budget: the first stages of `build`, kept for it."""
    from quantkit.build.search import search as run
    from quantkit.cli.progress import shown
    from quantkit.errors import RecipeError
    from quantkit.recipe.load import load_recipe

    budgets = budget_bits or []
    if allocation is not None and not allocation.absolute().parent.is_dir():
        raise RecipeError("no such folder", where=str(allocation.absolute().parent), next="Make it, or name another")
    sets = list(set_ or ())
    if budgets:
        sets += ["quantization.budget_bytes=null", f"quantization.budget_bits={budgets[0]!r}"]
    loaded = load_recipe(recipe, sets)
    with shown() as progress:
        found = run(loaded, artifact_folder(out, loaded.name), progress, budgets=budgets[1:], write=allocation)
    if as_json:
        typer.echo(json.dumps({**found.data, "points": [asdict(point) for point in found.points]}, indent=2))
        return
    typer.echo(printable(search_text(found)))
    if allocation is not None:
        typer.echo(f"\nallocation  {allocation}")


def search_text(found: Found) -> str:
    """Table, frontier and budgets to be read in a terminal."""
    data = found.data
    lines = [f"{found.name}: sensitivity is {_UNITS[data['method']]}", "", *_groups(data)]
    if data["method"] != "none":
        lines += ["", *_chart(data["frontier"], found.points)]
    return "\n".join([*lines, "", *_points(found.points)])


def _groups(data: dict[str, Any]) -> list[str]:
    """One row a group: the sensitivity of every scheme it may take, the chosen one marked."""
    schemes = list(dict.fromkeys(option["scheme"] for row in data["groups"] for option in row["options"]))
    width = max(11, *(len(scheme) for scheme in schemes)) + 2
    lines = [f"  {'group':<20}{'weights':>12}  " + "".join(scheme.rjust(width) for scheme in schemes)]
    for row in data["groups"]:
        by_scheme = {option["scheme"]: option["sensitivity"] for option in row["options"]}
        cells = [_cell(by_scheme.get(scheme), scheme == row["chosen"]).rjust(width) for scheme in schemes]
        lines.append(f"  {row['group']:<20}{row['weights']:>12,}  " + "".join(cells).rstrip())
    return lines


def _cell(sensitivity: float | None, is_chosen: bool) -> str:
    text = "" if sensitivity is None else f"{sensitivity:.3g}"
    return f"[{text}]" if is_chosen else f"{text} "


def _chart(frontier: list[list[float]], points: tuple[Point, ...]) -> list[str]:
    """Total sensitivity (logarithmic) over bits a weight: `.` the best allocations, `o` the budgets."""
    shown = [(bits, value) for bits, value in frontier if value > 0]
    if len(shown) < 2:
        return []
    chosen = [(p.average_bits, p.sensitivity) for p in points if p.sensitivity > 0]
    least = max(min(value for _, value in shown), shown[0][1] * 1e-4)
    low, high = math.log(min([least, *(value for _, value in chosen)])), math.log(shown[0][1])
    left, right = shown[0][0], frontier[-1][0]
    grid = [[" "] * _COLUMNS for _ in range(_ROWS)]
    for mark, spots in ((".", shown), ("o", chosen)):
        for bits, value in spots:
            if math.log(value) < low:
                continue
            column = round((bits - left) / (right - left) * (_COLUMNS - 1))
            row = round((high - math.log(value)) / max(high - low, 1e-9) * (_ROWS - 1))
            grid[min(max(row, 0), _ROWS - 1)][min(max(column, 0), _COLUMNS - 1)] = mark
    lines = []
    for number, cells in enumerate(grid):
        value = math.exp(high - (high - low) * number / (_ROWS - 1))
        label = f"{value:.2g}" if number % 3 == 0 or number == _ROWS - 1 else ""
        lines.append(f"  {label:>9} |{''.join(cells)}".rstrip())
    ends = f"{left:.2f}" + f"{right:.2f}".rjust(_COLUMNS - len(f"{left:.2f}"))
    return [*lines, f"  {'':>9} +{'-' * _COLUMNS}", f"  {'':>9}  {ends}  bits a weight"]


def _points(points: tuple[Point, ...]) -> list[str]:
    lines = [f"  {'budget':>8}{'spent':>9}{'megabytes':>11}{'sensitivity':>13}   groups"]
    for point in points:
        counts = ", ".join(f"{count} {scheme}" for scheme, count in point.counts.items())
        spent = f"{point.budget_bits:>8.3f}{point.average_bits:>9.3f}{point.bytes / 1e6:>11,.1f}"
        lines.append(f"  {spent}{point.sensitivity:>13.4g}   {counts}")
    return lines
