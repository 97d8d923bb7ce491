"""Answers in OpenAI's shapes: chat completions and text completions, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from quantkit.runtime.text import ChatText
from quantkit.server.choices import Choice, Piece, Token
from quantkit.server.generation import Generation

Json = dict[str, Any]


class Format(Protocol):
    """How one endpoint writes choices."""

    whole_object: str
    chunk_object: str
    prefix: str

    def opening(self, choice: Choice) -> Json | None:
        """What a stream says of a choice before its first text."""
        ...

    def part(self, choice: Choice, piece: Piece) -> Json:
        """A choice's entry in a chunk."""
        ...

    def whole(self, choice: Choice, piece: Piece) -> Json:
        """A choice's entry in an answer given at once; `piece` is all of it."""
        ...


@dataclass
class ChatFormat:
    """POST /v1/chat/completions."""

    text: ChatText
    whole_object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    prefix: str = "chatcmpl-"

    def opening(self, choice: Choice) -> Json | None:
        """The role, once."""
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, choice: Choice, piece: Piece) -> Json:
        """New text under `delta`."""
        delta = {"content": piece.text} if piece.text else {}
        return {"index": choice.index, "delta": delta, **self._rest(piece)}

    def whole(self, choice: Choice, piece: Piece) -> Json:
        """The message."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": choice.index, "message": message, **self._rest(piece)}

    def _rest(self, piece: Piece) -> Json:
        content = [self._logprob(token) for token in piece.tokens]
        logprobs = {"content": content, "refusal": None} if content else None
        return {"logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _logprob(self, token: Token) -> Json:
        found = token.logprobs
        top = [self._entry(t, p) for t, p in zip(found.top_ids, found.top_logprobs, strict=True)]
        return {**self._entry(token.token_id, found.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> Json:
        data = self.text.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


@dataclass
class CompletionFormat:
    """POST /v1/completions. `echoes` holds, by choice index, the prompt's text to write before the answer."""

    text: ChatText
    echoes: dict[int, str] = field(default_factory=dict)
    whole_object: str = "text_completion"
    chunk_object: str = "text_completion"
    prefix: str = "cmpl-"

    def opening(self, choice: Choice) -> Json | None:
        """The prompt, when it is to be echoed."""
        echo = self.echoes.get(choice.index)
        return None if echo is None else self._entry(choice, Piece(echo), echo)

    def part(self, choice: Choice, piece: Piece) -> Json:
        """New text."""
        return self._entry(choice, piece, piece.text)

    def whole(self, choice: Choice, piece: Piece) -> Json:
        """All text, after the echoed prompt."""
        return self._entry(choice, piece, self.echoes.get(choice.index, "") + piece.text)

    def _entry(self, choice: Choice, piece: Piece, text: str) -> Json:
        logprobs = self._logprobs(piece.tokens, len(self.echoes.get(choice.index, ""))) if piece.tokens else None
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _logprobs(self, tokens: list[Token], offset: int) -> Json:
        return {
            "tokens": [self._token(token.token_id) for token in tokens],
            "token_logprobs": [token.logprobs.logprob for token in tokens],
            "top_logprobs": [
                {self._token(t): p for t, p in zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)}
                for token in tokens
            ],
            "text_offset": [offset + token.start for token in tokens],
        }

    def _token(self, token_id: int) -> str:
        return self.text.token_bytes(token_id).decode("utf-8", "replace")


@dataclass
class Answer:
    """One answer being written: its id, the moment it was begun, and the model's name."""

    model: str
    generation: Generation
    form: Format
    request_id: str
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> Json:
        """The answer at once."""
        pieces = {choice.index: Piece() for choice in self.generation.choices}
        async with aclosing(self.generation.pieces()) as gained:
            async for choice, piece in gained:
                whole = pieces[choice.index]
                whole.text += piece.text
                whole.tokens += piece.tokens
                whole.finish_reason = piece.finish_reason
        choices = [self.form.whole(choice, pieces[choice.index]) for choice in self.generation.choices]
        return {**self._frame(self.form.whole_object, choices), "usage": self.generation.usage()}

    async def chunks(self, include_usage: bool) -> AsyncGenerator[Json, None]:
        """The answer as it comes; with `include_usage` a last chunk without choices carries the counts."""
        extra: Json = {"usage": None} if include_usage else {}
        opened: set[int] = set()
        async with aclosing(self.generation.pieces()) as gained:
            async for choice, piece in gained:
                entries = []
                if choice.index not in opened:
                    opened.add(choice.index)
                    entries = [entry for entry in (self.form.opening(choice),) if entry is not None]
                if piece.text or piece.tokens or piece.finish_reason is not None:
                    entries.append(self.form.part(choice, piece))
                for entry in entries:
                    yield {**self._frame(self.form.chunk_object, [entry]), **extra}
        if include_usage:
            yield {**self._frame(self.form.chunk_object, []), "usage": self.generation.usage()}

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        name = f"{self.form.prefix}{self.request_id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}
