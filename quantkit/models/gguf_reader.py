"""GGUF tensors as a WeightReader: Hugging Face names and layout, dequantized row by row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from quantkit.errors import CheckpointError
from quantkit.models.gguf_file import GGUFFile, GGUFTensor
from quantkit.models.gguf_names import hf_name
from quantkit.models.reader import read_exactly, row_range

_PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_QUANTIZED = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
_FLOAT16_OVERFLOW = 65520.0
"""The least number that rounds to infinity in float16."""
_CHUNK = 1 << 22
"""Values dequantized at once: the float32 intermediate stays at 16 MiB."""


class GGUFWeightReader:
    """Tensors of a GGUF file under Hugging Face names (a WeightReader).

    Matrices all come in one type: float32 or bfloat16 when every matrix is stored so, else float16, the type
    quantized tensors are dequantized to. Vectors (norms, biases) keep float32. llama.cpp's rotation of q and k rows
    (architecture llama) and the 1 it adds to Gemma's norms are undone.

    Args:
        file: the parsed header.
        heads: query heads and key-value heads, for the row order of q and k.
    """

    def __init__(self, file: GGUFFile, heads: tuple[int, int]) -> None:
        self._file = file
        self._tensors: dict[str, GGUFTensor] = dict(
            sorted((hf_name(file.architecture, name), tensor) for name, tensor in file.tensors.items())
        )
        kinds = {tensor.kind for tensor in self._tensors.values() if len(tensor.shape) > 1}
        one = next(iter(kinds)) if len(kinds) == 1 else Kind.F16
        self._matrix_dtype = _PLAIN.get(one, torch.float16)
        self._rotated = _rotated(file, self._tensors, heads) if file.architecture == "llama" else {}
        self._offset_norms = file.architecture == "gemma3"

    @property
    def files(self) -> tuple[Path, ...]:
        """The GGUF file."""
        return (self._file.path,)

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return list(self._tensors)

    def _tensor(self, name: str) -> GGUFTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"tensor {name} is missing", where=str(self._file.path))
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`, row-major; CheckpointError when there is none."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The type `read` gives; CheckpointError names a stored type that is not supported."""
        tensor = self._tensor(name)
        if tensor.kind not in _PLAIN and tensor.kind not in _QUANTIZED:
            known = ", ".join(kind.name for kind in (*_PLAIN, *_QUANTIZED))
            raise CheckpointError(
                f"type {tensor.kind.name} is not supported", where=self._where(tensor), next=f"Supported: {known}"
            )
        if len(tensor.shape) > 2:
            raise CheckpointError(
                f"has {len(tensor.shape)} dimensions: only matrices are read", where=self._where(tensor)
            )
        return self._matrix_dtype if len(tensor.shape) == 2 else torch.float32

    def _where(self, tensor: GGUFTensor) -> str:
        return f"{self._file.path}: {tensor.name}"

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Rows `[start, stop)` of tensor `name`, dequantized now.

        Raises:
            CheckpointError: as WeightReader.read, and when a value does not fit float16.
        """
        tensor, dtype = self._tensor(name), self.dtype(name)
        first, last = row_range(self._where(tensor), tensor.shape[0], start, stop)
        if len(tensor.shape) == 1:
            return self._vector(name, tensor)[first:last].contiguous()
        heads = self._rotated.get(name)
        if heads is None:
            return self._rows(tensor, first, last, dtype)
        rows = tensor.shape[0] // heads
        low, high = first // rows * rows, -(-last // rows) * rows
        return _unrotate(self._rows(tensor, low, high, dtype), rows)[first - low : last - low].contiguous()

    def _vector(self, name: str, tensor: GGUFTensor) -> torch.Tensor:
        value = self._values(tensor, 0, 1)[0]
        if self._offset_norms and name.endswith("norm.weight"):
            value = value - 1.0
        if name in self._rotated:
            value = _unrotate(value, value.shape[0] // self._rotated[name])
        return value

    def _rows(self, tensor: GGUFTensor, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows `[first, last)` in the file's own order, as `dtype`."""
        width = tensor.shape[-1]
        out = torch.empty((last - first, width), dtype=dtype)
        step = max(1, _CHUNK // width)
        for low in range(first, last, step):
            high = min(low + step, last)
            values = self._values(tensor, low, high)
            if dtype == torch.float16:
                self._check_range(tensor, values)
            out[low - first : high - first] = values
        return out

    def _check_range(self, tensor: GGUFTensor, values: torch.Tensor) -> None:
        """CheckpointError when a finite value would become infinite as float16."""
        low, high = torch.aminmax(values)
        largest = max(-float(low), float(high))
        if _FLOAT16_OVERFLOW <= largest < math.inf:
            raise CheckpointError(f"holds {largest:.0f}, more than float16 can", where=self._where(tensor))

    def _values(self, tensor: GGUFTensor, first: int, last: int) -> torch.Tensor:
        """Runs `[first, last)` of K values, dequantized: float32 `[last - first, K]`."""
        where, size = self._where(tensor), tensor.row_bytes
        data = read_exactly(self._file.path, tensor.offset + first * size, (last - first) * size, where)
        if tensor.kind in _PLAIN:
            return torch.from_numpy(data).view(_PLAIN[tensor.kind]).reshape(last - first, -1).to(torch.float32)
        with np.errstate(all="ignore"):
            values = dequantize(data.reshape(last - first, size), tensor.kind)
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _rotated(file: GGUFFile, tensors: Mapping[str, GGUFTensor], heads: tuple[int, int]) -> dict[str, int]:
    """Name -> heads of every q and k tensor, whose rows llama.cpp's converter reorders."""
    counts = {"q_proj": heads[0], "k_proj": heads[1]}
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        for part, count in counts.items():
            if f"self_attn.{part}." in name:
                if tensor.shape[0] % (2 * count):
                    raise CheckpointError(
                        f"{tensor.shape[0]} rows do not divide over {count} heads", where=f"{file.path}: {tensor.name}"
                    )
                found[name] = count
    return found


def _unrotate(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undo `permute` of llama.cpp's convert_hf_to_gguf.py: pairs (2i, 2i+1) of each head become (i, i + head_dim/2)."""
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
