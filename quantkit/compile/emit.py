"""Emission: the kernels a program needs for each target, compiled and laid out as an artifact holds them.

    <target>/<kernel>-<16 hex digits>.cubin .ptx .json     machine code, its source, and how to launch it
    <target>/index.json                                    which kernels every node runs in each bucket class

Places that share a specialisation share a kernel, so that a model of any depth takes a dozen. Nodes without a kernel
are listed with the reason: a runtime serves them by other means.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from quantkit.compile.aot import specialisation, versions
from quantkit.compile.buckets import BucketClass
from quantkit.compile.cache import SUFFIXES, key_of, read_kernel
from quantkit.compile.crew import Job, compile_all
from quantkit.compile.places import Place, places
from quantkit.compile.targets import ptx_target
from quantkit.errors import PreflightError
from quantkit.program.ir import Program
from quantkit_kernels.triton import Fact, KernelSpec, kernels

INDEX = "index.json"
NO_KERNEL = "no Triton kernel"


@dataclass
class _Wanted:
    """What one target needs. launches: class -> node -> keys in launch order; missing: class -> node -> reason."""

    jobs: dict[str, Job] = field(default_factory=dict)
    launches: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    missing: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Emitted:
    """What an emission did: kernels by target, and how many of them were compiled now."""

    kernels: Mapping[str, int]
    compiled: int


def emit(
    program: Program,
    targets: Sequence[str],
    classes: Sequence[BucketClass],
    folder: Path,
    *,
    cache: Path,
    workers: int,
    step: Callable[[int, int, str], None],
) -> Emitted:
    """Fill `folder` with the kernels of a fused, lowered program for each target.

    cache: compiled kernels are taken from and kept in it. workers: processes that compile at once. step: hears
    `(done, total, what)`. PreflightError where Triton is missing or a kernel cannot be compiled for a target.
    """
    specs = _specs()
    wanted = {target: _wanted(program, target, classes, specs) for target in targets}
    absent = {
        target: [job for key, job in needs.jobs.items() if read_kernel(cache, key) is None]
        for target, needs in wanted.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    compile_all(absent, cache, workers, step, scratch=folder)
    for target, needs in wanted.items():
        _lay_out(folder / target, target, needs, cache)
    return Emitted(
        {target: len(needs.jobs) for target, needs in wanted.items()}, sum(len(jobs) for jobs in absent.values())
    )


def _specs() -> Sequence[KernelSpec]:
    try:
        specs = tuple(kernels().values())
    except ModuleNotFoundError as error:
        raise PreflightError(
            f"compiling needs {error.name}, which is not installed",
            next="pip install triton, or leave compile.targets empty",
        ) from None
    if not all(hasattr(spec.function, "cache_key") for spec in specs):
        raise PreflightError(
            "Triton interprets kernels in this process and compiles none", next="Unset TRITON_INTERPRET"
        )
    return specs


def _wanted(program: Program, target: str, classes: Sequence[BucketClass], specs: Sequence[KernelSpec]) -> _Wanted:
    needs, made_by = _Wanted(), versions(target)
    for bucket_class in classes:
        launches = needs.launches.setdefault(bucket_class.name, {})
        missing = needs.missing.setdefault(bucket_class.name, {})
        for node, asked in groupby(places(program, target, bucket_class), key=lambda place: place.node):
            chosen: list[tuple[KernelSpec, dict[str, Fact]]] = []
            refusals: list[str] = []
            for place in asked:
                found = choose(place, specs)
                if isinstance(found, str):
                    refusals.append(found)
                else:
                    chosen += [(spec, place.facts) for spec in found]
            if refusals:
                missing[node] = "; ".join(refusals)
                continue
            launches[node] = []
            for spec, facts in chosen:
                key = key_of(specialisation(spec, facts), target, made_by)
                needs.jobs.setdefault(key, Job(key, spec.function.__module__, spec.name, facts))
                launches[node].append(key)
    return needs


def choose(place: Place, specs: Sequence[KernelSpec]) -> list[KernelSpec] | str:
    """The kernels that a place launches one after another, or why there are none."""
    mine = [spec for spec in specs if spec.op == place.facts["op"] and place.facts["phase"] in spec.phases]
    if not mine:
        return NO_KERNEL
    chosen = []
    for launch in sorted({spec.launch for spec in mine}):
        refusals = {spec: spec.refusal(place.facts) for spec in mine if spec.launch == launch}
        fitting = next((spec for spec, reason in refusals.items() if reason is None), None)
        if fitting is None and all(spec.optional for spec in refusals):
            continue
        if fitting is None:
            return "; ".join(dict.fromkeys(str(reason) for reason in refusals.values()))
        chosen.append(fitting)
    return chosen


def _lay_out(folder: Path, target: str, needs: _Wanted, cache: Path) -> None:
    folder.mkdir(parents=True)
    names: dict[str, str] = {}
    for key, job in needs.jobs.items():
        made = read_kernel(cache, key)
        if made is None:
            raise PreflightError(
                f"{job.kernel} for {target} vanished from the cache", where=str(cache), next="Build again"
            )
        names[key] = f"{job.kernel}-{key[:16]}"
        for suffix in SUFFIXES:
            shutil.copyfile(made.file(suffix), folder / f"{names[key]}.{suffix}")
    index: dict[str, Any] = {
        "version": 1,
        "target": target,
        "ptx_target": ptx_target(target),
        "kernels": sorted(names.values()),
        "launches": {
            name: {node: [names[key] for key in keys] for node, keys in nodes.items()}
            for name, nodes in needs.launches.items()
        },
        "missing": needs.missing,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")
