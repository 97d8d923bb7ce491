"""One choice of an answer: token ids become shown text, cut exactly at stop strings, with log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quantkit.runtime.request import RequestOutput, TokenLogprobs
from quantkit.runtime.sampling import SamplingParams
from quantkit.runtime.shown_text import ShownText
from quantkit.runtime.text import ChatText


@dataclass(frozen=True)
class Token:
    """One shown token. `start` is where its text begins in the choice's text, in characters."""

    token_id: int
    start: int
    logprobs: TokenLogprobs


@dataclass
class Piece:
    """What a choice gained: text to show, the tokens whose text has begun to show, and at the end the reason."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None


class Choice:
    """The state of one choice between outputs. `finish_reason` comes with the last piece.

    A token's log probabilities are shown when its text is: what a stop string swallows is not reported.
    """

    def __init__(self, index: int, prompt: list[int], text: ChatText, params: SamplingParams) -> None:
        self.index, self.prompt = index, prompt
        self.request_id = ""
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self._text = ShownText(text, params)
        self._shown = 0
        self._waiting: list[Token] = []

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def take(self, outputs: Sequence[RequestOutput]) -> Piece:
        """The piece that `outputs`, in order, make. A stop string ends the choice before they do."""
        piece = Piece()
        for output in outputs:
            self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
            for position, token in enumerate(output.token_ids):
                if output.finish_reason == "stop" and position == len(output.token_ids) - 1:
                    self.completion_tokens += 1
                    break  # the token that stopped it is no text
                if output.logprobs is not None:
                    self._waiting.append(Token(token, self._text.produced, output.logprobs[position]))
                self.completion_tokens += 1
                piece.text += self._text.push(token)
                if self._text.stopped:
                    return self._finish(piece, "stop")
            if output.finish_reason is not None:
                piece.text += self._text.flush()
                return self._finish(piece, "stop" if self._text.stopped else output.finish_reason)
        self._shown += len(piece.text)
        piece.tokens = self._release(self._shown)
        return piece

    def _finish(self, piece: Piece, reason: str) -> Piece:
        self.finish_reason = reason
        self._shown += len(piece.text)
        piece.tokens = self._release(self._shown if self._text.stopped else self._text.produced + 1)
        piece.finish_reason = reason
        return piece

    def _release(self, end: int) -> list[Token]:
        """The waiting tokens whose text begins before character `end`."""
        count = next((i for i, token in enumerate(self._waiting) if token.start >= end), len(self._waiting))
        released, self._waiting = self._waiting[:count], self._waiting[count:]
        return released
