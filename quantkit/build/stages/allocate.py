"""allocate: the scheme of each group, of least total sensitivity within the budget of bits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from quantkit.build.context import Context, Outline
from quantkit.build.estimate import Cost
from quantkit.build.files import write_json
from quantkit.build.progress import Progress
from quantkit.build.stage import Facts, Inputs, Stage
from quantkit.build.stages.sensitivity import options
from quantkit.quantize.allocate import allocate, average_bits

_FILE = "allocation.json"


def chosen(folder: Path) -> dict[str, str]:
    """`{group: scheme}` over the decision units, from the stage's folder."""
    schemes: dict[str, str] = json.loads((folder / _FILE).read_text(encoding="utf-8"))["schemes"]
    return schemes


def _inputs(context: Context) -> Inputs:
    return {"budget_bits": context.loaded.recipe.quantization.budget_bits}


def _run(context: Context, needs: Mapping[str, Path], folder: Path, progress: Progress) -> Facts:
    table = options(needs["sensitivity"])
    schemes = allocate(table, context.loaded.recipe.quantization.budget_bits)
    facts = {"average_bits": average_bits(table, schemes), "counts": dict(sorted(Counter(schemes.values()).items()))}
    write_json(folder / _FILE, {**facts, "schemes": {group: schemes[group] for group in table}})
    return facts


def _cost(outline: Outline) -> Cost:
    return Cost(disk_bytes=100 * len(outline.decisions.allowed))


STAGE = Stage("allocate", "Choose schemes", __name__, ("sensitivity",), _inputs, _run, _cost)
