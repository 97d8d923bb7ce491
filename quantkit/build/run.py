"""Runs the stages of a build in order, each once, and puts the artifact in its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantkit.artifact.read import open_artifact
from quantkit.build.context import Context, open_context
from quantkit.build.data import check_data
from quantkit.build.estimate import require_room
from quantkit.build.files import disk_full_explained
from quantkit.build.interrupt import interruptible
from quantkit.build.memory import PeakMemory
from quantkit.build.pipeline import STAGES
from quantkit.build.place import check_place, place
from quantkit.build.progress import Progress
from quantkit.build.stage import EVIDENCE, PAYLOAD, Inputs, Stage, stage_keys
from quantkit.build.stages.allocate import SEARCH, search_data
from quantkit.build.store import Store, stage_cost, stage_facts
from quantkit.errors import CheckpointError
from quantkit.freed_memory import collect_and_return
from quantkit.gate.verdict import EXIT_CODES
from quantkit.recipe.load import LoadedRecipe
from quantkit.report import gather, worth_a_look, write_report
from quantkit.review.answers import ANSWERS
from quantkit.review.status import joined, open_sample, review_status

RUN_FOLDERS = ".quantkit"


@dataclass(frozen=True)
class StageRun:
    """How one stage of a build went. `seconds` and `peak_anon_bytes` are of the run that made it."""

    name: str
    key: str
    cached: bool
    seconds: float
    peak_anon_bytes: int
    facts: dict[str, Any]


@dataclass(frozen=True)
class Built:
    """What a build made: the artifact's folder and identity, the verdict and what decided it, weights before (in 16
    bits) and after in bytes, the report's page, the run record."""

    folder: Path
    payload_digest: str
    verdict: str
    exit_code: int
    rules: tuple[str, ...]
    source_bytes: int
    weight_bytes: int
    report: Path
    run: dict[str, Any]


def run_folder(out: Path) -> Path:
    """Where the stages of the build into `out` are kept: beside it, on its file system."""
    out = out.absolute()
    return out.parent / RUN_FOLDERS / out.name


def build(loaded: LoadedRecipe, out: Path, progress: Progress, *, wait_s: float = 2.0) -> Built:
    """Build the recipe's artifact into `out`, going on from the stages that are whole.

    Raises what the stages raise; RecipeError when `out` is something else than an artifact; PreflightError when
    another build holds the run folder or memory or disk do not suffice.
    """
    import torch

    started, begun = datetime.now(UTC), time.monotonic()
    check_place(out)
    context = open_context(loaded)
    torch.set_num_threads(context.threads)
    store = Store(run_folder(out))
    with store.locked(wait_s), PeakMemory() as memory, interruptible() as check_interrupt:
        keys = stage_keys(STAGES, context)
        store.clean([(name, key) for name, (key, _) in keys.items()])
        _drop_damaged_package(store, keys["package"][0])
        missing = [stage for stage in STAGES if store.find(stage.name, keys[stage.name][0]) is None]
        if missing:
            check_data(context)
        for note in context.notes():
            progress.note(note)
        require_room([stage.cost(context) for stage in missing], store.folder)
        runs = run_stages(STAGES, context, store, keys, memory, progress, check_interrupt)
        record = _record(context, runs, started, time.monotonic() - begun)
        folders = {stage.name: store.folder_of(stage.name, keys[stage.name][0]) for stage in STAGES}
        with disk_full_explained("placing the artifact", store.folder, 0):
            records = {"run.json": record, SEARCH: search_data(folders["allocate"])}
            artifact = place(folders["package"], folders["gate"], records, out)
            if (out / EVIDENCE / ANSWERS).exists():
                open_sample(out)
            report = gather(out)
            page = write_report(out, report)
    judged = next(run for run in runs if run.name == "gate").facts
    review = review_status(out)
    worth = worth_a_look(report.gate) if report.gate is not None else []
    verdict = joined(judged["verdict"], review.verdict)
    return Built(
        folder=out,
        payload_digest=artifact.payload_digest,
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        rules=(*judged["rules"], *(f"worth a look: {text}" for text in worth), f"people: {review.reason}"),
        source_bytes=artifact.source_weight_bytes,
        weight_bytes=artifact.weight_bytes,
        report=page,
        run=record,
    )


def _drop_damaged_package(store: Store, key: str) -> None:
    """A cached payload is hashed before it is used again: its files are the artifact's own (hard links)."""
    folder = store.find("package", key)
    if folder is None:
        return
    try:
        open_artifact(folder / PAYLOAD)
    except CheckpointError:
        store.drop("package", key)


def run_stages(
    stages: Sequence[Stage],
    context: Context,
    store: Store,
    keys: Mapping[str, tuple[str, Inputs]],
    memory: PeakMemory,
    progress: Progress,
    check_interrupt: Callable[[], None],
) -> list[StageRun]:
    """Run what is not whole in the (locked) store, asking between stages whether to stop.

    A full disk is a PreflightError; what is whole stays.
    """
    folders: dict[str, Path] = {}
    runs: list[StageRun] = []
    for number, stage in enumerate(stages, 1):
        key, inputs = keys[stage.name]
        check_interrupt()
        progress.begin(stage.title, number, len(stages))
        begun = time.monotonic()
        folder = store.find(stage.name, key)
        cached = folder is not None
        if folder is None:
            collect_and_return()  # of the stages before
            memory.take()
            with disk_full_explained(stage.title, store.folder, stage.cost(context).disk_bytes):
                facts = stage.run(context, folders, store.begin(stage.name, key), progress)
                took = round(time.monotonic() - begun, 3)
                folder = store.keep(stage.name, key, inputs, facts, seconds=took, peak_anon_bytes=memory.take())
        folders[stage.name] = folder
        run = StageRun(stage.name, key, cached, **stage_cost(folder), facts=stage_facts(folder))
        runs.append(run)
        progress.end(run.seconds, cached=cached)
    check_interrupt()
    return runs


def _record(context: Context, runs: list[StageRun], started: datetime, seconds: float) -> dict[str, Any]:
    """`evidence/run/run.json`: what was asked, on what, and what each stage took (seconds, bytes)."""
    return {
        "recipe": context.loaded.resolved(),
        "recipe_file": str(context.loaded.path),
        "source": context.loaded.recipe.model.source,
        "source_fingerprint": context.source_fingerprint,
        "environment": context.environment,
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        "peak_anon_bytes": max(run.peak_anon_bytes for run in runs),
        "stages": [vars(run) for run in runs],
    }
