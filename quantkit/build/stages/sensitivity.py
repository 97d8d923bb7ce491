"""sensitivity: what each scheme would do to the model, group by group, layer by layer.

By gradients: the predicted mean KL divergence of the model's next-token distribution. By weights: the error of the
group's own output. One file a layer, so that a killed build goes on from the last whole one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from quantkit.build.context import Context, Outline
from quantkit.build.decisions import UNQUANTIZED, group_bits
from quantkit.build.estimate import Cost, Sizes
from quantkit.build.files import write_json
from quantkit.build.progress import Progress
from quantkit.build.stage import Facts, Inputs, Stage
from quantkit.build.stages.calibrate import statistics
from quantkit.calibration.samples import read_samples
from quantkit.formats.integer import scale_dtype
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.schemes import SCHEMES
from quantkit.models.source_weights import SourceWeights
from quantkit.program.ir import Weight
from quantkit.quantize.allocate import Option
from quantkit.quantize.gradients import STEP_TOKENS, GradientWalk, Tap, choose
from quantkit.quantize.rtn import rtn
from quantkit.quantize.sensitivity import loss_changes, predicted_kl, weight_error, weight_sensitivity

TOKENS = 4096
"""Calibration tokens that gradients are taken on, about."""
SEARCH_STEPS = 21
OPS_A_STEP = 12
_WORK = "work"

Price = Callable[[Tensor, QuantizedMatrix], float]
"""(a group's matrix, one quantized form of it) -> sensitivity."""


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


def stored_scale_type(context: Context) -> np.dtype[Any]:
    """The 16-bit type that scales are stored in."""
    return scale_dtype(context.program.source_dtype)


def method(outline: Outline) -> str:
    """`gradient` or `weight` as the recipe says; `none` where every group is pinned."""
    pinned = len(outline.decisions.pinned) == len(outline.decisions.allowed)
    return "none" if pinned else outline.loaded.recipe.quantization.sensitivity


def rounded(context: Context, weight: Weight, scheme: str, matrix: Tensor | None = None) -> QuantizedMatrix:
    """A group's matrix (read where not given) rounded to a scheme, as schemes are compared."""
    return rtn(
        SourceWeights(context.source).tensor(weight) if matrix is None else matrix,
        SCHEMES[scheme],
        search=context.loaded.recipe.quantization.scale_search,
        scale_dtype=stored_scale_type(context),
        where=str(weight.group),
    )


def _inputs(context: Context) -> Inputs:
    section = context.loaded.recipe.quantization
    inputs = {"allowed": context.decisions.allowed, "scale_search": section.scale_search, "method": method(context)}
    return inputs | ({"seed": context.loaded.recipe.calibration.seed} if inputs["method"] == "gradient" else {})


def _run(context: Context, needs: Mapping[str, Path], folder: Path, progress: Progress) -> Facts:
    facts: Facts = {"groups": len(context.decisions.allowed), "method": method(context)}
    if facts["method"] == "gradient":
        return facts | _by_gradients(context, needs["calibrate"], folder, progress)
    squares, by_layer = statistics(needs["calibrate"]).input_sq, layers(context)
    for done, (layer, names) in enumerate(by_layer.items()):
        progress.step(done, len(by_layer), f"layer {layer}")
        if not _file(folder, layer).exists():
            prices = {name: _by_weight(squares[name]) for name in names}
            _write(context, _file(folder, layer), prices)
    return facts


def _by_gradients(context: Context, calibrated: Path, folder: Path, progress: Progress) -> Facts:
    """Layers from the last to the first, as the gradients come."""
    by_layer, work = layers(context), folder / _WORK
    seed = context.loaded.recipe.calibration.seed
    samples = choose(read_samples(calibrated).samples, TOKENS, seed)
    lengths = [len(sample.ids) for sample in samples.samples]
    total = 2 * len(by_layer) + 2
    if not all(_file(folder, layer).exists() for layer in by_layer):
        work.mkdir(exist_ok=True)
        walk = GradientWalk(context.source, context.program, samples, work, seed=seed)
        first = walk.begin(lambda done, what: progress.step(done, total, f"{what}, forwards"))
        for layer in range(first - 1, -1, -1):
            progress.step(total - 1 - layer, total, f"layer {layer}, backwards")
            names = [name for name in by_layer[layer] if len(context.decisions.allowed[name]) > 1]
            taps = walk.taps(layer, names)
            prices = {name: _by_gradient(tap, lengths) for name, tap in taps.items()}
            _write(context, _file(folder, layer), {name: prices.get(name) for name in by_layer[layer]})
            del taps
            walk.finish(layer)
    shutil.rmtree(work, ignore_errors=True)
    return {"samples": len(samples.samples), "tokens": samples.tokens}


def _by_weight(input_sq: Tensor) -> Price:
    return lambda matrix, quantized: weight_sensitivity(matrix, quantized, input_sq)


def _by_gradient(tap: Tap, lengths: Sequence[int]) -> Price:
    return lambda matrix, quantized: predicted_kl(loss_changes(tap, weight_error(matrix, quantized)), lengths)


def _file(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:05d}.json"


def _write(context: Context, path: Path, prices: Mapping[str, Price | None]) -> None:
    groups = context.program.groups()
    rows = {name: _options_of(context, groups[name], price) for name, price in prices.items()}
    write_json(path, {name: [vars(option) for option in row] for name, row in rows.items()})


def _options_of(context: Context, weight: Weight, price: Price | None) -> list[Option]:
    """The group's allowed schemes; a pinned one costs nothing to look at."""
    group = str(weight.group)
    allowed, count = context.decisions.allowed[group], weight.shape[0] * weight.shape[1]
    matrix: Tensor | None = None
    row: list[Option] = []
    for name in allowed:
        sensitivity = 0.0
        if name != UNQUANTIZED and len(allowed) > 1 and price is not None:
            matrix = SourceWeights(context.source).tensor(weight) if matrix is None else matrix
            sensitivity = price(matrix, rounded(context, weight, name, matrix))
        row.append(Option(name, sensitivity, group_bits(weight, SCHEMES[name]) / count, count))
    return row


def _cost(outline: Outline) -> Cost:
    sizes, section = Sizes.of(outline.program), outline.loaded.recipe.quantization
    steps = SEARCH_STEPS if section.scale_search == "mse" else 1
    groups = outline.program.groups()
    weighed = [
        groups[group].shape[0] * groups[group].shape[1] * (len(schemes) - 1)
        for group, schemes in outline.decisions.allowed.items()
    ]
    rounding = Cost(
        disk_bytes=1000 * len(outline.decisions.allowed),
        memory_bytes=sizes.group * (sizes.item + 1 + 4),
        element_ops=float(sum(weighed)) * steps * OPS_A_STEP,
    )
    if method(outline) != "gradient":
        return rounding
    # forwards, forwards again, backwards; the head both ways once; each scheme's error once
    tokens = min(TOKENS, outline.loaded.recipe.calibration.max_samples * outline.loaded.recipe.calibration.max_tokens)
    widest = sum(weight.shape[0] + weight.shape[1] for name, weight in groups.items() if name.startswith("layers.0."))
    walk = Cost(
        disk_bytes=tokens * 8 * sizes.hidden * (sizes.layers + 3),
        memory_bytes=max(4 * sizes.layer + tokens * 4 * widest + STEP_TOKENS * 16 * widest, 4 * sizes.head + (1 << 28)),
        multiply_adds=float(tokens) * (3 * sizes.units + 2 * sizes.head + sum(weighed)),
    )
    return walk + rounding


STAGE = Stage("sensitivity", "Measure sensitivity", __name__, ("calibrate",), _inputs, _run, _cost)
