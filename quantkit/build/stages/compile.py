"""compile: the buckets that the artifact is prepared for, and GPU kernels for the recipe's targets."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quantkit.build.context import Context, Outline
from quantkit.build.decisions import HEAD
from quantkit.build.estimate import Cost
from quantkit.build.files import write_json
from quantkit.build.lowered import lowered_program
from quantkit.build.progress import Progress
from quantkit.build.stage import Facts, Inputs, Stage
from quantkit.build.stages.allocate import chosen
from quantkit.compile.buckets import plan_buckets
from quantkit.compile.cache import cache_folder
from quantkit.compile.emit import emit
from quantkit.errors import PreflightError

BUCKETS = "buckets.json"
KERNELS = "kernels"
_KERNELS_A_TARGET = 16
_SECONDS_A_KERNEL = 0.6
"""With two processes; none where an earlier build has compiled it."""


def _inputs(context: Context) -> Inputs:
    recipe, targets = context.loaded.recipe, list(context.loaded.recipe.compile.targets)
    return {
        "targets": targets,
        "triton": _triton_version(context) if targets else None,
        "max_num_seqs": recipe.runtime.max_num_seqs,
        "max_num_batched_tokens": recipe.runtime.max_num_batched_tokens,
        "profile": context.profile_digest(),
        "kv_format": recipe.kv_cache.format,
        "lm_head": context.decisions.head,
    }


def _triton_version(context: Context) -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        raise PreflightError(
            "compiling for a GPU needs triton, which is not installed",
            where=context.loaded.where("compile", "targets"),
            next="pip install triton (Linux on x86-64), or leave the targets empty",
        ) from None


def _run(context: Context, needs: Mapping[str, Path], folder: Path, progress: Progress) -> Facts:
    runtime, targets = context.loaded.recipe.runtime, context.loaded.recipe.compile.targets
    plan = plan_buckets(runtime.max_num_seqs, runtime.max_num_batched_tokens, context.profile())
    write_json(folder / BUCKETS, plan.to_json())
    shutil.rmtree(folder / KERNELS, ignore_errors=True)  # a killed run's; what it compiled is in the cache
    facts: dict[str, Any] = {"decode": list(plan.decode), "prefill": list(plan.prefill), "kernels": {}, "compiled": 0}
    if targets:
        made = emit(
            lowered_program(context, {**chosen(needs["allocate"]), HEAD: context.decisions.head}),
            targets,
            plan.classes,
            folder / KERNELS,
            cache=cache_folder(),
            workers=context.threads,
            step=progress.step,
        )
        facts |= {"kernels": dict(made.kernels), "compiled": made.compiled}
    return facts


def _cost(outline: Outline) -> Cost:
    count = len(outline.loaded.recipe.compile.targets)
    if not count:
        return Cost(disk_bytes=4096)
    kernels = count * _KERNELS_A_TARGET
    return Cost(disk_bytes=kernels * 100_000, memory_bytes=400_000_000, fixed_seconds=kernels * _SECONDS_A_KERNEL)


STAGE = Stage("compile", "Compile kernels", __name__, ("allocate",), _inputs, _run, _cost)
