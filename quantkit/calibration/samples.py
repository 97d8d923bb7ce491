"""The chosen calibration samples as token ids, and their form on disk: every stage of a build reads the very same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLES = "samples.json"
COVERAGE = "coverage.json"


@dataclass(frozen=True)
class Sample:
    """One conversation as token ids, with what it represents."""

    ids: tuple[int, ...]
    language: str
    category: str
    name: str
    """The row's own id, or file and row; what an error message points at."""
    prompt_tokens: int | None = None
    """How many of `ids` come before the last answer; None where no answer is marked (plain text)."""


@dataclass(frozen=True)
class CalibrationSet:
    """The chosen samples in file order, the fingerprint of exactly these tokens, and what they cover."""

    samples: tuple[Sample, ...]
    fingerprint: str
    coverage: Mapping[str, Any]
    """Plain data, see `calibration.coverage`."""

    @property
    def tokens(self) -> int:
        """Number of tokens over all samples."""
        return sum(len(sample.ids) for sample in self.samples)


def write_samples(chosen: CalibrationSet, folder: Path) -> None:
    """Write `samples.json` (one sample a line) and `coverage.json` into `folder`, over what a killed run left there."""
    rows = ",\n".join(
        json.dumps({**vars(sample), "ids": list(sample.ids)}, ensure_ascii=False) for sample in chosen.samples
    )
    head = json.dumps({"fingerprint": chosen.fingerprint})
    (folder / SAMPLES).write_text(f'{head[:-1]}, "samples": [\n{rows}\n]}}\n', encoding="utf-8")
    table = json.dumps(chosen.coverage, indent=1, ensure_ascii=False)
    (folder / COVERAGE).write_text(f"{table}\n", encoding="utf-8")


def read_samples(folder: Path) -> CalibrationSet:
    """What `write_samples` wrote, from the calibrate stage's folder: the same samples in the same order."""
    kept = json.loads((folder / SAMPLES).read_text(encoding="utf-8"))
    samples = tuple(Sample(tuple(row.pop("ids")), **row) for row in kept["samples"])
    coverage = json.loads((folder / COVERAGE).read_text(encoding="utf-8"))
    return CalibrationSet(samples, kept["fingerprint"], coverage)
