"""The report as data: everything the HTML page shows, and what `quantkit report --format json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.review.status import joined


@dataclass(frozen=True)
class Bytes:
    """One kind of stored tensor: bytes in the source's 16-bit form, and in the artifact."""

    kind: str
    before: int
    after: int


@dataclass(frozen=True)
class Cell:
    """One decision unit: its layer (None for the output head), its kind (`qkv`, ...) and how it is stored.

    sensitivity: what its narrowest scheme was predicted to cost, in the search's unit. error_of_rtn: its GPTQ error as
    a share of rounding's. Both None where nothing was recorded.
    """

    group: str
    layer: int | None
    kind: str
    scheme: str
    bits: int
    sensitivity: float | None = None
    error_of_rtn: float | None = None


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
class Compared:
    """Both models' answers to one prompt: `prompt` as `(role, text)` turns; `baseline` and `candidate` the texts.

    tokens: of both answers; first_divergence: index of the first differing token, None where there is none. failed:
    kinds of the checks that only the artifact's answer fails. lost: whether it went from right to wrong.
    """

    id: str
    category: str
    language: str
    critical: bool
    prompt: tuple[tuple[str, str], ...]
    criteria: str
    baseline: str
    candidate: str
    tokens: tuple[int, int]
    first_divergence: int | None
    divergence: float
    failed: tuple[str, ...]
    lost: bool


@dataclass(frozen=True)
class Report:
    """An artifact and what was found out about it.

    gate: the content of `evidence/gate/gate.json`, None while nobody judged. calibration: samples, fingerprint and,
    where the run record is at hand, coverage. run: recipe file, start, seconds, environment of the build, or None.
    review: where people's spot check stands, the form of `quantkit review status --json`. answers: the worst ones.
    search: `evidence/run/search.json`. gptq: `fallbacks` and `damping` by group. kernels: by target, and buckets. What
    an artifact of an earlier release has nothing about is None.
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
    review: Mapping[str, Any] | None = None
    answers: tuple[Compared, ...] = ()
    search: Mapping[str, Any] | None = None
    gptq: Mapping[str, Any] | None = None
    kernels: Mapping[str, Any] | None = None

    @property
    def verdict(self) -> str:
        """The verdict's name, people's word in it; `not judged` without one."""
        if self.gate is None:
            return "not judged"
        found = str(self.gate["verdict"]["verdict"])
        return joined(found, self.review["verdict"]) if self.review else found

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"verdict": self.verdict}
