"""Baseline's and candidate's answers side by side, and the file that people and report read: `answers.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.gate.evidence import write_text
from quantkit.gate.generate import Generated
from quantkit.gate.prompts import Prompt

VERSION = 1


@dataclass(frozen=True)
class Pair:
    """One prompt and both answers to it.

    first_divergence: index of the first differing token, None when all agree. divergence: mean KL in nats along the
    baseline's answer. checks: `(kind, baseline passes, candidate passes)`, as the prompt lists them.
    """

    prompt: Prompt
    baseline: Generated
    candidate: Generated
    first_divergence: int | None
    divergence: float
    checks: tuple[tuple[str, bool, bool], ...]

    @property
    def right(self) -> tuple[bool, bool]:
        """Whether baseline and candidate pass every check."""
        return all(base for _, base, _ in self.checks), all(ours for _, _, ours in self.checks)

    def row(self) -> dict[str, Any]:
        """Plain data: one line of the file."""
        item = self.prompt
        return {
            "id": item.id,
            "category": item.category,
            "language": item.language,
            "critical": item.critical,
            "messages": [dict(message) for message in item.messages],
            "criteria": item.criteria,
            "baseline": _side(self.baseline),
            "candidate": _side(self.candidate),
            "first_divergence": self.first_divergence,
            "divergence": self.divergence,
            "checks": [{"kind": kind, "baseline": base, "candidate": ours} for kind, base, ours in self.checks],
        }


def judged(prompt: Prompt, baseline: Generated, candidate: Generated) -> tuple[tuple[str, bool, bool], ...]:
    """Every check of a prompt on both answers."""
    return tuple((check.kind, check.passes(baseline.text), check.passes(candidate.text)) for check in prompt.checks)


def write_answers(path: Path, payload_digest: str, pairs: Sequence[Pair]) -> None:
    """The evidence file: a first line that names the payload, then one line a prompt, in prompt order."""
    head = {"payload_digest": payload_digest, "kind": "answers", "version": VERSION}
    rows = [head, *(pair.row() for pair in pairs)]
    write_text(path, "".join(_line(row) for row in rows))


def _line(row: dict[str, Any]) -> str:
    """One line for every reader: what some take for an end of line is escaped."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029") + "\n"


def _side(answer: Generated) -> dict[str, Any]:
    return {"text": answer.text, "tokens": len(answer.token_ids), "finish": answer.finish}
