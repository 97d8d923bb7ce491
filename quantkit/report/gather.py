"""Gathers a Report from an artifact's payload and the evidence beside it. Reads small files only, no weights."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.artifact import layout
from quantkit.artifact.kernels import read_buckets, read_kernels
from quantkit.artifact.read import Artifact, open_artifact
from quantkit.compile.table import as_data
from quantkit.errors import CheckpointError
from quantkit.formats.schemes import SCHEMES
from quantkit.gate.evidence import FOLDER, read_evidence
from quantkit.gate.run import ANSWERS, DETAILS
from quantkit.program.ir import Program, Weight
from quantkit.report.answers import worst_answers
from quantkit.report.model import Bytes, Cell, Memory, Report, Stage
from quantkit.review.status import review_status
from quantkit.runtime.memory import KV_BYTES

RUN = Path("run") / "run.json"
SEARCH = Path("run") / "search.json"
KINDS = (
    "embedding",
    "output head, 16-bit",
    "attention output, 16-bit",
    "other matrices, 16-bit",
    "INT8",
    "INT4",
    "norms and biases",
)


def gather(path: Path | str) -> Report:
    """The report of the artifact at `path`. CheckpointError when it or its evidence cannot be trusted."""
    artifact = open_artifact(path, check="sizes")
    evidence = artifact.folder / FOLDER
    gate = read_evidence(evidence / DETAILS, artifact.payload_digest)
    run = read_evidence(evidence / RUN, artifact.payload_digest)
    search = read_evidence(evidence / SEARCH, artifact.payload_digest)
    review = review_status(artifact.folder).as_dict()
    try:
        return _report(artifact, gate, run, search, review)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"the evidence is not of the form this version writes ({error!r})",
            where=str(evidence),
            next="Build again, or remove the folder and run quantkit gate",
        ) from error


def _report(
    artifact: Artifact,
    gate: dict[str, Any] | None,
    run: dict[str, Any] | None,
    search: dict[str, Any] | None,
    review: dict[str, Any],
) -> Report:
    gptq = _facts(run, "quantize").get("gptq")
    answers = artifact.folder / FOLDER / ANSWERS
    answered = gate is not None and gate["answers"] is not None  # else the file is an earlier judgement's
    return Report(
        name=artifact.folder.resolve().name,
        payload_digest=artifact.payload_digest,
        source=dict(artifact.manifest.source),
        memory=_memory(artifact),
        layers=_layers(artifact.program, search, gptq),
        gate=gate,
        calibration={**artifact.manifest.calibration, **_calibrated(run)},
        checks=dict(artifact.manifest.checks),
        run=None if run is None else {key: run[key] for key in _RUN_KEYS if key in run},
        stages=tuple(_stage(row) for row in (run or {}).get("stages", ())),
        commands=_commands(artifact, run),
        version=__version__,
        review=review,
        answers=worst_answers(answers, artifact.payload_digest) if answered and answers.exists() else (),
        search=search,
        gptq=None if gptq is None else {key: gptq[key] for key in ("fallbacks", "damping")},
        kernels=_kernels(artifact),
    )


_RUN_KEYS = ("recipe_file", "started", "seconds", "peak_anon_bytes", "environment")


def _memory(artifact: Artifact) -> Memory:
    program = artifact.program
    tables = layout.tied_tables(program)
    before, after = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    counted: set[str] = set()
    for weight in program.weights.values():
        if weight.kind == "scales" or layout.is_derived(weight, tables):
            continue
        kind = _kind(weight)
        width = weight.shape[1] if len(weight.shape) == 2 else 1
        for part in weight.parts:
            before[kind] += 2 * width * (part.stop - part.start)
            for name in _stored_names(weight, part.tensor):
                if name in artifact.tensors and name not in counted:
                    counted.add(name)
                    after[kind] += artifact.tensors[name].size
    kinds = tuple(Bytes(kind, before[kind], after[kind]) for kind in KINDS if before[kind] or after[kind])
    elements = sum(2 * kv.num_kv_heads * kv.head_dim for kv in program.kv)
    stored = sum(2 * kv.num_kv_heads * kv.head_dim * KV_BYTES[kv.format] for kv in program.kv)
    formats = "+".join(sorted({kv.format for kv in program.kv}))
    payload = sum(entry.size for entry in artifact.manifest.files.values())
    return Memory(kinds, formats, 2 * elements, stored, payload)


def _kind(weight: Weight) -> str:
    if weight.kind == "table":
        return "embedding"
    if weight.kind == "vector":
        return "norms and biases"
    bits = SCHEMES[weight.scheme].bits
    if bits < 16:
        return f"INT{bits}"
    if weight.group == "lm_head":
        return "output head, 16-bit"
    return "attention output, 16-bit" if (weight.group or "").endswith(".o") else "other matrices, 16-bit"


def _stored_names(weight: Weight, tensor: str) -> list[str]:
    if weight.kind != "matrix" or not SCHEMES[weight.scheme].quantized:
        return [tensor]
    module = layout.module_of(tensor)
    return [f"{module}.weight_{part}" for part in ("packed", "scale", "shape", "zero_point")]


def _layers(program: Program, search: Mapping[str, Any] | None, gptq: Mapping[str, Any] | None) -> tuple[Cell, ...]:
    priced = {row["group"]: _narrowest(row["options"]) for row in (search or {}).get("groups", ())}
    errors = (gptq or {}).get("loss_of_rtn", {})
    cells = []
    for group, weight in program.groups().items():
        words = group.split(".")
        layer, scheme = int(words[1]) if words[0] == "layers" else None, weight.scheme
        bits = SCHEMES[scheme].bits
        cells.append(Cell(group, layer, words[-1], scheme, bits, priced.get(group), errors.get(group)))
    return tuple(cells)


def _narrowest(options: Sequence[Mapping[str, Any]]) -> float:
    """The sensitivity of the scheme of fewest bits."""
    return float(min(options, key=lambda option: option["bits"])["sensitivity"])


def _kernels(artifact: Artifact) -> dict[str, Any] | None:
    targets, buckets = read_kernels(artifact), read_buckets(artifact)
    return as_data(targets, buckets) if targets or buckets else None


def _stage(row: Mapping[str, Any]) -> Stage:
    return Stage(str(row["name"]), float(row["seconds"]), int(row["peak_anon_bytes"]), bool(row["cached"]))


def _calibrated(run: Mapping[str, Any] | None) -> dict[str, Any]:
    facts = _facts(run, "calibrate")
    return {"coverage": facts.get("coverage", {})} if facts else {}


def _facts(run: Mapping[str, Any] | None, stage: str) -> Mapping[str, Any]:
    """What a stage of the build found out; nothing where it isn't recorded."""
    found = (row["facts"] for row in (run or {}).get("stages", ()) if row["name"] == stage)
    return next(found, {})


def _commands(artifact: Artifact, run: Mapping[str, Any] | None) -> tuple[str, ...]:
    recipe = str((run or {}).get("recipe_file") or "recipe.yaml")
    sets = [f"--set {shlex.quote(option)}" for option in ((run or {}).get("recipe") or {}).get("set", ())]
    folder = shlex.quote(str(artifact.folder))
    return (
        " ".join(["quantkit build", shlex.quote(recipe), *sets, "--out", folder]),
        f"quantkit verify {folder}",
        f"quantkit gate {folder}",
        f"quantkit review {folder}",
        f"quantkit report {folder}",
    )
