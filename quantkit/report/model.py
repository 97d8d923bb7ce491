"""The report as data: everything the HTML page shows, and what `quantkit report --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Bytes:
    """One kind of stored tensor: bytes in the source's 16-bit form, and in the artifact."""

    kind: str
    before: int
    after: int


@dataclass(frozen=True)
class Cell:
    """One decision unit: its layer (None for the output head), its kind (`qkv`, ...) and how it is stored."""

    group: str
    layer: int | None
    kind: str
    scheme: str
    bits: int


@dataclass(frozen=True)
class Memory:
    """Where the bytes sit. KV bytes are of one token over all layers; before: with a 16-bit cache."""

    kinds: tuple[Bytes, ...]
    kv_format: str
    kv_before: int
    kv_after: int
    payload: int
    """Bytes of every payload file, tokenizer and JSON included."""

    @property
    def before(self) -> int:
        """Weight bytes at two bytes a weight."""
        return sum(kind.before for kind in self.kinds)

    @property
    def after(self) -> int:
        """Weight bytes stored."""
        return sum(kind.after for kind in self.kinds)


@dataclass(frozen=True)
class Stage:
    """One stage of the build. Seconds and peak anonymous bytes are of the run that made it."""

    name: str
    seconds: float
    peak_bytes: int
    cached: bool


@dataclass(frozen=True)
class Report:
    """An artifact and what was found out about it.

    gate: the content of `evidence/gate/gate.json`, None while nobody judged. calibration: samples, fingerprint and,
    where the run record is at hand, coverage. run: recipe file, start, seconds, environment of the build, or None.
    """

    name: str
    payload_digest: str
    source: Mapping[str, Any]
    memory: Memory
    layers: tuple[Cell, ...]
    gate: Mapping[str, Any] | None
    calibration: Mapping[str, Any]
    checks: Mapping[str, Any]
    run: Mapping[str, Any] | None
    stages: tuple[Stage, ...]
    commands: tuple[str, ...]
    version: str

    @property
    def verdict(self) -> str:
        """The verdict's name; `not judged` without one."""
        return str(self.gate["verdict"]["verdict"]) if self.gate else "not judged"

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"verdict": self.verdict}
