"""Files that appear whole or not at all, and their digests."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.artifact.manifest import FileEntry
from quantkit.errors import PreflightError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, renamed into its place when the block ends well, removed when it does not.

    Everything in it is flushed to disk before the rename. PreflightError when `folder` holds something already, and
    when the disk has no room.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise PreflightError("is in the way", where=str(folder), next="Remove it, or write the artifact elsewhere")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in [*partial.rglob("*"), partial]:
            sync(path)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
        sync(folder.parent)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise PreflightError(
                f"no room on the disk ({error.strerror})", where=str(folder), next="Free some space and build again"
            ) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_room(folder: Path, size: int) -> None:
    """PreflightError unless the disk of `folder` (or of its nearest existing parent) has `size` bytes free."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < size:
        raise PreflightError(
            f"the artifact takes {size / 1e6:.0f} MB and {free / 1e6:.0f} MB are free",
            where=str(folder),
            next="Free some space, or write the artifact elsewhere",
        )


def digest_file(path: Path) -> FileEntry:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), sha256)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
