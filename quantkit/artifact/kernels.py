"""What an artifact holds for GPUs, read and checked as data: buckets, kernels, and which node runs which.

Machine code is never loaded here: a cubin counts only when its bytes are those the manifest lists.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from quantkit.artifact import layout
from quantkit.artifact.read import Artifact
from quantkit.errors import CheckpointError

_AGAIN = "Build the artifact again"
_NUMBERS = ("num_warps", "registers", "shared_bytes", "spill_bytes")
_ELF_CUDA = (b"\x7fELF", 190)
"""An ELF file for machine 190, CUDA."""
_MOST = 8 << 20
"""Bytes of a JSON file beyond which it is not read."""


@dataclass(frozen=True)
class KernelEntry:
    """One kernel for one target. classes: the bucket classes whose nodes launch it. size: bytes of its cubin."""

    name: str
    kernel: str
    target: str
    classes: tuple[str, ...]
    num_warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    size: int
    versions: Mapping[str, str]


@dataclass(frozen=True)
class TargetKernels:
    """The kernels of one target.

    missing: nodes that none serves, by bucket class, with the reason. launches: names of the kernels that a node
    launches one after another, by bucket class and node.
    """

    target: str
    kernels: tuple[KernelEntry, ...]
    missing: Mapping[str, Mapping[str, str]]
    launches: Mapping[str, Mapping[str, tuple[str, ...]]]


@dataclass(frozen=True)
class StoredKernels:
    """The kernels of one target as they lie on disk, read one by one when they are loaded onto a device."""

    folder: Path
    listed: TargetKernels

    @classmethod
    def of(cls, artifact: Artifact, target: str) -> StoredKernels | None:
        """The artifact's for a target, checked as `read_kernels` does; None where it holds none."""
        for listed in read_kernels(artifact):
            if listed.target == target:
                return cls(artifact.folder / layout.KERNELS / target, listed)
        return None

    def read(self, name: str) -> tuple[dict[str, Any], bytes]:
        """Metadata and machine code of a kernel; ValueError where it is not there or not what its metadata names."""
        if name not in {entry.name for entry in self.listed.kernels}:
            raise ValueError(f"there is no kernel {name[:120]}")
        try:
            body = _json(self.folder / f"{name}.json", name)
            cubin = (self.folder / f"{name}.cubin").read_bytes()
            digests = _mapping(body.get("sha256"), name)
        except (OSError, CheckpointError) as error:
            raise ValueError(str(error)) from None
        if digests.get("cubin") != hashlib.sha256(cubin).hexdigest():
            raise ValueError("its machine code is not the one that its description names")
        return body, cubin


def read_buckets(artifact: Artifact) -> dict[str, Any] | None:
    """`quantkit/buckets.json`, or None where the artifact has none. CheckpointError where it is not as it must be."""
    if layout.BUCKETS not in artifact.manifest.files:
        return None
    where = f"{artifact.folder}/{layout.BUCKETS}"
    body = _json(artifact.folder / layout.BUCKETS, where)
    if body.get("version") != 1:
        raise CheckpointError(f"bucket plan version {str(body.get('version'))[:20]} is not 1", where=where)
    for phase in ("decode", "prefill"):
        sizes = body.get(phase)
        if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
            raise CheckpointError(f"{phase} buckets must be positive numbers", where=where, next=_AGAIN)
        if sizes != sorted(set(sizes)):
            raise CheckpointError(f"{phase} buckets must ascend", where=where, next=_AGAIN)
    return body


def read_kernels(artifact: Artifact) -> list[TargetKernels]:
    """The kernels of every target, each held against its files; CheckpointError names the first that is wrong."""
    targets: dict[str, list[str]] = {}
    for name in artifact.manifest.files:
        path = PurePosixPath(name)
        if name.startswith(f"{layout.KERNELS}/"):
            targets.setdefault(path.parts[2], []).append(path.name)
    ordered = sorted(targets, key=lambda target: int(target.removeprefix("sm_")))
    return [_target(artifact, target, set(targets[target])) for target in ordered]


