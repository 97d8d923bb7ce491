"""Writing files so that a kill, a power cut or a full disk never leaves half of one under its final name."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.artifact.files import sync
from quantkit.errors import PreflightError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def canonical_json(value: Any) -> str:
    """JSON in one form: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, written beside and renamed into place, flushed to disk."""
    part = path.with_name(f".part-{path.name}")
    part.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    finish_file(part, path)


def finish_file(part: Path, path: Path) -> None:
    """Flush `part` to disk and rename it to `path`."""
    sync(part)
    part.rename(path)
    sync(path.parent)


def finish_folder(part: Path, path: Path) -> None:
    """Flush every file and folder below `part` to disk and rename it to `path`, which does not exist."""
    for folder, _, names in os.walk(part):
        for name in names:
            sync(Path(folder) / name)
        sync(Path(folder))
    part.rename(path)
    sync(path.parent)


def exchange_folders(new: Path, old: Path) -> None:
    """Swap two folders of one file system in a single step, so that `old` never is absent."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None or rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) != 0:
        aside = new.with_name(f"{new.name}.aside")  # a file system without exchange: two steps
        old.rename(aside)
        new.rename(old)
        aside.rename(new)
    sync(old.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """The same bytes under another name: a hard link where the file system allows, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def tree_bytes(folder: Path) -> int:
    """Bytes in the files below `folder`."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


@contextmanager
def disk_full_explained(doing: str, folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn a full disk, met by us or by a library, into a PreflightError that says how much is needed."""
    try:
        yield
    except Exception as error:
        if not _means_full(error):
            raise
        free = shutil.disk_usage(folder).free
        full = "a file may not grow so large here" if getattr(error, "errno", None) == errno.EFBIG else "disk full"
        raise PreflightError(
            f"{full}: {doing} needs about {needed_bytes / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free in {folder}",
            next="Make room and run the same command; finished stages and layers are kept",
        ) from error


def _means_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    return "No space left on device" in str(error)
