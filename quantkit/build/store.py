"""The stage store of one run folder: whole outputs under their keys, unfinished ones beside them, one lock.

<run folder>/lock                    held by the build that is running, with its process id
<run folder>/quantize-1f0c…/         a whole stage: its files and `stage.json`
<run folder>/.tmp-quantize-1f0c…/    an unfinished one; a later build with the same key goes on from it
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.build.files import finish_folder, write_json
from quantkit.errors import PreflightError

_RECORD = "stage.json"
_TMP = ".tmp-"
_KEY_CHARS = 16
_KEPT_GENERATIONS = 2


class Store:
    """Whole and unfinished stage outputs in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def locked(self, wait_s: float = 2.0) -> Iterator[None]:
        """Hold the run folder; PreflightError names the process that holds it after `wait_s` seconds."""
        self._create()
        with open(self.folder / "lock", "a+", encoding="utf-8") as handle:
            deadline = time.monotonic() + wait_s
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        handle.seek(0)
                        raise PreflightError(
                            f"another build (process {handle.read().strip() or 'unknown'}) is using this run folder",
                            where=str(self.folder),
                            next="Wait for it, or give this build its own --out",
                        ) from None
                    time.sleep(0.05)
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
            yield

    def find(self, name: str, key: str) -> Path | None:
        """The folder of a whole stage, or None. One whose files are gone or cut short does not count."""
        folder = self.folder_of(name, key)
        try:
            record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        whole = record.get("key") == key and all(
            (folder / file).is_file() and (folder / file).stat().st_size == size
            for file, size in record.get("files", {}).items()
        )
        return folder if whole else None

    def folder_of(self, name: str, key: str) -> Path:
        """Where the whole stage is, or will be."""
        return self.folder / _folder_name(name, key)

    def begin(self, name: str, key: str) -> Path:
        """The folder to write an unfinished stage into; holds what an earlier, killed build left there."""
        folder = self.folder / f"{_TMP}{_folder_name(name, key)}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def keep(self, name: str, key: str, inputs: Any, result: dict[str, Any], **cost: float) -> Path:
        """Make what `begin` gave a whole stage: recorded with what it found out and took, flushed, renamed."""
        part = self.folder / f"{_TMP}{_folder_name(name, key)}"
        (part / _RECORD).unlink(missing_ok=True)
        files = {str(p.relative_to(part)): p.stat().st_size for p in sorted(part.rglob("*")) if p.is_file()}
        write_json(
            part / _RECORD,
            {"stage": name, "key": key, "inputs": inputs, "facts": {**cost, "result": result}, "files": files},
        )
        final = self.folder_of(name, key)
        self.drop(name, key)
        finish_folder(part, final)
        return final

    def drop(self, name: str, key: str) -> None:
        """Remove a stage's folder, whole or damaged."""
        folder = self.folder_of(name, key)
        if folder.exists():
            doomed = folder.with_name(f"{_TMP}dropped-{folder.name}")
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            shutil.rmtree(doomed)

    def clean(self, live: Iterable[tuple[str, str]]) -> None:
        """Remove unfinished stages other than `live`, and all but the newest generations of whole ones."""
        if not self.folder.is_dir():
            return
        names = {_folder_name(name, key) for name, key in live}
        for path in self.folder.iterdir():
            if path.is_dir() and path.name.startswith(_TMP) and path.name.removeprefix(_TMP) not in names:
                shutil.rmtree(path)
        stages: dict[str, list[Path]] = {}
        for path in self.folder.iterdir():
            if path.is_dir() and not path.name.startswith(_TMP) and path.name not in names:
                stages.setdefault(path.name.rpartition("-")[0], []).append(path)
        for paths in stages.values():
            paths.sort(key=lambda p: p.stat().st_mtime, reverse=True)
            for path in paths[_KEPT_GENERATIONS - 1 :]:
                shutil.rmtree(path)

    def _create(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PreflightError(
                f"cannot make the run folder: {error.strerror}", where=str(self.folder), next="Choose another --out"
            ) from None


def stage_facts(folder: Path) -> dict[str, Any]:
    """What the stage whose whole output is `folder` found out."""
    facts: dict[str, Any] = _facts(folder)["result"]
    return facts


def stage_cost(folder: Path) -> dict[str, Any]:
    """`seconds` and `peak_anon_bytes` of the run that made a whole stage."""
    return {key: value for key, value in _facts(folder).items() if key != "result"}


def _facts(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / _RECORD).read_text(encoding="utf-8"))["facts"]
    return facts


def _folder_name(name: str, key: str) -> str:
    return f"{name}-{key[:_KEY_CHARS]}"
