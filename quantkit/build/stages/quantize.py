"""quantize: the chosen codes and scales, one file a layer, so that a killed build goes on from the last whole one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from quantkit.build.context import Context, Outline
from quantkit.build.decisions import HEAD
from quantkit.build.estimate import Cost, Sizes
from quantkit.build.files import finish_file, write_json
from quantkit.build.progress import Progress
from quantkit.build.stage import Facts, Inputs, Stage
from quantkit.build.stages.allocate import chosen
from quantkit.build.stages.calibrate import statistics
from quantkit.build.stages.sensitivity import OPS_A_STEP, SEARCH_STEPS, layers, stored_scale_type
from quantkit.calibration.samples import read_samples
from quantkit.errors import NumericsError
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.schemes import SCHEMES
from quantkit.models.source_weights import SourceWeights
from quantkit.program import lower_precision
from quantkit.quantize.gptq import Damped, gptq
from quantkit.quantize.kv import kv_scales
from quantkit.quantize.rtn import rtn
from quantkit.quantize.sequential import LayerWalk
from quantkit_kernels.arrays import Array
from quantkit_kernels.cache_formats import CACHE_FORMATS

MOST_FALLBACKS = 0.02
"""Share of the matrices that may be rounded to nearest because their Hessian has no factor."""
_WORK = "work"


def read_group(folder: Path, group: str, scheme: str) -> QuantizedMatrix:
    """One group's quantized matrix, from the stage's folder."""
    with safe_open(folder / _file_of(group), framework="numpy") as file:
        held = set(file.keys())
        codes, scale = file.get_tensor(f"{group}.codes"), file.get_tensor(f"{group}.scale")
        zero = file.get_tensor(f"{group}.zero") if f"{group}.zero" in held else None
    return QuantizedMatrix(SCHEMES[scheme], codes, scale, zero)


def head_is_stored(outline: Outline) -> bool:
    """Whether the head is quantized and written: a tied one is derived from the embedding at load instead."""
    return SCHEMES[outline.decisions.head].quantized and not Sizes.of(outline.program).tied


def scales_of_cache(context: Context, calibrated: Path) -> dict[str, Array]:
    """Scales float32 `[Hkv, D]` by weight name, of a quantized cache; none for a float one."""
    section = context.loaded.recipe.kv_cache
    if not CACHE_FORMATS[section.format].scaled:
        return {}
    ranges = statistics(calibrated).kv_range(section.percentile)
    return {f"{name}_scale": kv_scales(value, section.format, where=name) for name, value in ranges.items()}


def _file_of(group: str) -> str:
    return f"{HEAD}.safetensors" if group == HEAD else f"layer-{int(group.split('.')[1]):05d}.safetensors"


def _inputs(context: Context) -> Inputs:
    recipe = context.loaded.recipe
    section = recipe.quantization
    inputs: Inputs = {
        "method": section.method,
        "scale_search": section.scale_search,
        "head": context.decisions.head if head_is_stored(context) else None,
    }
    if section.method == "gptq":
        inputs |= {"gptq": section.gptq.model_dump(), "kv_cache": recipe.kv_cache.model_dump()}
    return inputs


def _run(context: Context, needs: Mapping[str, Path], folder: Path, progress: Progress) -> Facts:
    schemes = chosen(needs["allocate"])
    quantized = {group: scheme for group, scheme in schemes.items() if SCHEMES[scheme].quantized}
    facts: Facts = {"groups": len(quantized) + head_is_stored(context)}
    if context.loaded.recipe.quantization.method == "gptq":
        facts["gptq"] = _by_gptq(context, needs, schemes, folder, progress)
    else:
        for done, names in enumerate(layers(context).values()):
            progress.step(done, len(layers(context)), f"layer {done}")
            _save_missing(folder, {name: quantized[name] for name in names if name in quantized}, context)
    if head_is_stored(context):
        progress.step(1, 1, HEAD)
        _save_missing(folder, {HEAD: context.decisions.head}, context)
    return facts


def _by_gptq(
    context: Context, needs: Mapping[str, Path], schemes: Mapping[str, str], folder: Path, progress: Progress
) -> dict[str, Any]:
    """Every layer in turn, its inputs made by the quantized ones before it; the losses by group."""
    work, parts = folder / _WORK, list(layers(context).items())
    work.mkdir(exist_ok=True)
    kv_format = context.loaded.recipe.kv_cache.format
    walk = LayerWalk(
        context.source,
        context.program,
        lower_precision(context.program, schemes, kv_format),
        read_samples(needs["calibrate"]),
        scales_of_cache(context, needs["calibrate"]),
        work,
    )
    whole = next((i for i, (layer, _) in enumerate(parts) if not _record_of(folder, layer).exists()), len(parts))
    first, found = walk.begin(whole), dict[str, Damped]()
    for layer, names in parts:
        names = [name for name in names if SCHEMES[schemes[name]].quantized]
        record = _record_of(folder, layer)
        what = f"layer {layer}"
        if layer >= first:
            progress.step(layer, len(parts), _with_loss(what, found))
            if not record.exists():
                _quantize_layer(context, walk.hessians(layer), {name: schemes[name] for name in names}, folder, record)
        found |= {name: Damped(**row) for name, row in json.loads(record.read_text(encoding="utf-8")).items()}
        _require_few_fallbacks(found, len(schemes))
        if first <= layer < parts[-1][0]:
            walk.advance(layer, {name: read_group(folder, name, schemes[name]) for name in names})
    walk.end()
    shutil.rmtree(work)
    return {
        "fallbacks": [name for name, one in found.items() if one.damping is None],
        "damping": {name: one.damping for name, one in found.items()},
        "loss_of_rtn": {name: one.loss / one.rtn_loss if one.rtn_loss else 1.0 for name, one in found.items()},
    }


def _quantize_layer(
    context: Context, hessians: Mapping[str, Tensor], schemes: Mapping[str, str], folder: Path, record: Path
) -> None:
    """Write the codes of one layer, then the record that says they are whole."""
    section, groups = context.loaded.recipe.quantization, context.program.groups()
    made: dict[str, QuantizedMatrix] = {}
    found: dict[str, Damped] = {}
    for group, scheme in schemes.items():
        made[group], found[group] = gptq(
            SourceWeights(context.source).tensor(groups[group]),
            hessians[group],
            SCHEMES[scheme],
            scale_dtype=stored_scale_type(context),
            search=section.scale_search,
            damping=section.gptq.damping,
            block=section.gptq.block,
            act_order=section.gptq.act_order,
            where=group,
        )
    if made:
        _save(folder / _file_of(next(iter(made))), made)
    write_json(record, {group: vars(one) for group, one in found.items()})


def _require_few_fallbacks(found: Mapping[str, Damped], total: int) -> None:
    failed = [name for name, one in found.items() if one.damping is None]
    if len(failed) > MOST_FALLBACKS * total:
        raise NumericsError(
            f"GPTQ found no factor of the Hessian of {len(failed)} of {total} groups",
            where=", ".join(failed[:4]),
            next="Calibrate on more or more varied samples, raise quantization.gptq.damping, or set method: rtn",
        )


def _with_loss(what: str, found: Mapping[str, Damped]) -> str:
    """The layer, and what the one before it lost against rounding to nearest."""
    last = list(found.values())[-4:]
    rtn_loss = sum(one.rtn_loss for one in last)
    return f"{what}, error {sum(one.loss for one in last) / rtn_loss:.2f} of rounding's" if rtn_loss else what


def _record_of(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:05d}.json"


def _save_missing(folder: Path, schemes: Mapping[str, str], context: Context) -> None:
    """Round to nearest what is not there yet, one layer or the head."""
    if not schemes:
        return
    path = folder / _file_of(next(iter(schemes)))
    if not path.exists():
        _save(path, dict(_by_rtn(context, schemes)))


def _by_rtn(context: Context, schemes: Mapping[str, str]) -> Iterator[tuple[str, QuantizedMatrix]]:
    search, groups = context.loaded.recipe.quantization.scale_search, context.program.groups()
    for group, scheme in schemes.items():
        matrix = SourceWeights(context.source).tensor(groups[group])
        yield (
            group,
            rtn(matrix, SCHEMES[scheme], search=search, scale_dtype=stored_scale_type(context), where=group),
        )


def _save(path: Path, matrices: Mapping[str, QuantizedMatrix]) -> None:
    tensors: dict[str, Array] = {}
    for group, quantized in matrices.items():
        tensors |= {f"{group}.codes": quantized.codes, f"{group}.scale": quantized.scale}
        if quantized.zero is not None:
            tensors[f"{group}.zero"] = quantized.zero
    part = path.with_name(f".part-{path.name}")
    save_file(tensors, part)
    finish_file(part, path)


def _cost(outline: Outline) -> Cost:
    sizes, recipe = Sizes.of(outline.program), outline.loaded.recipe
    section = recipe.quantization
    steps = SEARCH_STEPS if section.scale_search == "mse" else 1
    head = sizes.head if head_is_stored(outline) else 0
    cost = Cost(
        disk_bytes=int((sizes.units + head) * 1.1),
        memory_bytes=sizes.layer + max(sizes.group, head) * (sizes.item + 1),
        element_ops=float(sizes.units + head) * steps * OPS_A_STEP,
    )
    return cost if section.method == "rtn" else cost + _gptq_cost(outline)


def _gptq_cost(outline: Outline) -> Cost:
    """Two passes and the Hessians over all tokens, then about 2 K^2 (N + K) multiply-adds a group."""
    sizes, calibration = Sizes.of(outline.program), outline.loaded.recipe.calibration
    tokens = calibration.max_samples * min(calibration.max_tokens, outline.program.max_position)
    shapes = [outline.program.groups()[group].shape for group in outline.decisions.allowed]
    columns = [shape[1] for shape in shapes]
    return Cost(
        disk_bytes=tokens * sizes.hidden * 4 * 4,
        memory_bytes=4 * (4 * max(columns) ** 2 + 2 * sizes.group) + sum(4 * k * k for k in set(columns)),
        multiply_adds=2.0 * tokens * sizes.units
        + sum(tokens * k * k for k in columns)
        + sum(float(k) * k * (n + 2 * k) for n, k in shapes),
    )


STAGE = Stage("quantize", "Quantize", __name__, ("calibrate", "allocate"), _inputs, _run, _cost)
