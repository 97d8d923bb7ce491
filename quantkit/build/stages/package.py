"""package: the sealed payload. What the gate asks is no part of it, so that judging anew never changes its digest."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit import __version__
from quantkit.artifact.manifest import Manifest
from quantkit.artifact.write import write_payload
from quantkit.build.context import Context, Outline
from quantkit.build.decisions import HEAD
from quantkit.build.estimate import Cost, Sizes
from quantkit.build.lowered import lowered_program
from quantkit.build.progress import Progress
from quantkit.build.stage import PAYLOAD, Facts, Inputs, Stage
from quantkit.build.stages.allocate import chosen
from quantkit.build.stages.quantize import head_is_stored, read_group, scales_of_cache
from quantkit.build.store import stage_facts
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.schemes import SCHEMES
from quantkit.models.source_weights import SourceWeights
from quantkit.program.ir import Program
from quantkit_kernels.arrays import Array


def sealed_recipe(context: Context) -> dict[str, Any]:
    """The resolved recipe without what only judges: the part that the payload depends on."""
    recipe = context.loaded.resolved()
    recipe.pop("gate")
    recipe["set"] = [option for option in recipe["set"] if not option.strip().startswith("gate.")]
    recipe["runtime"] = {**recipe["runtime"], "max_model_len": context.max_model_len}
    return recipe


def _inputs(context: Context) -> Inputs:
    return {"recipe": sealed_recipe(context)}


def _run(context: Context, needs: Mapping[str, Path], folder: Path, progress: Progress) -> Facts:
    for left in folder.iterdir():  # a payload is sealed in one go; a killed run's part is of no use
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    schemes = {**chosen(needs["allocate"]), HEAD: context.decisions.head}
    kv_format = context.loaded.recipe.kv_cache.format
    program = lowered_program(context, schemes)
    calibrated = stage_facts(needs["calibrate"])
    manifest = Manifest(
        quantkit_version=__version__,
        source={
            "location": context.loaded.recipe.model.source,
            "fingerprint": context.source_fingerprint,
            "family": context.source.spec.family,
            "dtype": context.source.spec.dtype,
        },
        recipe=sealed_recipe(context),
        schemes=schemes,
        kv_format=kv_format,
        calibration={key: calibrated[key] for key in ("samples", "tokens", "fingerprint")},
        environment=context.environment,
        checks={"import_parity": stage_facts(needs["import"])["sealed"]},
    )
    digest = write_payload(
        folder / PAYLOAD,
        source=context.source,
        program=program,
        weights=_weights(context, program, needs, progress),
        manifest=manifest,
        compiled=needs["compile"],
    )
    return {"payload_digest": digest}


def _weights(
    context: Context, program: Program, needs: Mapping[str, Path], progress: Progress
) -> Iterator[tuple[Any, Array | QuantizedMatrix]]:
    source, cache_scales = SourceWeights(context.source), scales_of_cache(context, needs["calibrate"])
    for done, weight in enumerate(program.weights.values()):
        progress.step(done, len(program.weights), weight.name)
        if weight.kind == "scales":
            yield weight, cache_scales[weight.name]
        elif weight.kind == "matrix" and SCHEMES[weight.scheme].quantized:
            if weight.group != HEAD or head_is_stored(context):
                yield weight, read_group(needs["quantize"], str(weight.group), weight.scheme)
        else:
            yield weight, source.load(weight)


def _cost(outline: Outline) -> Cost:
    sizes = Sizes.of(outline.program)
    bits = min(outline.decisions.budget_bits, 16.0)
    return Cost(
        disk_bytes=sizes.payload_bytes(bits, outline.decisions.head) + 20_000_000,
        memory_bytes=max(sizes.table, sizes.group) * sizes.item * 2,
        element_ops=8.0 * (sizes.units + sizes.table),
    )


STAGE = Stage(
    "package", "Package", __name__, ("import", "calibrate", "allocate", "quantize", "compile"), _inputs, _run, _cost
)
