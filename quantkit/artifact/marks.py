"""Whether files are still the ones that were checked: they are digested once and read by name afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from quantkit.errors import CheckpointError


class Mark(NamedTuple):
    """What tells a file from one that took its place or from itself rewritten. changed: its ctime, nanoseconds."""

    device: int
    inode: int
    size: int
    changed: int

    @classmethod
    def of(cls, status: os.stat_result) -> Mark:
        """The mark of a file by its status."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


def check_unchanged(folder: Path, marks: Mapping[str, Mark]) -> None:
    """CheckpointError where a file of `folder` is not the one its mark was taken of."""
    for name, mark in marks.items():
        try:
            now = Mark.of((folder / name).lstat())
        except OSError:
            now = None
        if now != mark:
            raise CheckpointError(
                "was changed while it was read", where=f"{folder}/{name}", next="Start again once it is whole"
            )
