"""Faults planted into a copy of an artifact, which is then sealed again: what a broken exporter would have shipped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from quantkit.artifact.files import digest_file
from quantkit.artifact.layout import KV_SCALES, MANIFEST, module_of
from quantkit.artifact.manifest import manifest_bytes, parse_manifest
from quantkit.artifact.read import open_artifact
from quantkit.formats.packing import pack_int32, unpack_int32
from quantkit.models.safetensors_header import ARRAY_TYPES, read_header
from quantkit.runtime.text import ChatText
from quantkit_kernels.arrays import Array, cast


def copy_of(artifact: Path, folder: Path) -> Path:
    """A copy of the payload, without evidence."""
    return Path(shutil.copytree(artifact, folder, ignore=shutil.ignore_patterns("evidence")))


def seal(folder: Path) -> Path:
    """List every file anew, as the fault's maker would have."""
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    files = {name: digest_file(folder / name) for name in manifest.files}
    (folder / MANIFEST).write_bytes(manifest_bytes(replace(manifest, files=dict(sorted(files.items())))))
    return folder


def change_tensor(folder: Path, file: str, name: str, change: Callable[[Array], Array]) -> None:
    """Rewrite one tensor of a safetensors file in place."""
    place = read_header(folder / file)[name]
    with (folder / file).open("r+b") as handle:
        handle.seek(place.offset)
        stored = np.frombuffer(handle.read(place.size), ARRAY_TYPES[place.dtype]).reshape(place.shape)
        changed = cast(change(stored.copy()), stored.dtype)
        handle.seek(place.offset)
        handle.write(changed.tobytes())


def kv_scale_times(folder: Path, name: str, factor: float) -> Path:
    """One layer's scales (`layers.3.k_scale`) multiplied."""
    change_tensor(folder, KV_SCALES, name, lambda scale: scale * factor)
    return seal(folder)


def zero_point_off_by_one(folder: Path, group: str, *, only: tuple[int, int] | None = None) -> Path:
    """Every zero point of one asymmetric group's first matrix one higher, or that of one row and column alone."""
    artifact = open_artifact(folder)
    weight = artifact.program.groups()[group]
    part = weight.parts[0]
    columns = artifact.tensors[f"{module_of(part.tensor)}.weight_scale"].shape[1]
    shape = (part.stop, columns)

    def shifted(packed: Array) -> Array:
        zero = unpack_int32(packed, 4, shape, dim=0)
        step = np.zeros_like(zero) if only else np.ones_like(zero)
        if only:
            step[only] = 1
        step[zero >= 7] *= -1
        return pack_int32(zero + step, 4, dim=0)

    change_tensor(folder, "model.safetensors", f"{module_of(part.tensor)}.weight_zero_point", shifted)
    return seal(folder)


def codes_off_by_one(folder: Path, group: str) -> Path:
    """Every 4-bit code of one group's first matrix one higher, as a zero point of 7 for 8 makes of symmetric codes."""
    artifact = open_artifact(folder)
    weight = artifact.program.groups()[group]
    part = weight.parts[0]
    shape = (part.stop, weight.shape[1])

    def shifted(packed: Array) -> Array:
        codes = unpack_int32(packed, 4, shape) + np.int8(1)
        return pack_int32(np.minimum(codes, 7), 4)

    change_tensor(folder, "model.safetensors", f"{module_of(part.tensor)}.weight_packed", shifted)
    return seal(folder)


def stop_token_lost(folder: Path, token: str) -> Path:
    """`token` is struck from every place that names what ends an answer."""
    lost = ChatText(folder).encode(token)[0]
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        content = json.loads(path.read_text("utf-8"))
        ids = content.get("eos_token_id")
        if isinstance(ids, list):
            content["eos_token_id"] = [one for one in ids if one != lost]
        elif ids == lost:
            content["eos_token_id"] = None
        if content.get("eos_token") == token:
            content["eos_token"] = None
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False), "utf-8")
    return seal(folder)


def template_without_system_turn(folder: Path) -> Path:
    """The chat template drops a system turn without a word."""
    path = folder / "chat_template.jinja"
    dropping = "{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list -%}\n"
    path.write_text(dropping + path.read_text("utf-8"), "utf-8")
    return seal(folder)


def tokens_like(folder: Path, chosen: Callable[[str], bool]) -> list[int]:
    """Every token whose text is chosen."""
    text = ChatText(folder)
    return [token for token in range(text.vocab_size) if chosen(text.token_text(token))]


def rows_disturbed(folder: Path, rows: list[int], *, strength: float = 1.0) -> Path:
    """The embeddings of tokens `rows` get noise of `strength` times their own size."""
    artifact = open_artifact(folder)
    table = next(weight for weight in artifact.program.weights.values() if weight.kind == "table")
    noise = np.random.default_rng(0).standard_normal((len(rows), table.shape[1]), np.float32)

    def disturbed(values: Array) -> Array:
        chosen = cast(values[rows], np.float32)
        size = np.sqrt(np.square(chosen).mean(-1, keepdims=True))
        values[rows] = cast(chosen + np.float32(strength) * noise * size, values.dtype)
        return values

    change_tensor(folder, "model.safetensors", table.parts[0].tensor, disturbed)
    return seal(folder)
