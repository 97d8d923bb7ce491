"""allocate: the scheme of each group, of least total sensitivity within the budget, and what was weighed for it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.build.context import Context, Outline
from quantkit.build.decisions import UNQUANTIZED
from quantkit.build.estimate import Cost, Sizes
from quantkit.build.files import write_json
from quantkit.build.progress import Progress
from quantkit.build.stage import Facts, Inputs, Stage
from quantkit.build.stages.sensitivity import method, options, rounded
from quantkit.calibration.samples import read_samples
from quantkit.quantize.allocate import Option, allocate, average_bits, contested, frontier, total_sensitivity
from quantkit.quantize.alone import Alone, kl_alone
from quantkit.quantize.gradients import choose

SEARCH = "search.json"
"""What was weighed and chosen, as plain data: see `search_data`."""
CHECKED = 8
"""Groups whose divergence is measured: those whose price decided most narrowly."""
CHECKED_TOKENS = 1024
"""Calibration tokens they are measured on, about."""
_FAR = 3.0
"""Factor between measured and predicted, over all checked, that is worth a word."""
_FILE, _WORK = "allocation.json", "work"


def chosen(folder: Path) -> dict[str, str]:
    """`{group: scheme}` over the decision units, from the stage's folder."""
    schemes: dict[str, str] = json.loads((folder / _FILE).read_text(encoding="utf-8"))["schemes"]
    return schemes


def search_data(folder: Path) -> dict[str, Any]:
    """`search.json` of the stage's folder: `method` (`gradient`: sensitivities are nats of mean KL; `weight`: squared
    output errors; `none`: all pinned), `budget_bits`, `average_bits`, `bytes`, `sensitivity` (the sum of the chosen),
    `groups` (each with `group`, `weights`, `chosen`, `options` of `scheme`, `bits`, `sensitivity`), `frontier`
    (`[bits, sensitivity]` of the best allocations, ascending) and `checked` (`group`, `scheme`, `predicted`,
    `measured`: mean KL when that group alone is quantized)."""
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
    return {
        "budget_bits": context.decisions.budget_bits,
        "source_bits": context.decisions.source_bits,
        "seed": context.loaded.recipe.calibration.seed,
    }


def _run(context: Context, needs: Mapping[str, Path], folder: Path, progress: Progress) -> Facts:
    table = priced(context, needs["sensitivity"])
    schemes = allocate(table, context.decisions.budget_bits)
    facts: Facts = {
        "average_bits": average_bits(table, schemes),
        "counts": dict(sorted(Counter(schemes.values()).items())),
    }
    checked = _check(context, needs["calibrate"], table, schemes, folder, progress)
    write_json(folder / SEARCH, {**_search_data(context, table, schemes), "checked": checked})
    write_json(folder / _FILE, {**facts, "schemes": {group: schemes[group] for group in table}})
    shutil.rmtree(folder / _WORK, ignore_errors=True)
    facts["sensitivity"] = total_sensitivity(table, schemes)
    if checked:
        factor = facts["measured_over_predicted"] = _factor(checked)
        if not 1 / _FAR < factor < _FAR:
            progress.note(f"sensitivities are off: measured KL is {factor:.2g} times what was predicted")
    return facts


def _check(
    context: Context,
    calibrated: Path,
    table: Mapping[str, Sequence[Option]],
    schemes: Mapping[str, str],
    folder: Path,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Measured beside predicted mean KL of the narrowest choices, by predictions in nats only."""
    narrow = contested(table, schemes, CHECKED) if method(context) == "gradient" else []
    if not narrow:
        return []
    (folder / _WORK).mkdir(exist_ok=True)
    seed, total = context.loaded.recipe.calibration.seed, context.program.num_layers + 2
    measured = kl_alone(
        context.source,
        context.program,
        choose(read_samples(calibrated).samples, CHECKED_TOKENS, seed + 1),
        [Alone(group, scheme) for group, scheme in narrow],
        lambda weight, scheme: rounded(context, weight, scheme),
        folder / _WORK,
        lambda done, what: progress.step(done, total, f"checking, {what}"),
    )
    predicted = [next(o for o in table[group] if o.scheme == scheme).sensitivity for group, scheme in narrow]
    return [
        {"group": group, "scheme": scheme, "predicted": guess, "measured": found}
        for (group, scheme), guess, found in zip(narrow, predicted, measured, strict=True)
    ]


def _factor(checked: Sequence[Mapping[str, Any]]) -> float:
    """Measured over predicted, summed over what was checked."""
    return float(sum(row["measured"] for row in checked) / sum(row["predicted"] for row in checked))


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
    table = Cost(disk_bytes=1000 * len(outline.decisions.allowed))
    if method(outline) != "gradient":
        return table
    sizes = Sizes.of(outline.program)
    runs = 1 + CHECKED / 2  # a group lies half way up, on average
    return table + Cost(
        disk_bytes=2 * CHECKED_TOKENS * 8 * sizes.hidden * (1 + CHECKED),
        memory_bytes=sizes.layer * (4 + sizes.item) + sizes.head * sizes.item + (1 << 28),
        multiply_adds=CHECKED_TOKENS * (runs * sizes.units + (1 + CHECKED) * sizes.head),
    )


STAGE = Stage("allocate", "Choose schemes", __name__, ("calibrate", "sensitivity"), _inputs, _run, _cost)
