"""Write an artifact's payload: a compressed-tensors checkpoint and what quantkit adds to it, sealed by a manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from quantkit.artifact import layout
from quantkit.artifact.files import digest_file, require_room, written_beside
from quantkit.artifact.manifest import Manifest, canonical, manifest_bytes
from quantkit.artifact.tensors import TensorFile
from quantkit.errors import CheckpointError
from quantkit.formats.matrix import QuantizedMatrix
from quantkit.formats.packing import pack_int32
from quantkit.formats.schemes import scheme
from quantkit.models import ModelSource
from quantkit.program.ir import Program, Weight
from quantkit.program.serial import program_to_json
from quantkit_kernels.arrays import Array

SHARD_BYTES = 2_000_000_000
"""A checkpoint larger than this is split into files of about this size."""


def write_payload(
    folder: Path,
    *,
    source: ModelSource,
    program: Program,
    weights: Iterable[tuple[Weight, Array | QuantizedMatrix]],
    manifest: Manifest,
    compiled: Path | None = None,
) -> str:
    """Write a whole artifact at `folder` and give back its payload digest.

    Args:
        folder: must not exist or be empty; appears whole or not at all.
        source: gives tokenizer, config.json, generation_config.json and licence files.
        program: lowered; stored as `quantkit/program.json`, and the plan of what the checkpoint holds.
        weights: (weight, value) for every weight of the program, in any order, taken one at a time. A tied head's
            value is not stored: `Artifact.load` derives it.
        manifest: everything but its `files`, which are filled in here.
        compiled: a folder that holds `buckets.json` and `kernels/`, which go under `quantkit/`.

    Raises PreflightError when something is in the way or the disk is full, CheckpointError when a weight is missing
    or of another shape or scheme than the program says.
    """
    plans = layout.plan_checkpoint(program, lambda name: layout.DTYPES[str(source.reader.dtype(name))[6:]])
    require_room(folder, sum(plan.size for plan in plans.values()))
    with written_beside(folder) as partial:
        source.write_tokenizer(partial)
        _write_config(partial, source, program)
        for licence in source.license_files:
            shutil.copyfile(licence, partial / licence.name)
        (partial / "quantkit").mkdir()
        _write_tensors(partial, program, plans, weights)
        if compiled is not None:
            _copy_compiled(compiled, partial / "quantkit")
        (partial / layout.PROGRAM).write_text(program_to_json(program), encoding="utf-8")
        names = sorted(path.relative_to(partial).as_posix() for path in partial.rglob("*") if path.is_file())
        sealed = manifest.with_files({name: digest_file(partial / name) for name in names})
        (partial / layout.MANIFEST).write_bytes(manifest_bytes(sealed))
    return sealed.payload_digest


def _write_config(folder: Path, source: ModelSource, program: Program) -> None:
    """config.json with the checkpoint's quantization_config in place of whatever the source had."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else dict(source.config)
    config.pop("quantization_config", None)
    quantization = layout.quantization_config(program)
    if quantization is not None:
        config["quantization_config"] = quantization
    path.write_bytes(canonical(config))


def _copy_compiled(source: Path, folder: Path) -> None:
    """Copy the files an artifact may hold, and no others."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if path.is_file() and layout.is_own_file(f"quantkit/{name.as_posix()}"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)


def _write_tensors(
    folder: Path,
    program: Program,
    plans: Mapping[str, layout.TensorPlan],
    weights: Iterable[tuple[Weight, Array | QuantizedMatrix]],
) -> None:
    tables = layout.tied_tables(program)
    kv_plans = layout.plan_kv_scales(program)
    with ExitStack() as stack:
        shards = {name: stack.enter_context(TensorFile(folder / name, part)) for name, part in _shards(plans).items()}
        file_of = {plan.name: shards[name] for name, part in _shards(plans).items() for plan in part}
        kv_file = stack.enter_context(TensorFile(folder / layout.KV_SCALES, kv_plans.values())) if kv_plans else None
        for weight, value in weights:
            if program.weights.get(weight.name) != weight:
                raise CheckpointError("the program has no such weight", where=weight.name)
            if weight.kind == "scales" and kv_file is not None:
                kv_file.put(weight.name, _tensor(weight, value))
            elif layout.is_derived(weight, tables):
                continue
            elif scheme(weight.scheme).quantized:
                _put_packed(file_of, weight, _matrix(weight, value))
            else:
                _put_plain(file_of, weight, _tensor(weight, value))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(plan.size for plan in plans.values())},
            "weight_map": {plan.name: name for name, part in _shards(plans).items() for plan in part},
        }
        (folder / layout.INDEX).write_bytes(canonical(index))


def _tensor(weight: Weight, value: Array | QuantizedMatrix) -> Array:
    if not isinstance(value, np.ndarray) or tuple(value.shape) != weight.shape:
        raise CheckpointError(f"{list(value.shape)} is not the program's {list(weight.shape)}", where=weight.name)
    return value


def _matrix(weight: Weight, value: Array | QuantizedMatrix) -> QuantizedMatrix:
    if not isinstance(value, QuantizedMatrix) or value.scheme.name != weight.scheme or value.shape != weight.shape:
        given = value.scheme.name if isinstance(value, QuantizedMatrix) else str(value.dtype)
        wanted = f"{weight.scheme} {list(weight.shape)}"
        raise CheckpointError(f"{given} {list(value.shape)} is not the program's {wanted}", where=weight.name)
    return value


def _put_plain(file_of: Mapping[str, TensorFile], weight: Weight, value: Array) -> None:
    done = 0
    for part in weight.parts:
        count = part.stop - part.start
        file_of[part.tensor].put(part.tensor, value[done : done + count], part.start)
        done += count


def _put_packed(file_of: Mapping[str, TensorFile], weight: Weight, value: QuantizedMatrix) -> None:
    done = 0
    for part in weight.parts:
        rows, module, bits = value.rows(done, done + part.stop), layout.module_of(part.tensor), value.scheme.bits
        tensors: dict[str, Array] = {
            "weight_packed": pack_int32(rows.codes, bits),
            "weight_scale": rows.scale,
            "weight_shape": np.array(rows.shape, np.int64),
        }
        if rows.zero is not None:
            tensors["weight_zero_point"] = pack_int32(rows.zero, bits, dim=0)
        for suffix, tensor in tensors.items():
            file_of[f"{module}.{suffix}"].put(f"{module}.{suffix}", tensor)
        done += part.stop


def _shards(plans: Mapping[str, layout.TensorPlan]) -> dict[str, list[layout.TensorPlan]]:
    """File name -> its tensors: one `model.safetensors`, or several when they exceed SHARD_BYTES, in program order."""
    parts: list[list[layout.TensorPlan]] = [[]]
    filled = 0
    for plan in plans.values():
        if parts[-1] and filled + plan.size > SHARD_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append(plan)
        filled += plan.size
    if len(parts) == 1:
        return {layout.CHECKPOINT: parts[0]}
    return {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts)}
