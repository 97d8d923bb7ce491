"""The GGUF container: header, metadata and tensor table, checked before anything is believed.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian). The `gguf`
package's own reader trusts every length in the file; this one checks each against the file's size, so that a truncated
or hostile file is a CheckpointError naming file and tensor. Block sizes and dequantization come from the package.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quantkit.errors import CheckpointError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_TENSORS = 1 << 20
_MOST_KEYS = 1 << 16
_MOST_ITEMS = 1 << 24
_MOST_DIMS = 4
_MOST_ALIGNMENT = 1 << 16


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor table. `shape` is row-major, `[rows, ..., K]`; `offset`, `size` in bytes of the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one run of K values (the last dimension)."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * block_bytes


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header: `metadata` by llama.cpp's key names (arrays as lists), `tensors` by their GGUF names."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """`general.architecture`, the prefix of the model's own keys."""
        return str(self.metadata.get("general.architecture", ""))

    def key(self, name: str, default: Any = None) -> Any:
        """The value of `<architecture>.<name>`."""
        return self.metadata.get(f"{self.architecture}.{name}", default)


class _Cursor:
    """Reads forward through a mapped file; running past its end is a CheckpointError."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path, self.data, self.at, self.reading = path, data, 0, "the header"

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(what, where=f"{self.path}: {self.reading}", next="Fetch the file again")

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise self.error(f"wants {size} bytes where {len(self.data) - self.at} are left: truncated or damaged")
        self.at += size
        return self.data[self.at - size : self.at]

    def unpack(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        try:
            return self.take(self.unpack("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self.error("holds text that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.error(f"unknown value type {kind}")
        item, count = self.unpack("I"), self.unpack("Q")
        if count > _MOST_ITEMS:
            raise self.error(f"list of {count} items is too long")
        if item == _STRING:
            return [self.text() for _ in range(count)]
        if item not in _SCALARS:
            raise self.error(f"list of unsupported type {item}")
        code = f"<{count}{_SCALARS[item]}"
        return list(struct.unpack(code, self.take(struct.calcsize(code))))


def read_gguf(path: Path) -> GGUFFile:
    """Parse and check the header of `path`.

    Raises:
        CheckpointError: not a GGUF, another version, one part of a split file, truncated or damaged; names file and
            key or tensor.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24 or file.read(4) != _MAGIC:
                raise CheckpointError("is not a GGUF file, or is cut off", where=str(path), next="Fetch the file again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(path, data))
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _parse(cursor: _Cursor) -> GGUFFile:
    cursor.take(4)
    version = cursor.unpack("I")
    if version not in (2, 3):
        raise CheckpointError(
            f"GGUF version {version} is not supported (2 and 3 are; big-endian files are not)", where=str(cursor.path)
        )
    tensor_count, key_count = cursor.unpack("Q"), cursor.unpack("Q")
    if tensor_count > _MOST_TENSORS or key_count > _MOST_KEYS:
        raise cursor.error(f"claims {tensor_count} tensors and {key_count} keys")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        cursor.reading = "the header"
        cursor.reading = name = cursor.text()
        if name in metadata:
            raise cursor.error("key appears twice")
        metadata[name] = cursor.value(cursor.unpack("I"))
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"split.count is {metadata['split.count']}: the file is one of several parts",
            where=str(cursor.path),
            next="Merge them: gguf-split --merge",
        )
    cursor.reading = "the tensor table"
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    return GGUFFile(cursor.path, metadata, _place(cursor, metadata, entries))


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    cursor.reading = "the tensor table"
    cursor.reading = name = cursor.text()
    dims = cursor.unpack("I")
    if not 1 <= dims <= _MOST_DIMS:
        raise cursor.error(f"has {dims} dimensions")
    shape = tuple(cursor.unpack("Q") for _ in range(dims))
    return name, tuple(reversed(shape)), cursor.unpack("I"), cursor.unpack("Q")


def _place(
    cursor: _Cursor, metadata: dict[str, Any], entries: list[tuple[str, tuple[int, ...], int, int]]
) -> dict[str, GGUFTensor]:
    """Turn relative offsets into checked places in the file: aligned, in bounds, not overlapping."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(f"general.alignment {alignment} is not a power of two", where=str(cursor.path))
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        cursor.reading = name
        if name in tensors:
            raise cursor.error("tensor appears twice")
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise cursor.error(f"unknown tensor type {kind}") from None
        block, block_bytes = GGML_QUANT_SIZES[known]
        if 0 in shape or shape[-1] % block:
            raise cursor.error(f"rows of {shape[-1]} values do not fill {known.name} blocks of {block}")
        size = math.prod(shape) // block * block_bytes
        if offset % alignment:
            raise cursor.error(f"offset {offset} is not aligned to {alignment}")
        over = start + offset + size - len(cursor.data)
        if over > 0:
            raise cursor.error(f"ends {over} bytes after the end of the file: truncated")
        tensors[name] = GGUFTensor(name, known, shape, start + offset, size)
    position, previous = start, ""
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < position:
            cursor.reading = tensor.name
            raise cursor.error(f"overlaps {previous}")
        position, previous = tensor.offset + tensor.size, tensor.name
    return tensors
