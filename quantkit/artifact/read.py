"""Open an artifact, trusting nothing in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from quantkit.artifact import layout
from quantkit.artifact.files import digest_file
from quantkit.artifact.manifest import FileEntry, Manifest, parse_manifest
from quantkit.artifact.marks import Mark
from quantkit.errors import CheckpointError
from quantkit.formats.integer import scale_dtype
from quantkit.formats.matrix import QuantizedMatrix, concatenate
from quantkit.formats.minmax import quantize_minmax
from quantkit.formats.packing import unpack_int32
from quantkit.formats.schemes import Scheme, scheme
from quantkit.models.reader import read_exactly
from quantkit.models.safetensors_header import ARRAY_TYPES, StoredTensor, read_header
from quantkit.models.spec import Part
from quantkit.program.ir import Program, Weight
from quantkit.program.serial import program_from_json
from quantkit_kernels.arrays import Array, cast

Check = Literal["full", "sizes"]

_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
_MOST_JSON = 64 << 20
"""Bytes of a manifest or program beyond which it is not read."""


@dataclass(frozen=True)
class Artifact:
    """An opened artifact: a WeightProvider for its own program.

    tensors: every tensor of the checkpoint and of the KV scales by name, checked against the program. marks: of the
    payload's files, taken before they were checked; whoever has read them by name compares (`check_unchanged`).
    """

    folder: Path
    manifest: Manifest
    program: Program
    tensors: Mapping[str, StoredTensor]
    marks: Mapping[str, Mark]

    @property
    def payload_digest(self) -> str:
        """The artifact's identity, `sha256:<hex>`."""
        return self.manifest.payload_digest

    @property
    def weight_bytes(self) -> int:
        """Bytes of all stored tensors, scales, shapes and zero points counted."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def source_weight_bytes(self) -> int:
        """Bytes of the same checkpoint with two bytes a weight, tied tensors counted once."""
        rows: dict[str, int] = {}
        for weight in self.program.weights.values():
            width = weight.shape[1] if len(weight.shape) == 2 else 1
            for part in weight.parts:
                rows[f"{part.tensor} {width}"] = max(rows.get(f"{part.tensor} {width}", 0), part.stop)
        return sum(2 * count * int(key.rpartition(" ")[2]) for key, count in rows.items())

    def load(self, weight: Weight) -> Array | QuantizedMatrix:
        """The weight as its kind and scheme say; see `program.weights.WeightProvider`.

        A tied INT8 head is derived here from the embedding table by the min-max rule: exact arithmetic, so the same
        codes on every machine.
        """
        if weight.kind == "scales":
            return self.read_tensor(weight.name)
        how = scheme(weight.scheme)
        if how.quantized and not layout.is_derived(weight, layout.tied_tables(self.program)):
            return concatenate([self._packed(part, weight.shape[1], how) for part in weight.parts])
        plain = [self.read_tensor(part.tensor, part.start, part.stop) for part in weight.parts]
        joined = plain[0] if len(plain) == 1 else np.concatenate(plain)
        if weight.kind == "vector":
            return cast(joined, np.float32)
        if how.quantized:
            dtype = scale_dtype(self.program.source_dtype)
            return quantize_minmax(joined, how, scale_dtype=dtype, where=weight.name)
        return joined

    def _packed(self, part: Part, columns: int, how: Scheme) -> QuantizedMatrix:
        module = layout.module_of(part.tensor)
        scale = cast(self.read_tensor(f"{module}.weight_scale"), np.float32)
        codes = unpack_int32(self.read_tensor(f"{module}.weight_packed"), how.bits, (part.stop, columns))
        zero = None
        if not how.symmetric:
            packed = self.read_tensor(f"{module}.weight_zero_point")
            zero = unpack_int32(packed, how.bits, (part.stop, scale.shape[1]), dim=0)
        return QuantizedMatrix(how, codes, scale, zero)

    def read_tensor(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows `[start, stop)` of a stored tensor, in its stored type."""
        stored = self.tensors[name]
        stop = stored.shape[0] if stop is None else stop
        row = stored.size // stored.shape[0]
        data = read_exactly(stored.file, stored.offset + start * row, (stop - start) * row, f"{stored.file}: {name}")
        return data.view(ARRAY_TYPES[stored.dtype]).reshape(stop - start, *stored.shape[1:])