def _target(artifact: Artifact, target: str, files: set[str]) -> TargetKernels:
    folder = artifact.folder / layout.KERNELS / target
    where = f"{folder}/index.json"
    if "index.json" not in files:
        raise CheckpointError("is missing", where=where, next=_AGAIN)
    index = _json(folder / "index.json", where)
    names: Any = index.get("kernels")
    launches, missing = index.get("launches"), index.get("missing")
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if index.get("version") != 1 or index.get("target") != target or not known:
        raise CheckpointError(f"is no index of version 1 for {target}", where=where, next=_AGAIN)
    if files != {"index.json"} | {f"{name}.{kind}" for name in names for kind in ("cubin", "ptx", "json")}:
        raise CheckpointError("lists other kernels than lie beside it", where=where, next=_AGAIN)
    nodes = {node.name for node in artifact.program.nodes}
    classes: dict[str, list[str]] = {name: [] for name in names}
    launched_by: dict[str, dict[str, tuple[str, ...]]] = {}
    for bucket_class, launched in _mapping(launches, where).items():
        for node, chosen in _mapping(launched, where).items():
            there = isinstance(chosen, list) and all(isinstance(name, str) and name in classes for name in chosen)
            if node not in nodes or not there:
                raise CheckpointError(f"node {str(node)[:60]!r} launches what is not there", where=where, next=_AGAIN)
            launched_by.setdefault(str(bucket_class), {})[node] = tuple(chosen)
            for name in chosen:
                classes[name].append(str(bucket_class))
    reasons = {str(kind): _mapping(absent, where) for kind, absent in _mapping(missing, where).items()}
    entries = tuple(_entry(folder, target, name, classes[name]) for name in names)
    return TargetKernels(target, entries, reasons, launched_by)


def _entry(folder: Path, target: str, name: str, classes: list[str]) -> KernelEntry:
    where = f"{folder}/{name}.json"
    body = _json(folder / f"{name}.json", where)
    if body.get("target") != target or not str(name).startswith(f"{body.get('kernel')}-"):
        raise CheckpointError("describes another kernel or target", where=where, next=_AGAIN)
    if not all(type(body.get(key)) is int and body[key] >= 0 for key in _NUMBERS):
        raise CheckpointError(f"must state {', '.join(_NUMBERS)} as numbers", where=where, next=_AGAIN)
    cubin, ptx = (folder / f"{name}.cubin").read_bytes(), (folder / f"{name}.ptx").read_bytes()
    digests = _mapping(body.get("sha256"), where)
    for kind, data in (("cubin", cubin), ("ptx", ptx)):
        if digests.get(kind) != hashlib.sha256(data).hexdigest():
            raise CheckpointError("is not the file that its description names", where=f"{folder}/{name}.{kind}")
    if cubin[:4] != _ELF_CUDA[0] or int.from_bytes(cubin[18:20], "little") != _ELF_CUDA[1]:
        raise CheckpointError("is no CUDA machine code", where=f"{folder}/{name}.cubin", next=_AGAIN)
    named = re.search(rb"^\.target\s+(\w+)", ptx, re.MULTILINE)
    if named is None or named[1].decode() not in (target, f"{target}a"):
        raise CheckpointError(f"is not for {target}", where=f"{folder}/{name}.ptx", next=_AGAIN)
    return KernelEntry(
        name=name,
        kernel=str(body["kernel"]),
        target=target,
        classes=tuple(dict.fromkeys(classes)),
        size=len(cubin),
        versions={str(key): str(value) for key, value in _mapping(body.get("versions"), where).items()},
        **{key: body[key] for key in _NUMBERS},
    )


def _json(path: Path, where: str) -> dict[str, Any]:
    if path.stat().st_size > _MOST:
        raise CheckpointError(f"more than {_MOST} bytes are too many", where=where, next=_AGAIN)
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not readable: {str(error)[:80]}", where=where, next=_AGAIN) from None
    return _mapping(body, where)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError("is not of the form this version reads", where=where, next=_AGAIN)
    return value
