"""WeightReader: a checkpoint's tensors by name, a range of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import CheckpointError

if TYPE_CHECKING:
    import torch


class WeightReader(Protocol):
    """Reads tensors lazily; nothing is held between calls. Names are Hugging Face names whatever the file format."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files, in a fixed order."""
        ...

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`; CheckpointError when there is none."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The type `read` gives: float32, float16 or bfloat16; CheckpointError for any other stored type."""
        ...

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Rows `[start, stop)` along the first dimension (all by default), owned by the caller.

        Raises:
            CheckpointError: no such tensor, rows outside it, or a file that ends early; names file and tensor.
        """
        ...


class RenamedReader:
    """A reader whose tensors go by other names: `rename(stored)` gives the new one, None hides the tensor."""

    def __init__(self, reader: WeightReader, rename: Callable[[str], str | None]) -> None:
        self._reader = reader
        self._stored: dict[str, str] = {}
        for stored in reader.names():
            name = rename(stored)
            if name is None:
                continue
            if name in self._stored:
                raise CheckpointError(
                    f"{stored} and {self._stored[name]} both stand for {name}", where=str(reader.files[0])
                )
            self._stored[name] = stored

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files, in a fixed order."""
        return self._reader.files

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`."""
        return self._reader.shape(self._stored.get(name, name))

    def dtype(self, name: str) -> torch.dtype:
        """The type `read` gives."""
        return self._reader.dtype(self._stored.get(name, name))

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Rows `[start, stop)` of tensor `name`."""
        return self._reader.read(self._stored.get(name, name), start, stop)


def row_range(where: str, rows: int, start: int | None, stop: int | None) -> tuple[int, int]:
    """`(start, stop)` with defaults filled in; CheckpointError unless 0 <= start <= stop <= rows."""
    first, last = 0 if start is None else start, rows if stop is None else stop
    if not 0 <= first <= last <= rows:
        raise CheckpointError(f"rows {first} to {last} lie outside its {rows} rows", where=where)
    return first, last


def read_exactly(path: Path, offset: int, size: int, where: str) -> NDArray[np.uint8]:
    """`size` bytes of `path` from `offset`, uint8 `[size]`; CheckpointError when the file ends before."""
    buffer = np.empty(size, np.uint8)
    view = buffer.data
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < size:
                count = file.readinto(view[done:])
                if not count:
                    raise CheckpointError(
                        f"the file ends {size - done} bytes early", where=where, next="Fetch the checkpoint again"
                    )
                done += count
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=where) from error
    return buffer
