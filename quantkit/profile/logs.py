"""A profile counted from request logs, one JSON object a line; no text of theirs is kept.

A line may be a bare request with or without its answer (`messages` or `prompt`; `completion`, `output` or `choices`;
`usage`), hold the two under `request` and `response` (with a `body` inside, as batch files have it), or be an access
record (`prompt_tokens`, `completion_tokens`, `time`, `duration_ms`), such as `quantkit serve` writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import RecipeError
from quantkit.numeric import is_number
from quantkit.profile.language import language_of
from quantkit.profile.model import ANY, EDGES, Cell, Concurrency, Histogram, Profile, bin_of, label

_LONGEST_LINE = 1 << 26
_MOST_CELLS = 1000
_MOST_TOKENS = 1 << 24

CountPrompt = Callable[[Sequence[Mapping[str, Any]] | str], int]
"""Tokens of a prompt: messages through the chat template, or plain text."""
CountText = Callable[[str], int]


@dataclass
class Tally:
    """What the lines of a log were. `bad`: no JSON object, or cut off; `other`: objects that are no request;
    `failed`: requests that ended in an error; `unmeasured`: requests without a prompt length."""

    lines: int = 0
    requests: int = 0
    bad: int = 0
    other: int = 0
    failed: int = 0
    unmeasured: int = 0
    first_bad: str = ""
    """`file:line` of the first bad one."""


@dataclass
class _Counts:
    requests: int = 0
    prompt: list[int] = field(default_factory=lambda: [0] * len(EDGES))
    output: list[int] = field(default_factory=lambda: [0] * len(EDGES))


@dataclass(frozen=True)
class _Request:
    category: str
    language: str
    prompt_tokens: int | None
    output_tokens: int | None
    span: tuple[float, float] | None
    """Start and end, in seconds."""


def profile_of_logs(
    paths: Iterable[Path],
    *,
    tokenizer: str | None = None,
    count_prompt: CountPrompt | None = None,
    count_text: CountText | None = None,
) -> tuple[Profile, Tally]:
    """Count the requests in the logs at `paths`, in memory that does not grow with their number of lines.

    Lengths come from `usage` where a line has it, else from the counting functions, where given; `tokenizer` names
    what those count with. A line that is no whole JSON object is counted, not fatal.

    Raises RecipeError for a file that cannot be read, for logs without any request, and for labels so many that they
    must be identifiers.
    """
    cells: dict[tuple[str, str], _Counts] = {}
    tally = Tally()
    load = _Load()
    for path in paths:
        for number, row in _rows(path, tally):
            request = _request(row, count_prompt, count_text)
            if request is None:
                tally.other += 1
                continue
            if _failed(row):
                tally.failed += 1
                continue
            tally.requests += 1
            counts = cells.setdefault((request.category, request.language), _Counts())
            if len(cells) > _MOST_CELLS:
                raise RecipeError(
                    f"more than {_MOST_CELLS} pairs of category and language",
                    where=f"{path}:{number}",
                    next="`category` must name a kind of request, not each request: map it to a few first",
                )
            counts.requests += 1
            tally.unmeasured += request.prompt_tokens is None
            _count(counts.prompt, request.prompt_tokens)
            _count(counts.output, request.output_tokens)
            load.add(request.span)
    if not tally.requests:
        raise RecipeError(
            f"no request among {tally.lines} lines ({tally.bad} are no JSON objects, {tally.failed} failed)",
            where=", ".join(map(str, paths)),
            next='A line reads {"messages": [...], "usage": {"prompt_tokens": 12, "completion_tokens": 34}}',
        )
    made = tuple(
        Cell(
            category,
            language,
            c.requests / tally.requests,
            Histogram.of_counts(c.prompt),
            Histogram.of_counts(c.output),
        )
        for (category, language), c in sorted(cells.items())
    )
    return Profile(made, load.concurrency(), tally.requests, tokenizer), tally


def _rows(path: Path, tally: Tally) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and object of each whole line; the others are counted."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                tally.lines += 1
                if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                    while (rest := file.readline(_LONGEST_LINE)) and not rest.endswith(b"\n"):
                        pass
                    row = None
                elif not line.strip():
                    tally.lines -= 1
                    continue
                else:
                    row = _object(line)
                if row is None:
                    tally.bad += 1
                    tally.first_bad = tally.first_bad or f"{path}:{number}"
                else:
                    yield number, row
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(path)) from None


def _object(line: bytes) -> Mapping[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _request(row: Mapping[str, Any], count_prompt: CountPrompt | None, count_text: CountText | None) -> _Request | None:
    """The line as a request; None when it is something else (a log's own events)."""
    asked, answered = _part(row, "request"), _part(row, "response")
    parts = (row, asked, answered)
    messages = next((m for part in parts if (m := _messages(part)) is not None), None)
    prompt = messages if messages is not None else _first(parts, "prompt", str)
    usage = next((u for part in parts if isinstance(u := part.get("usage"), dict)), {})
    prompt_tokens, output_tokens = (
        next((n for part in (usage, *parts) if (n := _whole(part.get(key))) is not None), None)
        for key in ("prompt_tokens", "completion_tokens")
    )
    if prompt is None and prompt_tokens is None:
        return None
    answer = _answer(parts)
    if messages is not None and messages[-1].get("role") == "assistant" and answer is None:
        answer, prompt = str(messages[-1].get("content") or ""), messages[:-1]  # the answer stands in the conversation
    if prompt_tokens is None and count_prompt is not None and prompt:
        prompt_tokens = count_prompt(prompt)
    if output_tokens is None and count_text is not None and answer:
        output_tokens = count_text(answer)
    return _Request(
        _label(parts, "category") or ANY,
        _label(parts, "language") or _language(prompt),
        prompt_tokens,
        output_tokens,
        _span(parts),
    )


def _part(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The request or the response inside a line; batch files keep either in a `body`."""
    part = row.get(name)
    if not isinstance(part, dict):
        part = row.get("body") if name == "request" else None
    if isinstance(part, dict) and isinstance(part.get("body"), dict):
        part = part["body"]
    return part if isinstance(part, dict) else {}


def _messages(part: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    found = part.get("messages")
    if isinstance(found, list) and found and all(isinstance(message, dict) for message in found):
        return found
    return None


def _answer(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """The first choice's text, or a plain `completion` or `output`."""
    for part in parts:
        choices = part.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            message = choices[0].get("message")
            content = message.get("content") if isinstance(message, dict) else choices[0].get("text")
            if isinstance(content, str):
                return content
    return _first(parts, "completion", str) or _first(parts, "output", str)


def _first(parts: Sequence[Mapping[str, Any]], key: str, kind: type) -> Any:
    return next((part[key] for part in parts if isinstance(part.get(key), kind) and part[key]), None)


def _label(parts: Sequence[Mapping[str, Any]], key: str) -> str | None:
    """A field of the line, or of the `metadata` that a client sent along."""
    inside = [m for part in parts if isinstance(m := part.get("metadata"), dict)]
    text = _first((*parts, *inside), key, str)
    return label(text) or None if text else None


def _language(prompt: Sequence[Mapping[str, Any]] | str | None) -> str:
    """By the script of what the user wrote; instructions to the model may be in another language."""
    if prompt is None:
        return ANY
    if isinstance(prompt, str):
        return language_of(prompt)
    texts = [text for message in prompt if message.get("role") == "user" and (text := _text(message.get("content")))]
    return language_of(texts[-1]) if texts else language_of(" ".join(_text(m.get("content")) for m in prompt))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return " ".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _failed(row: Mapping[str, Any]) -> bool:
    status = row.get("status", row.get("status_code"))
    return bool(row.get("error")) or (isinstance(status, int) and not isinstance(status, bool) and status >= 400)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS else None


def _count(counts: list[int], tokens: int | None) -> None:
    if tokens:
        counts[bin_of(tokens, EDGES)] += 1


def _span(parts: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Start and end of a request whose line tells when it ended (`time`) and how long it took (`duration_ms`), or when
    it was `created` and took."""
    end, start = _number(parts, "time"), _number(parts, "created")
    took = _number(parts, "duration_ms")
    if took is None or took < 0 or (end is None and start is None):
        return None
    return (end - took / 1e3, end) if end is not None else (start or 0.0, (start or 0.0) + took / 1e3)


def _number(parts: Sequence[Mapping[str, Any]], key: str) -> float | None:
    for part in parts:
        value = part.get(key)
        if is_number(value):
            return float(value)
    return None


class _Load:
    """Requests in flight, from starts and ends; up to `_KEPT` of them."""

    _KEPT = 1_000_000

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def add(self, span: tuple[float, float] | None) -> None:
        if span is not None and len(self._spans) < self._KEPT:
            self._spans.append(span)

    def concurrency(self) -> Concurrency | None:
        """Mean over the time in which any request ran, and the most at once; None without times."""
        edges = sorted([(start, 1) for start, _ in self._spans] + [(end, -1) for _, end in self._spans])
        running = peak = 0
        busy = area = 0.0
        before = 0.0
        for at, step in edges:
            if running:
                busy, area = busy + at - before, area + running * (at - before)
            running, before = running + step, at
            peak = max(peak, running)
        return Concurrency(round(area / busy, 3), peak) if busy > 0 else None
