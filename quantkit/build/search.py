"""The search alone: a build's first stages, up to the allocation, in the same store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.build.allocation import write_allocation
from quantkit.build.context import open_context
from quantkit.build.estimate import require_room
from quantkit.build.interrupt import interruptible
from quantkit.build.memory import PeakMemory
from quantkit.build.pipeline import STAGES
from quantkit.build.progress import Progress
from quantkit.build.run import run_folder, run_stages
from quantkit.build.stage import stage_keys
from quantkit.build.stages.allocate import STAGE as ALLOCATE
from quantkit.build.stages.allocate import chosen, priced, search_data
from quantkit.build.store import Store
from quantkit.quantize.allocate import allocate, average_bits, total_sensitivity
from quantkit.recipe.load import LoadedRecipe


@dataclass(frozen=True)
class Point:
    """What one budget buys. bits: a weight, asked for and spent; bytes: of the decision units; counts: by scheme."""

    budget_bits: float
    average_bits: float
    bytes: int
    sensitivity: float
    counts: dict[str, int]


@dataclass(frozen=True)
class Found:
    """A search's outcome. data: `search.json`, see `stages.allocate.search_data`; points: the recipe's own budget, then
    those asked for beside it."""

    name: str
    data: dict[str, Any]
    points: tuple[Point, ...]


def search(
    loaded: LoadedRecipe, out: Path, progress: Progress, *, budgets: Sequence[float] = (), write: Path | None = None
) -> Found:
    """Weigh every scheme and choose under the recipe's budget, going on from the stages that are whole.

    Args:
        loaded: the recipe. out: the artifact's folder; nothing is written there, its stages are kept beside it, and a
            build goes on from them.
        budgets: further budgets to solve for, bits a weight.
        write: where to put the allocation file.

    Raises what the stages raise; RecipeError for a budget below the least feasible value.
    """
    import torch

    context = open_context(loaded)
    torch.set_num_threads(context.threads)
    stages = STAGES[: STAGES.index(ALLOCATE) + 1]
    store = Store(run_folder(out))
    with store.locked(), PeakMemory() as memory, interruptible() as check_interrupt:
        keys = stage_keys(stages, context)
        require_room([s.cost(context) for s in stages if store.find(s.name, keys[s.name][0]) is None], store.folder)
        run_stages(stages, context, store, keys, memory, progress, check_interrupt)
        folders = {stage.name: store.folder_of(stage.name, keys[stage.name][0]) for stage in stages}
        data, schemes = search_data(folders["allocate"]), chosen(folders["allocate"])
        table = priced(context, folders["sensitivity"])
    weights = sum(row[0].weights for row in table.values())
    points = []
    for budget in (context.decisions.budget_bits, *budgets):
        found = schemes if budget == context.decisions.budget_bits else allocate(table, budget)
        bits = average_bits(table, found)
        points.append(
            Point(
                budget_bits=budget,
                average_bits=bits,
                bytes=round(bits * weights / 8),
                sensitivity=total_sensitivity(table, found),
                counts=dict(sorted(Counter(found.values()).items())),
            )
        )
    if write is not None:
        about = {key: data[key] for key in ("method", "budget_bits", "average_bits", "bytes", "sensitivity")}
        units = {group: weight for group, weight in context.program.groups().items() if group in table}
        write_allocation(write, schemes, units, {"model": loaded.recipe.model.source, **about})
    return Found(loaded.name, data, tuple(points))
