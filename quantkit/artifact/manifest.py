"""The manifest: what an artifact is, where it came from, and the SHA-256 of every payload file.

The payload digest is the artifact's identity:

    digest = SHA-256( canonical JSON of the manifest without its `payload_digest` key )

Canonical JSON is sorted keys, two-space indent, UTF-8, one newline at the end. The manifest lists path, size and
SHA-256 of every other payload file, so the digest covers every byte of the payload; it is stored in the manifest
itself, and a manifest that is not the canonical form of its own content is refused, so that no byte of it can change
unseen. No time or host name belongs here (those go to `evidence/run/`): equal inputs give equal digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import PurePosixPath
from typing import Any

from quantkit.artifact.layout import EVIDENCE, MANIFEST
from quantkit.errors import CheckpointError

SCHEMA_VERSION = 1
"""Major version of the artifact; another one is refused."""


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 (hexadecimal) of one payload file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What an artifact says about itself. Plain data: every field is JSON.

    source: location, fingerprint, family, dtype. recipe: resolved, with overrides. schemes: scheme by fused group.
    kv_format: of the cache. calibration: fingerprint and counts. environment: versions that decide the bytes.
    checks: measured while building (import parity). files: every payload file but this one.
    """

    quantkit_version: str
    source: Mapping[str, Any]
    recipe: Mapping[str, Any]
    schemes: Mapping[str, str]
    kv_format: str
    calibration: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    checks: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def with_files(self, files: Mapping[str, FileEntry]) -> Manifest:
        """A copy that lists `files`."""
        return replace(self, files=dict(sorted(files.items())))

    @property
    def payload_digest(self) -> str:
        """`sha256:<hex>`, see the module's docstring."""
        return "sha256:" + hashlib.sha256(canonical(asdict(self))).hexdigest()


def canonical(value: Any) -> bytes:
    """JSON with one spelling."""
    text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


def manifest_bytes(manifest: Manifest) -> bytes:
    """The bytes of `quantkit/manifest.json`."""
    return canonical(asdict(manifest) | {"payload_digest": manifest.payload_digest})


def parse_manifest(data: bytes, *, where: str = MANIFEST) -> Manifest:
    """The manifest in `data`, trusted in nothing; CheckpointError says what is wrong.

    Refused: another schema version, bytes that are not the canonical form of their content or not of the digest they
    state, unknown or missing keys, wrong types, file names that are absolute, climb out or lie in the evidence.
    """
    try:
        body = json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not a readable manifest: {error}", where=where, next=_AGAIN) from None
    if not isinstance(body, dict):
        raise CheckpointError("not a manifest", where=where, next=_AGAIN)
    version = body.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise CheckpointError(
            f"artifact schema version {str(version)[:20]} is not {SCHEMA_VERSION}",
            where=where,
            next="Rebuild it with this version: quantkit build RECIPE",
        )
    digest = body.pop("payload_digest", None)
    manifest = _manifest(body, where)
    try:
        sealed = digest == manifest.payload_digest and data == manifest_bytes(manifest)
    except (ValueError, RecursionError) as error:  # a number beyond float's range, a lone surrogate, a tower of lists
        raise CheckpointError(f"not a readable manifest: {error}", where=where, next=_AGAIN) from None
    if not sealed:
        raise CheckpointError("the manifest was changed after it was sealed", where=where, next=_AGAIN)
    return manifest


_AGAIN = "Fetch or build the artifact again"


def check_path(name: str, *, where: str = MANIFEST) -> None:
    """CheckpointError unless `name` is a plain relative path inside the payload."""
    path = PurePosixPath(name)
    plain = name == str(path) and not path.is_absolute() and ".." not in path.parts and name != "."
    if not plain or "\\" in name or any(ord(char) < 32 for char in name):
        raise CheckpointError(f"path {name[:120]!r} leaves the artifact", where=where)
    if path.parts[0] == EVIDENCE or name == MANIFEST:
        raise CheckpointError(f"{name!r} cannot be a listed payload file", where=where)


def _manifest(body: dict[str, Any], where: str) -> Manifest:
    known = {each.name: each for each in fields(Manifest)}
    for name in sorted(set(body) ^ set(known)):
        raise CheckpointError(f"{'unknown' if name in body else 'missing'} key {name[:60]!r}", where=where, next=_AGAIN)
    kinds = {"quantkit_version": str, "kv_format": str, "schema_version": int}
    for name, value in body.items():
        if not isinstance(value, kinds.get(name, dict)):
            raise CheckpointError(f"key {name!r} has the wrong type", where=where, next=_AGAIN)
    if not all(isinstance(value, str) for value in body["schemes"].values()):
        raise CheckpointError("key 'schemes' has the wrong type", where=where, next=_AGAIN)
    return Manifest(**(body | {"files": {name: _entry(name, entry, where) for name, entry in body["files"].items()}}))


def _entry(name: str, entry: Any, where: str) -> FileEntry:
    check_path(name, where=where)
    good = isinstance(entry, dict) and set(entry) == {"size", "sha256"} and type(entry["size"]) is int
    if not good or entry["size"] < 0 or not _is_sha256(entry["sha256"]):
        raise CheckpointError(f"bad entry of file {name!r}", where=where, next=_AGAIN)
    return FileEntry(entry["size"], entry["sha256"])


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key appears twice")
    return made


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
