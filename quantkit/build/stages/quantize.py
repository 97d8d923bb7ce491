"""quantize: the chosen codes and scales, one file a layer, so that a killed build goes on from the last whole one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantkit.build.context import Context, Outline
from quantkit.build.decisions import HEAD
from quantkit.build.estimate import Cost, Sizes
from quantkit.build.files import finish_file
from quantkit.build.progress import Progress
from quantkit.build.stage import Facts, Inputs, Stage
from quantkit.build.stages.allocate import chosen
from quantkit.build.stages.sensitivity import OPS_A_STEP, SEARCH_STEPS, layers, stored_scale_type
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.schemes import SCHEMES
from quantkit.models.source_weights import SourceWeights
from quantkit.quantize.rtn import rtn


def read_group(folder: Path, group: str, scheme: str) -> QuantizedMatrix:
    """One group's quantized matrix, from the stage's folder."""
    with safe_open(folder / _file_of(group), framework="pt") as file:
        held = set(file.keys())
        codes, scale = file.get_tensor(f"{group}.codes"), file.get_tensor(f"{group}.scale")
        zero = file.get_tensor(f"{group}.zero") if f"{group}.zero" in held else None
    return QuantizedMatrix(SCHEMES[scheme], codes, scale, zero)


def head_is_stored(outline: Outline) -> bool:
    """Whether the head is quantized and written: a tied one is derived from the embedding at load instead."""
    return SCHEMES[outline.decisions.head].quantized and not Sizes.of(outline.program).tied


def _file_of(group: str) -> str:
    return f"{HEAD}.safetensors" if group == HEAD else f"layer-{int(group.split('.')[1]):05d}.safetensors"


def _inputs(context: Context) -> Inputs:
    return {"scale_search": context.loaded.recipe.quantization.scale_search, "head": context.decisions.head}


def _run(context: Context, needs: Mapping[str, Path], folder: Path, progress: Progress) -> Facts:
    schemes = chosen(needs["allocate"])
    parts = list(layers(context).values())
    if head_is_stored(context):
        schemes[HEAD] = context.decisions.head
        parts.append([HEAD])
    for done, names in enumerate(parts):
        file = _file_of(names[0])
        progress.step(done, len(parts), file.partition(".")[0])
        names = [name for name in names if SCHEMES[schemes[name]].quantized]
        if names and not (folder / file).exists():
            _quantize(context, {name: schemes[name] for name in names}, folder / file)
    return {"groups": sum(SCHEMES[scheme].quantized for scheme in schemes.values())}


def _quantize(context: Context, schemes: Mapping[str, str], path: Path) -> None:
    search, dtype, groups = (
        context.loaded.recipe.quantization.scale_search,
        stored_scale_type(context),
        context.program.groups(),
    )
    tensors: dict[str, Tensor] = {}
    for group, scheme in schemes.items():
        matrix = SourceWeights(context.source).load(groups[group])
        quantized = rtn(matrix, SCHEMES[scheme], search=search, scale_dtype=dtype, where=group)
        tensors |= {f"{group}.codes": quantized.codes, f"{group}.scale": quantized.scale}
        if quantized.zero is not None:
            tensors[f"{group}.zero"] = quantized.zero
    part = path.with_name(f".part-{path.name}")
    save_file(tensors, part)
    finish_file(part, path)


def _cost(outline: Outline) -> Cost:
    sizes, section = Sizes.of(outline.program), outline.loaded.recipe.quantization
    steps = SEARCH_STEPS if section.scale_search == "mse" else 1
    head = sizes.head if head_is_stored(outline) else 0
    return Cost(
        disk_bytes=int((sizes.units + head) * 1.1),
        memory_bytes=sizes.layer + max(sizes.group, head) * (sizes.item + 1),
        element_ops=float(sizes.units + head) * steps * OPS_A_STEP,
    )


STAGE = Stage("quantize", "Quantize", __name__, ("allocate",), _inputs, _run, _cost)
