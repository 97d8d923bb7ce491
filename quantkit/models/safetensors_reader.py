"""Reading safetensors checkpoints: one file, or several behind `model.safetensors.index.json`.

The header is third-party data and is checked whole before any tensor is read: every offset in bounds, no overlap, no
byte unaccounted for (the format's own rules, see safetensors' `SafeTensors::deserialize`). Reading seeks to the rows
asked for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import CheckpointError
from quantkit.models.reader import read_exactly, row_range

INDEX = "model.safetensors.index.json"
_MOST_HEADER = 100 << 20
_MOST_DIMS = 8
_READABLE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6, "C64": 64, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: `offset` and `size` in bytes of `file`; `dtype` as the format spells it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class SafetensorsReader:
    """Tensors of a safetensors checkpoint (a WeightReader)."""

    def __init__(self, files: tuple[Path, ...], tensors: Mapping[str, StoredTensor]) -> None:
        self._files = files
        self._tensors = dict(sorted(tensors.items()))

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files, sorted by name."""
        return self._files

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return list(self._tensors)

    def _tensor(self, name: str) -> StoredTensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(f"tensor {name} is missing", where=str(self._files[0].parent))
        return stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`; CheckpointError when there is none."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Stored type of tensor `name`; CheckpointError unless it is F32, F16 or BF16."""
        stored = self._tensor(name)
        if stored.dtype not in _READABLE:
            raise CheckpointError(
                f"type {stored.dtype} is not supported",
                where=f"{stored.file}: {name}",
                next="Give a checkpoint stored as F32, F16 or BF16",
            )
        return _READABLE[stored.dtype]

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Rows `[start, stop)` of tensor `name` in its stored type, read from the file now."""
        stored, dtype = self._tensor(name), self.dtype(name)
        where = f"{stored.file}: {name}"
        rows = stored.shape[0] if stored.shape else 1
        first, last = row_range(where, rows, start, stop)
        row_bytes = stored.size // rows if rows else 0
        data = read_exactly(stored.file, stored.offset + first * row_bytes, (last - first) * row_bytes, where)
        return data.view(dtype).reshape((last - first, *stored.shape[1:]) if stored.shape else ())


def open_safetensors(folder: Path) -> SafetensorsReader:
    """The checkpoint in `folder`: `model.safetensors`, else the files of the index, else its only safetensors file.

    Raises:
        CheckpointError: nothing to read, a damaged file, or a path that leaves the folder; names file and tensor.
    """
    single = folder / "model.safetensors"
    if single.exists():
        return _open_files(folder, {single.name: None})
    if (folder / INDEX).exists():
        return _open_files(folder, _index_files(folder))
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(others) == 1:
        return _open_files(folder, {others[0]: None})
    if others:
        raise CheckpointError(
            f"{len(others)} safetensors files and no {INDEX}", where=str(folder), next="Fetch the index with the files"
        )
    raise _nothing_readable(folder)


def _nothing_readable(folder: Path) -> CheckpointError:
    pickles = sorted(path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}"))
    if not pickles:
        return CheckpointError("holds no *.safetensors weights", where=str(folder), next="Give a model's folder")
    convert = "AutoModelForCausalLM.from_pretrained('.', weights_only=True).save_pretrained('safetensors')"
    return CheckpointError(
        f"{pickles[0]} is a pickle, which can run code when opened: refused",
        where=str(folder),
        next=f"If you trust its author, convert it once with Transformers: {convert}",
    )


def _index_files(folder: Path) -> dict[str, list[str]]:
    """File name -> tensors the index promises there; names must be plain paths inside the folder."""
    path = folder / INDEX
    index = load_json(path)
    table = index.get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError("weight_map must map tensor names to file names", where=str(path))
    files: dict[str, list[str]] = {}
    for tensor, name in sorted(table.items()):
        parts = Path(name).parts
        if not parts or os.path.isabs(name) or ".." in parts or "\0" in name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{name[:120]!r} is not a safetensors file of this folder", where=f"{path}: {tensor}")
        promised = files.setdefault(name, [])
        assert promised is not None
        promised.append(tensor)
    return files


def _open_files(folder: Path, files: Mapping[str, Sequence[str] | None]) -> SafetensorsReader:
    tensors: dict[str, StoredTensor] = {}
    paths = tuple(inside(folder, name) for name in sorted(files))
    for name, path in zip(sorted(files), paths, strict=True):
        found, promised = read_header(path), files[name]
        for tensor in found if promised is None else promised:
            if tensor not in found:
                raise CheckpointError(f"holds no tensor {tensor}, which {INDEX} promises", where=str(path))
            tensors[tensor] = found[tensor]
    return SafetensorsReader(paths, tensors)


def inside(folder: Path, name: str) -> Path:
    """`folder / name`, a file that really lies inside the folder (or its hub cache, whose snapshots link to blobs).

    Raises:
        CheckpointError: no such file, or a link that leads out.
    """
    path = folder / name
    root = folder.resolve()
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        root = root.parent.parent
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):
        raise CheckpointError("file is missing", where=str(path), next="Fetch the checkpoint again") from None
    if not real.is_relative_to(root):
        raise CheckpointError(
            f"leads out of the folder, to {real}", where=str(path), next="Copy the file into the folder"
        )
    if not real.is_file():
        raise CheckpointError("is not a file", where=str(path))
    return path


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; CheckpointError when it is not one."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise CheckpointError("is not valid JSON", where=str(path), next="Fetch the file again") from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if not isinstance(value, dict):
        raise CheckpointError("must be a JSON object", where=str(path))
    return value


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The checked header of one safetensors file; CheckpointError names file and tensor."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise CheckpointError(
                f"is truncated: {size} bytes hold no whole header", where=str(path), next="Fetch the file again"
            )
        if length > _MOST_HEADER:
            raise CheckpointError(f"header of {length} bytes exceeds the format's {_MOST_HEADER}", where=str(path))
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, _DuplicateError) else "is not valid JSON"
        raise CheckpointError(f"header {reason}", where=str(path), next="Fetch the file again") from None
    if not isinstance(header, dict):
        raise CheckpointError("header must be a JSON object", where=str(path))
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}
    _check_layout(path, tensors, 8 + length, size)
    return tensors


class _DuplicateError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _DuplicateError("names a tensor twice")
    return value


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    where = f"{path}: {name}"
    if not isinstance(entry, dict):
        raise CheckpointError("header entry must be an object", where=where)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"unknown type {str(dtype)[:40]!r}", where=where)
    if not isinstance(shape, list) or len(shape) > _MOST_DIMS or not all(_whole(n) for n in shape):
        raise CheckpointError(f"shape {str(shape)[:60]} is not a list of sizes", where=where)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_whole(n) for n in offsets):
        raise CheckpointError(f"data_offsets {str(offsets)[:60]} are not two positions", where=where)
    first, last = offsets
    if first > last:
        raise CheckpointError(f"data_offsets {offsets} run backwards", where=where)
    if last > size - start:
        raise CheckpointError(
            f"ends {last - (size - start)} bytes after the end of the file: truncated",
            where=where,
            next="Fetch the file again",
        )
    if math.prod(shape) * _BITS[dtype] != (last - first) * 8:
        raise CheckpointError(f"{last - first} bytes do not hold {dtype} {shape}", where=where)
    return StoredTensor(path, dtype, tuple(shape), start + first, last - first)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _check_layout(path: Path, tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    """Tensors must follow each other without overlap or gap, to the end of the file."""
    position, previous = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
        if tensor.offset != position:
            how = "overlaps" if tensor.offset < position else "leaves a gap after"
            raise CheckpointError(f"{how} {previous}", where=f"{path}: {name}")
        position, previous = tensor.offset + tensor.size, name
    if position != size:
        raise CheckpointError(f"{size - position} bytes after the last tensor belong to none", where=str(path))
