"""allocate: the scheme of each group, of least total sensitivity within the budget, and what was weighed for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.build.context import Context, Outline
from quantkit.build.decisions import UNQUANTIZED
from quantkit.build.estimate import Cost
from quantkit.build.files import write_json
from quantkit.build.progress import Progress
from quantkit.build.stage import Facts, Inputs, Stage
from quantkit.build.stages.sensitivity import method, options
from quantkit.quantize.allocate import Option, allocate, average_bits, frontier, total_sensitivity

SEARCH = "search.json"
"""What was weighed and chosen, as plain data: see `search_data`."""
_FILE = "allocation.json"


def chosen(folder: Path) -> dict[str, str]:
    """`{group: scheme}` over the decision units, from the stage's folder."""
    schemes: dict[str, str] = json.loads((folder / _FILE).read_text(encoding="utf-8"))["schemes"]
    return schemes


def search_data(folder: Path) -> dict[str, Any]:
    """`search.json` of the stage's folder: `method` (`gradient`: sensitivities are nats of mean KL; `weight`: squared
    output errors; `none`: all pinned), `budget_bits`, `average_bits`, `bytes`, `sensitivity` (the sum of the chosen),
    `groups` (each with `group`, `weights`, `chosen`, `options` of `scheme`, `bits`, `sensitivity`) and `frontier`
    (`[bits, sensitivity]` of the best allocations, ascending)."""
    data: dict[str, Any] = json.loads((folder / SEARCH).read_text(encoding="utf-8"))
    return data


def priced(context: Outline, folder: Path) -> dict[str, list[Option]]:
    """The sensitivity stage's options at what they cost under this recipe's kind of budget."""
    width = float(context.decisions.source_bits)
    return {
        group: [replace(option, bits=width) if option.scheme == UNQUANTIZED else option for option in row]
        for group, row in options(folder).items()
    }


def _inputs(context: Context) -> Inputs:
    return {"budget_bits": context.decisions.budget_bits, "source_bits": context.decisions.source_bits}


def _run(context: Context, needs: Mapping[str, Path], folder: Path, progress: Progress) -> Facts:
    table = priced(context, needs["sensitivity"])
    schemes = allocate(table, context.decisions.budget_bits)
    facts = {"average_bits": average_bits(table, schemes), "counts": dict(sorted(Counter(schemes.values()).items()))}
    write_json(folder / SEARCH, _search_data(context, table, schemes))
    write_json(folder / _FILE, {**facts, "schemes": {group: schemes[group] for group in table}})
    return facts | {"sensitivity": total_sensitivity(table, schemes)}


def _search_data(context: Context, table: Mapping[str, Sequence[Option]], schemes: Mapping[str, str]) -> dict[str, Any]:
    bits = average_bits(table, schemes)
    weights = sum(row[0].weights for row in table.values())
    return {
        "method": method(context),
        "budget_bits": context.decisions.budget_bits,
        "average_bits": bits,
        "bytes": round(bits * weights / 8),
        "sensitivity": total_sensitivity(table, schemes),
        "groups": [
            {
                "group": group,
                "weights": row[0].weights,
                "chosen": schemes[group],
                "options": [{"scheme": o.scheme, "bits": o.bits, "sensitivity": o.sensitivity} for o in row],
            }
            for group, row in table.items()
        ],
        "frontier": [list(corner) for corner in frontier(table)],
    }


def _cost(outline: Outline) -> Cost:
    return Cost(disk_bytes=1000 * len(outline.decisions.allowed))


STAGE = Stage("allocate", "Choose schemes", __name__, ("sensitivity",), _inputs, _run, _cost)
