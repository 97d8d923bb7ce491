"""Reading safetensors checkpoints: one file, or several behind `model.safetensors.index.json`.

Every file's header is checked before any tensor is read; reading seeks to the rows asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import CheckpointError
from quantkit.models.reader import read_exactly, row_range
from quantkit.models.safetensors_header import ARRAY_TYPES, StoredTensor, read_header
from quantkit_kernels.tensors import as_tensor

INDEX = "model.safetensors.index.json"
_READABLE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
        stored = self._tensor(name)
        self.dtype(name)  # refuses types that are not read
        where = f"{stored.file}: {name}"
        rows = stored.shape[0] if stored.shape else 1
        first, last = row_range(where, rows, start, stop)
        row_bytes = stored.size // rows if rows else 0
        data = read_exactly(stored.file, stored.offset + first * row_bytes, (last - first) * row_bytes, where)
        array = data.view(ARRAY_TYPES[stored.dtype])
        return as_tensor(array.reshape((last - first, *stored.shape[1:]) if stored.shape else ()))


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
