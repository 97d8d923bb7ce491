"""What a build would do, said before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.build.context import Outline, open_context, outline_without_weights
from quantkit.build.data import check_data
from quantkit.build.estimate import IDLE_BYTES, Sizes, available_memory, kv_bytes_per_token
from quantkit.build.memory import anonymous_bytes
from quantkit.build.pipeline import STAGES
from quantkit.build.prediction import Prediction, predict
from quantkit.build.run import run_folder
from quantkit.build.stage import stage_keys
from quantkit.build.stages.allocate import STAGE as ALLOCATE
from quantkit.build.stages.allocate import chosen
from quantkit.build.stages.calibrate import STAGE as CALIBRATE
from quantkit.build.store import Store, stage_cost
from quantkit.calibration.pool import fill_pool
from quantkit.calibration.samples import read_samples
from quantkit.calibration.sampling import quotas
from quantkit.compile.cards import Card
from quantkit.recipe.load import LoadedRecipe


@dataclass(frozen=True)
class PlannedStage:
    """A stage with what it takes, about; figures of a cached one are those it took. Bytes and seconds."""

    name: str
    title: str
    cached: bool
    seconds: float
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class PlannedCell:
    """One category in one language: rows of the calibration data, samples taken of them unless rows repeat each other
    or are refused, and the profile's share of requests, where there is one."""

    category: str
    language: str
    rows: int
    samples: int
    wanted_share: float | None


@dataclass(frozen=True)
class Plan:
    """What `build` would do. `schemes[group]`: what it may take, one where settled; `settled` tells whether all are.

    `memory_bytes` is the largest of the stages still to run; `kv_bytes` the cache for `max_num_seqs` sequences of
    `max_model_len` tokens; `source_bytes` and `payload_bytes` the weights before and after; `calibration` what its data
    can give; `coverage` what it gave, once that stage is whole (`calibration.coverage`); `roofline` the predicted times
    on a card, where one was asked for; `notes` what the artifact will lack.
    """

    name: str
    source: str
    family: str
    parameters: int
    has_weights: bool
    stages: tuple[PlannedStage, ...]
    schemes: dict[str, tuple[str, ...]]
    settled: bool
    head: str
    budget_bits: float
    least_bits: float
    source_bytes: int
    payload_bytes: int
    kv_format: str
    kv_bytes_per_token: int
    kv_bytes: int
    max_model_len: int
    max_num_seqs: int
    seconds: float
    memory_bytes: int
    available_memory_bytes: int
    disk_bytes: int
    calibration: tuple[PlannedCell, ...]
    coverage: Mapping[str, Any] | None
    roofline: Prediction | None
    notes: tuple[str, ...]
    out: Path


def plan(loaded: LoadedRecipe, out: Path, card: Card | None = None, positions: int | None = None) -> Plan:
    """The plan of building `loaded` into `out`; raises every static problem with the recipe's line.

    card, positions: for `roofline`, and how many positions each sequence of a decode step then holds.
    Works for a folder that holds config.json and no weights; nothing is cached then.
    """
    outline = outline_without_weights(loaded)
    has_weights = outline is None
    store = Store(run_folder(out))
    whole: dict[str, Path] = {}
    if outline is None:
        outline = opened = open_context(loaded)
        if store.folder.is_dir():  # else nothing can be cached, and the source need not be hashed
            for name, (key, _) in stage_keys(STAGES, opened).items():
                folder = store.find(name, key)
                if folder is not None:
                    whole[name] = folder
    check_data(outline)
    stages = tuple(_stage(outline, number, whole) for number in range(len(STAGES)))
    decisions, recipe = outline.decisions, outline.loaded.recipe
    schemes = decisions.allowed
    if ALLOCATE.name in whole:
        schemes = {group: (scheme,) for group, scheme in chosen(whole[ALLOCATE.name]).items()}
    sizes = Sizes.of(outline.program)
    per_token = kv_bytes_per_token(outline.program, recipe.kv_cache.format)
    missing = [stage for stage in stages if not stage.cached]
    untied = 0 if sizes.tied else sizes.head
    return Plan(
        name=loaded.name,
        source=recipe.model.source,
        family=outline.spec.family,
        parameters=sizes.units + sizes.table + untied,
        has_weights=has_weights,
        stages=stages,
        schemes=schemes,
        settled=all(len(names) == 1 for names in schemes.values()),
        head=decisions.head,
        budget_bits=decisions.budget_bits,
        least_bits=decisions.least_bits(outline.program),
        source_bytes=(sizes.units + sizes.table + untied) * sizes.item,
        payload_bytes=sizes.payload_bytes(min(decisions.budget_bits, 16.0), decisions.head),
        kv_format=recipe.kv_cache.format,
        kv_bytes_per_token=per_token,
        kv_bytes=per_token * outline.max_model_len * recipe.runtime.max_num_seqs,
        max_model_len=outline.max_model_len,
        max_num_seqs=recipe.runtime.max_num_seqs,
        seconds=sum(stage.seconds for stage in missing),
        memory_bytes=max((stage.memory_bytes for stage in missing), default=0),
        available_memory_bytes=available_memory(),
        disk_bytes=sum(stage.disk_bytes for stage in missing),
        calibration=_cells(outline),
        coverage=read_samples(whole[CALIBRATE.name]).coverage if CALIBRATE.name in whole else None,
        roofline=predict(outline, schemes, card, positions) if card is not None else None,
        notes=outline.notes(),
        out=out,
    )


def _cells(outline: Outline) -> tuple[PlannedCell, ...]:
    """From the data's rows alone: lengths and refusals take a tokenizer."""
    section, profile = outline.loaded.recipe.calibration, outline.profile()
    rows = fill_pool(outline.data_files("calibration"), profile, per_cell=0, seed=section.seed).cells
    samples = quotas(rows, section.max_samples, profile)
    cells = {key: profile.cell(*key) if profile is not None else None for key in sorted(samples)}
    return tuple(
        PlannedCell(*key, rows.get(key, 0), samples[key], cell.share if cell is not None else None)
        for key, cell in cells.items()
    )


def _stage(outline: Outline, number: int, whole: dict[str, Path]) -> PlannedStage:
    stage = STAGES[number]
    if stage.name in whole:
        took = stage_cost(whole[stage.name])
        return PlannedStage(stage.name, stage.title, True, took["seconds"], took["peak_anon_bytes"], 0)
    cost = stage.cost(outline)
    memory = cost.memory_bytes + max(anonymous_bytes(), IDLE_BYTES)
    return PlannedStage(stage.name, stage.title, False, cost.seconds(), memory, cost.disk_bytes)
