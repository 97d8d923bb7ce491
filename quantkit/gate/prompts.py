"""Prompts with checkable answers: read from JSONL, checked line by line, sampled over language and category."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import RecipeError
from quantkit.gate.checks import Check, parse_check
from quantkit.gate.data import Conversation, Message
from quantkit.gate.json_answers import strict_json

_KEYS = frozenset(
    ("id", "category", "language", "messages", "max_tokens", "critical", "checks", "criteria", "note", "source")
)
_MOST_TOKENS = 4096


@dataclass(frozen=True)
class Prompt:
    """One prompt; its last message is the user's. `checks` decide an answer, `criteria` tell people what to look for.

    `critical`: a scenario that people always look at. `where`: `file:line`.
    """

    id: str
    category: str
    language: str
    messages: tuple[Message, ...]
    max_tokens: int
    critical: bool
    checks: tuple[Check, ...]
    criteria: str | None
    where: str

    def passes(self, answer: str) -> bool:
        """Whether `answer` satisfies every check."""
        return all(check.passes(answer) for check in self.checks)

    @property
    def refusal(self) -> str:
        """`True` or `False` where a check says whether the model should refuse, else empty."""
        return next((str(check.arguments["value"]) for check in self.checks if check.kind == "refusal"), "")

    def row(self) -> dict[str, Any]:
        """The prompt as its line of a prompt file."""
        return {
            "id": self.id,
            "category": self.category,
            "language": self.language,
            "messages": [dict(message) for message in self.messages],
            "max_tokens": self.max_tokens,
            "critical": self.critical,
            "checks": [{"kind": check.kind, **check.arguments} for check in self.checks],
            "criteria": self.criteria,
        }

    @property
    def conversation(self) -> Conversation:
        """The prompt as a conversation, for comparing it with other data."""
        return Conversation(self.id, self.category, self.language, self.messages, self.where)


def read_prompts(paths: Iterable[Path]) -> list[Prompt]:
    """The prompts of JSONL files in order. RecipeError names file, line and what is wrong."""
    found: list[Prompt] = []
    ids: dict[str, str] = {}
    for path in paths:
        try:
            lines = path.read_text("utf-8").split("\n")
        except (OSError, ValueError) as error:
            raise RecipeError(f"cannot be read: {error}", where=str(path)) from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            item = parse_prompt(_object(line, f"{path}:{number}"), f"{path}:{number}")
            if item.id in ids:
                raise RecipeError(f"the id {item.id!r} was used before", where=item.where, next=f"See {ids[item.id]}")
            ids[item.id] = item.where
            found.append(item)
    return found


def choose(prompts: Sequence[Prompt], most: int, *, seed: int) -> list[Prompt]:
    """At most `most` prompts in their own order: critical ones first, then language × category cells in turns.

    Prompts to refuse and their harmless look-alikes are cells of their own.
    """
    cells: dict[tuple[str, str, str], list[Prompt]] = defaultdict(list)
    for item in sorted(prompts, key=lambda item: (not item.critical, _order(seed, item.id))):
        cells[item.language, item.category, item.refusal].append(item)
    longest = max((len(cell) for cell in cells.values()), default=0)
    turns = [cells[key][turn] for turn in range(longest) for key in sorted(cells) if turn < len(cells[key])]
    turns.sort(key=lambda item: not item.critical)
    kept = {item.id for item in turns[:most]}
    return [item for item in prompts if item.id in kept]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """sha256 over everything that the prompts say."""
    digest = hashlib.sha256()
    for item in prompts:
        digest.update(json.dumps(item.row(), ensure_ascii=False, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _order(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{name}".encode()).digest()


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = strict_json(line)
        json.dumps(row, ensure_ascii=False).encode()  # halves of surrogate pairs are no text
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"not valid JSON ({error})", where=where) from None
    if not isinstance(row, dict):
        raise RecipeError("not a JSON object", where=where)
    return row


def parse_prompt(row: Mapping[str, Any], where: str) -> Prompt:
    """A prompt from its line of a prompt file; RecipeError names what is wrong with it."""
    for key in ("id", "category", "language"):
        if not (isinstance(row.get(key), str) and row[key]):
            raise RecipeError(f"key {key!r} must be text", where=where)
    for key in sorted(row.keys() - _KEYS):
        raise RecipeError(f"unknown key {key!r}", where=where, next=f"Known: {', '.join(sorted(_KEYS))}")
    checks = row.get("checks", [])
    if not isinstance(checks, list):
        raise RecipeError("key 'checks' must be a list", where=where)
    if not isinstance(row.get("critical", False), bool):
        raise RecipeError("key 'critical' must be true or false", where=where)
    if not isinstance(row.get("criteria"), str | None):
        raise RecipeError("key 'criteria' must be text", where=where)
    return Prompt(
        id=row["id"],
        category=row["category"],
        language=row["language"],
        messages=_messages(row.get("messages"), where),
        max_tokens=_tokens(row, where),
        critical=row.get("critical", False),
        checks=tuple(parse_check(check, where) for check in checks),
        criteria=row.get("criteria"),
        where=where,
    )


def _messages(found: Any, where: str) -> tuple[Mapping[str, str], ...]:
    if not isinstance(found, list) or not found:
        raise RecipeError("key 'messages' must be a list of turns", where=where)
    for message in found:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise RecipeError("a turn has a 'role' and a 'content', both text", where=where)
    if found[-1]["role"] != "user":
        raise RecipeError("the last turn must be the user's", where=where)
    return tuple({"role": m["role"], "content": m["content"]} for m in found)


def _tokens(row: Mapping[str, Any], where: str) -> int:
    count = row.get("max_tokens", 128)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST_TOKENS:
        raise RecipeError(f"key 'max_tokens' must be a whole number from 1 to {_MOST_TOKENS}", where=where)
    return count
