"""The answers that the gate collected (`evidence/gate/answers.jsonl`), read as data that may be wrong or hostile."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError

ANSWERS = Path("gate") / "answers.jsonl"
_VERSION = 1
_NEXT = "Run quantkit gate on this artifact"


@dataclass(frozen=True)
class Answer:
    """One prompt, and what the unquantized model (`baseline`) and the artifact (`candidate`) said to it.

    messages: (role, text) in order. divergence: how far the two stray from each other, for ranking only. cut: those of
    the two, by name, that ended at the limit of tokens; known from the gate's file, no part of a sample.
    """

    id: str
    category: str
    language: str
    critical: bool
    messages: tuple[tuple[str, str], ...]
    criteria: str
    baseline: str
    candidate: str
    divergence: float
    cut: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def stratum(self) -> str:
        """Category and language."""
        return f"{self.category} {self.language}"

    @property
    def identical(self) -> bool:
        """Whether both said the same: a tie without anybody looking."""
        return self.baseline == self.candidate

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of what is shown: prompt, baseline, candidate."""
        prompt = json.dumps([list(turn) for turn in self.messages], ensure_ascii=False)
        shown = {"prompt": prompt, "baseline": self.baseline, "candidate": self.candidate}
        return {f"{name}_sha256": sha256(text) for name, text in shown.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain data; `answer_of` reads it."""
        return {
            "id": self.id,
            "category": self.category,
            "language": self.language,
            "critical": self.critical,
            "messages": [{"role": role, "content": content} for role, content in self.messages],
            "criteria": self.criteria,
            "baseline": {"text": self.baseline},
            "candidate": {"text": self.candidate},
            "divergence": self.divergence,
        }


def sha256(text: str) -> str:
    """Of a text's UTF-8 bytes, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_answers(path: Path, payload_digest: str) -> list[Answer]:
    """Every answer in the file, in its order.

    Raises CheckpointError when there is no such file, it is about another payload, or a line is not of its form.
    """
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except FileNotFoundError:
        raise CheckpointError("there are no answers to look at", where=str(path), next=_NEXT) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read ({error})", where=str(path), next=_NEXT) from None
    parsed = [_object(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    head = parsed[0] if parsed else {}
    if head.get("kind") != "answers" or head.get("version") != _VERSION:
        raise CheckpointError("is not a file of answers this version reads", where=str(path), next=_NEXT)
    if head.get("payload_digest") != payload_digest:
        raise CheckpointError("these answers are another payload's", where=str(path), next=_NEXT)
    answers = [answer_of(found, f"{path}:{number}") for number, found in enumerate(parsed[1:], 2)]
    _require_unique([answer.id for answer in answers], str(path))
    return answers


def answer_of(found: Mapping[str, Any], where: str) -> Answer:
    """One answer from plain data; CheckpointError (at `where`) for another form."""
    try:
        critical, divergence = found.get("critical", False), float(found.get("divergence") or 0.0)
        answer = Answer(
            id=_text(found["id"]),
            category=_text(found["category"]),
            language=_text(found["language"]),
            critical=critical is True,
            messages=tuple((_text(turn["role"]), _text(turn["content"])) for turn in found["messages"]),
            criteria=_text(found.get("criteria") or ""),
            baseline=_text(found["baseline"]["text"]),
            candidate=_text(found["candidate"]["text"]),
            divergence=divergence,
            cut=frozenset(name for name in ("baseline", "candidate") if found[name].get("finish") == "length"),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"not an answer ({error!r})"[:300], where=where, next=_NEXT) from None
    if not answer.messages or not 0 <= divergence < math.inf:
        raise CheckpointError("an answer without a prompt, or with a divergence that is none", where=where, next=_NEXT)
    return answer


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not readable as JSON ({error})", where=where, next=_NEXT) from None
    if not isinstance(found, dict):
        raise CheckpointError("not a JSON object", where=where, next=_NEXT)
    return found


def _text(value: Any) -> str:
    """The text, with half characters (lone surrogates), which no file can hold, as question marks."""
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} is no text")
    return value.encode("utf-8", "replace").decode("utf-8")


def _require_unique(ids: Sequence[str], where: str) -> None:
    seen: set[str] = set()
    for one in ids:
        if one in seen:
            raise CheckpointError(f"two answers are called {one[:80]!r}", where=where, next=_NEXT)
        seen.add(one)
