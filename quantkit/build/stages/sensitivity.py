"""sensitivity: what each scheme would do to each group's output, layer by layer.

Data-free but for the calibration ranges: weight error weighted by the mean square of the inputs. One file a layer, so
that a killed build goes on from the last whole one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from quantkit.build.context import Context, Outline
from quantkit.build.decisions import HEAD, UNQUANTIZED, group_bits
from quantkit.build.estimate import Cost, Sizes
from quantkit.build.files import write_json
from quantkit.build.progress import Progress
from quantkit.build.stage import Facts, Inputs, Stage
from quantkit.build.stages.calibrate import statistics
from quantkit.formats.integer import scale_dtype
from quantkit.formats.schemes import SCHEMES
from quantkit.models.source_weights import SourceWeights
from quantkit.program.ir import Weight
from quantkit.quantize.allocate import Option
from quantkit.quantize.rtn import rtn
from quantkit.quantize.sensitivity import weight_sensitivity

SEARCH_STEPS = 21
OPS_A_STEP = 12


def options(folder: Path) -> dict[str, list[Option]]:
    """`{group: its schemes with sensitivity and cost}`, in program order, from the stage's folder."""
    table: dict[str, list[Option]] = {}
    for path in sorted(folder.glob("layer-*.json")):
        for group, rows in json.loads(path.read_text(encoding="utf-8")).items():
            table[group] = [Option(**row) for row in rows]
    return table


def layers(context: Context) -> dict[int, list[str]]:
    """Decision units by layer, in program order."""
    by_layer: dict[int, list[str]] = {}
    for group in context.decisions.allowed:
        by_layer.setdefault(int(group.split(".")[1]), []).append(group)
    return by_layer


def stored_scale_type(context: Context) -> torch.dtype:
    """The 16-bit type that scales are stored in."""
    return scale_dtype(getattr(torch, context.program.source_dtype))


def _inputs(context: Context) -> Inputs:
    section = context.loaded.recipe.quantization
    return {"allowed": context.decisions.allowed, "scale_search": section.scale_search}


def _run(context: Context, needs: Mapping[str, Path], folder: Path, progress: Progress) -> Facts:
    squares, by_layer, groups = statistics(needs["calibrate"]).input_sq, layers(context), context.program.groups()
    for done, (layer, names) in enumerate(by_layer.items()):
        progress.step(done, len(by_layer), f"layer {layer}")
        path = folder / f"layer-{layer:05d}.json"
        if not path.exists():
            rows = {name: _options_of(context, groups[name], squares[name]) for name in names}
            write_json(path, {name: [vars(option) for option in row] for name, row in rows.items()})
    return {"groups": len(context.decisions.allowed)}


def _options_of(context: Context, weight: Weight, squares: torch.Tensor) -> list[Option]:
    """The group's allowed schemes; a pinned one costs nothing to look at."""
    section, group = context.loaded.recipe.quantization, str(weight.group)
    allowed, count = context.decisions.allowed[group], weight.shape[0] * weight.shape[1]
    matrix: torch.Tensor | None = None
    row: list[Option] = []
    for name in allowed:
        sensitivity = 0.0
        if name != UNQUANTIZED and len(allowed) > 1:
            matrix = SourceWeights(context.source).load(weight) if matrix is None else matrix
            quantized = rtn(
                matrix, SCHEMES[name], search=section.scale_search, scale_dtype=stored_scale_type(context), where=group
            )
            sensitivity = weight_sensitivity(matrix, quantized, squares)
        row.append(Option(name, sensitivity, group_bits(weight, SCHEMES[name]) / count, count))
    return row


def _cost(outline: Outline) -> Cost:
    sizes, section = Sizes.of(outline.program), outline.loaded.recipe.quantization
    steps = SEARCH_STEPS if section.scale_search == "mse" else 1
    groups = outline.program.groups()
    searched = sum(
        groups[g].shape[0] * groups[g].shape[1] * (len(schemes) - 1)
        for g, schemes in outline.decisions.allowed.items()
        if g != HEAD
    )
    return Cost(
        disk_bytes=1000 * len(outline.decisions.allowed),
        memory_bytes=sizes.group * (sizes.item + 1 + 4),
        element_ops=float(searched) * steps * OPS_A_STEP,
    )


STAGE = Stage("sensitivity", "Measure sensitivity", __name__, ("calibrate",), _inputs, _run, _cost)
