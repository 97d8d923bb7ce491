"""The answers that lost most: right before and wrong now, then those that stray furthest from the baseline's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.report.model import Compared
from quantkit.review.answers import Answer, read_answers

SHOWN = 8
LOST_SHOWN = 6
"""Of those SHOWN, how many may be lost ones."""


def worst_answers(path: Path, payload_digest: str) -> tuple[Compared, ...]:
    """At most SHOWN of the answers in `path`, worst first, none that both models gave alike.

    Raises CheckpointError when the file is another payload's or not of its form.
    """
    answers = read_answers(path, payload_digest)
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    every = [_compared(one, json.loads(line)) for one, line in zip(answers, lines[1:], strict=True)]
    ordered = sorted((one for one in every if one.baseline != one.candidate), key=lambda one: -one.divergence)
    lost = [one for one in ordered if one.lost][:LOST_SHOWN]
    others = [one for one in ordered if one not in lost]
    return (*lost, *others[: SHOWN - len(lost)])


def _compared(answer: Answer, row: Mapping[str, Any]) -> Compared:
    checks: Sequence[Mapping[str, Any]] = row.get("checks", ())
    failed = tuple(str(check["kind"]) for check in checks if check["baseline"] and not check["candidate"])
    return Compared(
        id=answer.id,
        category=answer.category,
        language=answer.language,
        critical=answer.critical,
        prompt=answer.messages,
        criteria=answer.criteria,
        baseline=answer.baseline,
        candidate=answer.candidate,
        tokens=(row["baseline"]["tokens"], row["candidate"]["tokens"]),
        first_divergence=row.get("first_divergence"),
        divergence=answer.divergence,
        failed=failed,
        lost=bool(failed) and all(check["baseline"] for check in checks),
    )
