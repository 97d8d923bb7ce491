"""Held-out conversations: read, kept apart from calibration, rendered once, cut into windows of token ids."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.calibration.rows import read_rows
from quantkit.errors import RecipeError, RequestError

if TYPE_CHECKING:
    from quantkit.runtime.text import ChatText

Message = Mapping[str, str]

SHORT = 24
"""A message of fewer normalised characters (a greeting, a one-word answer) is no sign of an overlap."""


@dataclass(frozen=True)
class Conversation:
    """One row of a data file; `where` is `file:row`."""

    id: str
    category: str
    language: str
    messages: tuple[Message, ...]
    where: str


@dataclass(frozen=True)
class Window:
    """Token ids of one rendered conversation, perhaps cut at its end.

    Position p predicts ids[p + 1]. Scored are the positions `first <= p < len(ids) - 1`; those before `first` have
    a context that an earlier window already had (the template's head), so their score would count twice.
    """

    id: str
    category: str
    language: str
    ids: tuple[int, ...]
    first: int
    cut: bool

    @property
    def scored(self) -> int:
        """Number of scored positions."""
        return len(self.ids) - 1 - self.first

    @property
    def targets(self) -> tuple[int, ...]:
        """The token that follows each scored position."""
        return self.ids[self.first + 1 :]


@dataclass(frozen=True)
class EvalSet:
    """The windows a gate runs on. `fingerprint`: sha256 over ids and token ids in order; `available`: items read."""

    windows: tuple[Window, ...]
    fingerprint: str
    available: int
    files: tuple[str, ...] = field(default=())

    @property
    def tokens(self) -> int:
        """Tokens run."""
        return sum(len(window.ids) for window in self.windows)

    @property
    def scored(self) -> int:
        """Positions scored."""
        return sum(window.scored for window in self.windows)


def read_conversations(paths: Iterable[Path], *, strict: bool = True) -> list[Conversation]:
    """Conversations of JSONL, Parquet or CSV files in order; `text` rows count as one user turn.

    RecipeError names file and row of one without conversation or with an id used before, and, when `strict`, of one
    without id, category or language.
    """
    return list(each_conversation(paths, strict=strict))


def each_conversation(paths: Iterable[Path], *, strict: bool = True) -> Iterator[Conversation]:
    """`read_conversations` one at a time: for files that need not fit into memory."""
    ids: dict[str, str] = {}
    for path in paths:
        for number, row in enumerate(read_rows(path), start=1):
            item = _conversation(row, f"{path}:{number}", strict)
            if strict:
                if item.id in ids:
                    raise RecipeError(
                        f"the id {item.id!r} was used before", where=item.where, next=f"See {ids[item.id]}"
                    )
                ids[item.id] = item.where
            yield item


def refuse_overlap(held_out: Iterable[Conversation], calibration: Iterable[Conversation]) -> None:
    """RecipeError when a message of the held-out set also stands in the calibration set, by hash of normalised text.

    System messages are instructions that many conversations may share and don't count, nor do very short ones. Memory
    holds the held-out set's hashes; the calibration set is gone through once.
    """
    judged: dict[bytes, str] = {}
    for item in held_out:
        for key in _message_hashes(item):
            judged.setdefault(key, item.where)
    for item in calibration:
        for key in _message_hashes(item):
            if key in judged:
                raise RecipeError(
                    f"this conversation is also used for calibration ({item.where}): judging on it would prove nothing",
                    where=judged[key],
                    next="Remove it from one of the two files",
                )


def make_windows(
    conversations: Sequence[Conversation],
    text: ChatText,
    *,
    max_samples: int,
    max_tokens: int,
    max_window: int,
    seed: int,
) -> EvalSet:
    """At most `max_samples` windows of `max_window` tokens, `max_tokens` in all, spread over language × category.

    Cells take turns; within a cell the order is a hash of seed and id, so that it doesn't depend on the file's order.
    """
    rows: list[Window] = []
    prefixes: set[bytes] = set()
    total = 0
    for item in _in_turns(conversations, seed)[:max_samples]:
        ids = encode(item, text)
        kept = ids[: min(max_window, max_tokens - total)]
        if len(kept) < min(len(ids), 32) or len(kept) < 2:
            continue
        first = _first_new(kept, prefixes)
        if first >= len(kept) - 1:
            continue
        total += len(kept)
        rows.append(Window(item.id, item.category, item.language, tuple(kept), first, len(kept) < len(ids)))
    if len(rows) < 2:
        raise RecipeError(
            "fewer than two usable held-out conversations", next="Give the gate more data, or a higher limit of tokens"
        )
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.id}\0{row.first}\0{','.join(map(str, row.ids))}\n".encode())
    files = dict.fromkeys(item.where.rpartition(":")[0] for item in conversations)
    return EvalSet(tuple(rows), digest.hexdigest(), len(conversations), tuple(files))


def encode(item: Conversation, text: ChatText, *, add_generation_prompt: bool = False) -> list[int]:
    """Token ids of a conversation through the chat template, or of its plain text where the model has none.

    `add_generation_prompt`: end with the header of the assistant's turn. A template that refuses a system turn
    (Gemma's) gets that text at the head of the first user turn.
    """
    if not text.has_template:
        return text.encode("\n\n".join(m["content"] for m in item.messages), add_special_tokens=True)
    try:
        return text.encode_chat(item.messages, add_generation_prompt=add_generation_prompt)
    except RequestError as error:
        if item.messages[0]["role"] != "system" or len(item.messages) < 2:
            raise RecipeError(f"the chat template refuses this conversation: {error.what}", where=item.where) from None
    head, user, *rest = item.messages
    merged = {"role": user["role"], "content": f"{head['content']}\n\n{user['content']}"}
    return text.encode_chat([merged, *rest], add_generation_prompt=add_generation_prompt)


def _conversation(row: Mapping[str, Any], where: str, strict: bool) -> Conversation:
    for key in ("id", "category", "language"):
        if strict and not (isinstance(row.get(key), str) and row[key]):
            raise RecipeError(f"key {key!r} must be text", where=where)
    messages = row.get("messages")
    if messages is None and isinstance(row.get("text"), str):
        messages = [{"role": "user", "content": row["text"]}]
    if not isinstance(messages, list) or not messages:
        raise RecipeError("key 'messages' must be a list of turns", where=where)
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise RecipeError("a turn has a 'role' and a 'content', both text", where=where)
    turns = tuple({"role": m["role"], "content": m["content"]} for m in messages)
    item = Conversation(str(row.get("id")), str(row.get("category")), str(row.get("language")), turns, where)
    if strict and any(map(_half_characters, (item.id, item.category, item.language, *(m["content"] for m in turns)))):
        raise RecipeError("holds half of a surrogate pair, which is no character", where=where)
    return item


def _half_characters(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text)


def _message_hashes(item: Conversation) -> list[bytes]:
    texts = (_normalised(m["content"]) for m in item.messages if m["role"] != "system")
    return [hashlib.sha256(text.encode()).digest() for text in texts if len(text) >= SHORT]


def _normalised(content: str) -> str:
    """Letters and digits only, one form of Unicode, one case: layout and punctuation hide no copy."""
    return "".join(c for c in unicodedata.normalize("NFKC", content).casefold() if c.isalnum())


def _in_turns(conversations: Sequence[Conversation], seed: int) -> list[Conversation]:
    cells: dict[tuple[str, str], list[Conversation]] = defaultdict(list)
    for item in sorted(conversations, key=lambda item: hashlib.sha256(f"{seed}\0{item.id}".encode()).digest()):
        cells[item.language, item.category].append(item)
    order = [cells[key] for key in sorted(cells)]
    longest = max((len(cell) for cell in order), default=0)
    return [cell[turn] for turn in range(longest) for cell in order if turn < len(cell)]


def _first_new(ids: Sequence[int], prefixes: set[bytes]) -> int:
    """First position whose whole context (itself included) no earlier window had; adds this window's contexts."""
    state = hashlib.sha256()
    first = 0
    for position, token in enumerate(ids):
        state.update(f"{token},".encode())
        key = state.digest()
        if key in prefixes and first == position:
            first = position + 1
        prefixes.add(key)
    return first
