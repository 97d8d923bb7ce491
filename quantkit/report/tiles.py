"""The few figures that the page begins with."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.report.figures import figure_table
from quantkit.report.model import Report

_FIRST = ("mean KL", "same top-1")


@dataclass(frozen=True)
class Tile:
    """One figure: what it is of, the figure, what to hold it against."""

    label: str
    value: str
    beside: str


def tiles(report: Report) -> list[Tile]:
    """Size, the two figures people ask for first, right answers, people's progress; what is not known is left out."""
    sizes = report.memory
    made = (
        [Tile("weights", f"{sizes.after / sizes.before:.1%}", "of the 16-bit source's bytes")] if sizes.before else []
    )
    gate = report.gate
    if gate is None:
        return made
    for row in figure_table(gate).rows:
        if row.label in _FIRST:
            artifact, limit, *others = row.cells
            rung = others[1].value if len(others) > 1 else ""
            beside = [f"limit {limit.value}"] if limit.value else []
            made.append(Tile(row.label, artifact.value, ", ".join([*beside, *([f"RTN-INT4 {rung}"] if rung else [])])))
    task = ((gate.get("answers") or {}).get("scores") or {}).get("task") or {}
    if task.get("n"):
        of = f"of {task['n']}; {task['losses']} lost, {task['gains']} gained"
        made.append(Tile("right answers", f"{task['baseline']} → {task['candidate']}", of))
    tally = (report.review or {}).get("tally")
    if tally:
        same = tally["identical"]  # they tie without anybody looking
        looked = f"{tally['rated'] - same} of {tally['needed'] - same}"
        made.append(Tile("judged by people", looked, f"{tally['defects']} defects; {same} more pairs are identical"))
    return made
