"""Compiled kernels kept for the user, by what they were compiled from: a second build compiles nothing.

A kernel is a folder of three files, named by the SHA-256 of its specialisation, target and versions. Its JSON states
the digests of the other two, so that a damaged kernel is compiled again instead of being used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import PreflightError
from quantkit_kernels.cuda.arguments import CONVENTION

SUFFIXES = ("cubin", "ptx", "json")


@dataclass(frozen=True)
class CachedKernel:
    """A whole kernel in the cache: its folder and its metadata."""

    folder: Path
    metadata: Mapping[str, Any]

    def file(self, suffix: str) -> Path:
        """The cubin, ptx or json file."""
        return self.folder / f"kernel.{suffix}"


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/quantkit/kernels`, or below `~/.cache`; PreflightError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "quantkit" / "kernels"
    except RuntimeError:
        raise PreflightError("no home folder to keep compiled kernels in", next="Set XDG_CACHE_HOME") from None


def key_of(specialisation: Mapping[str, Any], target: str, versions: Mapping[str, str]) -> str:
    """Name of a kernel: 64 hexadecimal digits."""
    text = json.dumps([CONVENTION, dict(specialisation), target, dict(versions)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_kernel(cache: Path, key: str) -> CachedKernel | None:
    """The kernel, or None where it is absent or damaged."""
    folder = cache / key
    try:
        metadata = json.loads((folder / "kernel.json").read_bytes())
        whole = all(_digest(folder / f"kernel.{suffix}") == metadata["sha256"][suffix] for suffix in ("cubin", "ptx"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return CachedKernel(folder, metadata) if whole else None


def write_kernel(cache: Path, key: str, cubin: bytes, ptx: str, metadata: Mapping[str, Any]) -> None:
    """Put a kernel into the cache, whole or not at all; one that is there already is replaced."""
    part = cache / f".{key}.{os.getpid()}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / "kernel.cubin").write_bytes(cubin)
    (part / "kernel.ptx").write_bytes(ptx.encode())
    digests = {suffix: _digest(part / f"kernel.{suffix}") for suffix in ("cubin", "ptx")}
    text = json.dumps({**metadata, "sha256": digests}, indent=1, sort_keys=True)
    (part / "kernel.json").write_text(text + "\n", encoding="utf-8")
    shutil.rmtree(cache / key, ignore_errors=True)
    try:
        part.rename(cache / key)
    except OSError:  # another build was faster; its kernel is the same
        shutil.rmtree(part, ignore_errors=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