def open_artifact(path: Path | str, *, check: Check = "full") -> Artifact:
    """The artifact at `path`, its payload checked before anything in it is used.

    check: `full` verifies every file's SHA-256, `sizes` only names and sizes (for one already verified).

    Raises CheckpointError naming the file: no manifest, another schema version, a changed, missing or unlisted payload
    file, a symlink or special file, a pickle, a listed path that leaves the folder, a damaged safetensors header, a
    program that does not verify, tensors that are not the program's.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            "is no artifact: there is no such folder", where=str(folder), next="quantkit build RECIPE"
        )
    if not (folder / layout.MANIFEST).exists():
        raise CheckpointError(
            f"is no artifact: it holds no {layout.MANIFEST}", where=str(folder), next="quantkit build RECIPE"
        )
    found = _payload_files(folder)
    manifest = parse_manifest(_read_small(folder, layout.MANIFEST, found), where=str(folder / layout.MANIFEST))
    _check_files(folder, manifest.files, found, check)
    text = _read_small(folder, layout.PROGRAM, found)
    where = str(folder / layout.PROGRAM)
    try:
        program = program_from_json(text.decode(), where)
    except UnicodeDecodeError:
        raise CheckpointError("is not UTF-8", where=where) from None
    attended = sorted(node.layer for node in program.nodes if node.op == "paged_attention" and node.layer is not None)
    if attended != list(range(program.num_layers)):
        raise CheckpointError(f"{program.num_layers} caches for attention in layers {attended}"[:200], where=where)
    return Artifact(folder, manifest, program, _tensors(folder, program, found), found)


def _payload_files(folder: Path) -> dict[str, Mark]:
    """Mark of every payload file by relative path. Symlinks and special files are refused, in the evidence too (it is
    written to, and must not lead elsewhere), and so are pickles."""
    found: dict[str, Mark] = {}
    pending = [folder]
    while pending:
        place = pending.pop()
        for entry in os.scandir(place):
            name = Path(entry.path).relative_to(folder).as_posix()
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                raise CheckpointError("is a symlink", where=f"{folder}/{name}", next=_REMOVE)
            if stat.S_ISDIR(mode):
                pending.append(Path(entry.path))
            elif not stat.S_ISREG(mode):
                raise CheckpointError("is not a regular file", where=f"{folder}/{name}", next=_REMOVE)
            elif name.startswith(f"{layout.EVIDENCE}/"):
                continue
            elif Path(name).suffix.lower() in _PICKLES:
                raise CheckpointError("is a pickle, which can run code", where=f"{folder}/{name}", next=_REMOVE)
            else:
                found[name] = Mark.of(os.stat(entry.path, follow_symlinks=False))
    return found


_REMOVE = "Fetch or build the artifact again; nothing of it was loaded"


def _check_files(folder: Path, listed: Mapping[str, FileEntry], found: Mapping[str, Mark], check: Check) -> None:
    for name in sorted(listed.keys() - found.keys()):
        raise CheckpointError("is missing", where=f"{folder}/{name}", next=_REMOVE)
    for name in sorted(found.keys() - listed.keys() - {layout.MANIFEST}):
        raise CheckpointError("is not listed in the manifest", where=f"{folder}/{name}", next=_REMOVE)
    for name, entry in listed.items():
        if name.startswith("quantkit/") and not layout.is_own_file(name):
            raise CheckpointError("is no file that an artifact holds there", where=f"{folder}/{name}", next=_REMOVE)
        if found[name].size != entry.size:
            raise CheckpointError(
                f"has {found[name].size} bytes instead of {entry.size}", where=f"{folder}/{name}", next=_REMOVE
            )
        if check == "full" and digest_file(folder / name) != entry:
            raise CheckpointError("was changed: its SHA-256 differs", where=f"{folder}/{name}", next=_REMOVE)


def _read_small(folder: Path, name: str, found: Mapping[str, Mark]) -> bytes:
    if name not in found:
        raise CheckpointError(f"is no artifact: it has no {name}", where=str(folder), next="quantkit build RECIPE")
    if found[name].size > _MOST_JSON:
        raise CheckpointError(f"{found[name].size} bytes are too many", where=f"{folder}/{name}", next=_REMOVE)
    return (folder / name).read_bytes()


def _tensors(folder: Path, program: Program, found: Mapping[str, Mark]) -> dict[str, StoredTensor]:
    """Every tensor of the payload, each demanded by the program in that shape and type, none left over."""
    stored: dict[str, StoredTensor] = {}
    for name in sorted(found):
        if "/" not in name and name.endswith(".safetensors"):
            for tensor, place in read_header(folder / name).items():
                if tensor in stored:
                    raise CheckpointError("lies in two files", where=f"{folder}: {tensor}")
                stored[tensor] = place

    def stored_type(tensor: str) -> str:
        if tensor not in stored:
            raise CheckpointError("the program reads a tensor that is missing", where=f"{folder}: {tensor}")
        if stored[tensor].dtype not in layout.DTYPES.values():
            raise CheckpointError(f"type {stored[tensor].dtype} is not a float", where=f"{folder}: {tensor}")
        return stored[tensor].dtype

    _compare(folder, layout.plan_checkpoint(program, stored_type), stored)
    kv = read_header(folder / layout.KV_SCALES) if layout.KV_SCALES in found else {}
    _compare(folder, layout.plan_kv_scales(program), kv)
    return stored | kv


def _compare(folder: Path, plans: Mapping[str, layout.TensorPlan], stored: Mapping[str, StoredTensor]) -> None:
    for name in sorted(plans.keys() ^ stored.keys()):
        wrong = (
            "the program reads a tensor that is missing" if name in plans else "the program does not read this tensor"
        )
        raise CheckpointError(wrong, where=f"{folder}: {name}")
    for name, plan in plans.items():
        if (stored[name].dtype, stored[name].shape) != (plan.dtype, plan.shape):
            got, wanted = stored[name], f"{plan.dtype} {list(plan.shape)}"
            raise CheckpointError(
                f"is {got.dtype} {list(got.shape)}, the program reads {wanted}", where=f"{folder}: {name}"
            )
