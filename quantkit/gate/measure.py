"""Runs everything a verdict rests on: baseline, noise floor, the artifact, the ladder; one executor at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quantkit.artifact.read import Artifact
from quantkit.formats.schemes import SCHEMES
from quantkit.gate.audit_cache import CacheUse, RangeWatch, audit_cache
from quantkit.gate.data import EvalSet
from quantkit.gate.domains import json_tokens
from quantkit.gate.evaluate import Baseline, Compared, Tick, Variant
from quantkit.gate.rungs import INT4, INT8, baseline, count_parameters, rung
from quantkit.gate.verdict import Coverage, Measured
from quantkit.models import ModelSource
from quantkit.runtime.text import ChatText

FLOOR_WINDOWS = 4
"""Windows of the noise floor: an invariant runtime gives zero on any of them."""
INT8_WINDOWS = 8
"""Windows of RTN-INT8, which is only there for orientation: no limit is a share of it."""


class Progress(Protocol):
    """Hears what the gate is at; a build's progress will do."""

    def step(self, done: int, total: int, what: str) -> None:
        """`done` of `total` tokens are through."""
        ...


@dataclass(frozen=True)
class Results:
    """What was measured, each variant's comparison by name, how the cache was used, the seconds each took."""

    measured: Measured
    compared: dict[str, Compared]
    cache: tuple[CacheUse, ...]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Models:
    """What is compared, each loaded when it is run. `spill`: folder for whole models (see Executor)."""

    artifact: Artifact
    source: ModelSource
    threads: int
    backend: str
    spill: Path | None

    @property
    def baseline(self) -> Variant:
        """The unquantized source."""
        return baseline(self.source, self.threads, self.backend, self.spill)

    @property
    def candidate(self) -> Variant:
        """The artifact as it is served."""
        return Variant("artifact", self.artifact.program, self.artifact, self.threads, self.backend, self.spill)

    def rung(self, name: str) -> Variant:
        """RTN-INT4 or RTN-INT8 of the source."""
        return rung(self.source, name, self.threads, self.backend, self.spill)


def measure(
    models: Models,
    data: EvalSet,
    text: ChatText,
    told: Told,
) -> Results:
    """Compare the artifact, and the ladder, with the baseline on `data`, which `text` tokenized."""
    artifact, reference, candidate = models.artifact, models.baseline, models.candidate
    floor, few = data.windows[:FLOOR_WINDOWS], data.windows[:INT8_WINDOWS]
    compared: dict[str, Compared] = {}
    seconds: dict[str, float] = {}
    began = time.monotonic()
    ranges, codes = RangeWatch(), RangeWatch()
    base = Baseline(reference, data, told.about("baseline"), floor_windows=len(floor), watch=ranges)
    compared["noise floor"] = base.floor
    seconds["baseline"] = round(time.monotonic() - began, 2)
    for variant, windows in ((candidate, None), (models.rung(INT8), len(few)), (models.rung(INT4), None)):
        began = time.monotonic()
        watch = codes if variant is candidate else None
        compared[variant.name] = base.compare(variant, told.about(variant.name), windows=windows, watch=watch)
        seconds[variant.name] = round(time.monotonic() - began, 2)
    measured = Measured(
        windows=data.windows,
        candidate=compared["artifact"].scores,
        ladder={INT4: compared[INT4].scores},
        floor=compared["noise floor"].scores,
        parameters=count_parameters(reference.program),
        least_bits=_least_bits(artifact),
        coverage=_coverage(artifact, compared["artifact"].backend, models.threads),
        in_json=json_tokens(data.windows, text),
    )
    return Results(measured, compared, audit_cache(artifact, codes, ranges), seconds)


def cost(data: EvalSet) -> int:
    """Tokens that `measure` runs."""
    some = (*data.windows[:FLOOR_WINDOWS], *data.windows[:INT8_WINDOWS])
    return 3 * data.tokens + sum(len(window.ids) for window in some)


class Told:
    """Adds up the tokens of all variants for one progress bar."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def about(self, what: str) -> Tick:
        """A tick that names `what` is running."""

        def tick(tokens: int) -> None:
            self._done += tokens
            if self._progress is not None:
                self._progress.step(self._done, self._total, what)

        return tick


def _least_bits(artifact: Artifact) -> int:
    schemes = [SCHEMES[weight.scheme] for weight in artifact.program.groups().values()]
    return min((scheme.bits for scheme in schemes), default=16)


def _coverage(artifact: Artifact, backend: str, threads: int) -> Coverage:
    kind, _, isa = backend.partition(":")
    formats = sorted({kv.format for kv in artifact.program.kv})
    return Coverage(kind, isa, artifact.program.compute, "+".join(formats), threads)
