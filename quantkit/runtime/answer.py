"""Answer: one request's outputs gathered into text, cut exactly at its stop strings."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.runtime.request import RequestOutput, TokenLogprobs
from quantkit.runtime.sampling import SamplingParams
from quantkit.runtime.shown_text import ShownText
from quantkit.runtime.text import ChatText


@dataclass
class Completion:
    """An answer, whole or so far.

    `text` leaves out special tokens, the token that stopped it and everything from a stop string on; `token_ids` are
    all that were generated. `finish_reason`: stop, length, deadline, error (with `error` saying why); None while it
    goes on. `logprobs`: one entry a token, when asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Answer:
    """Builds a Completion from outputs in order."""

    def __init__(self, index: int, text: ChatText, params: SamplingParams) -> None:
        self.completion = Completion(index, token_ids=[], logprobs=None if params.logprobs is None else [])
        self._ids: list[int] = []
        self._shown = ShownText(text, params)

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the answer, which the engine does not know of."""
        return self._shown.stopped

    def take(self, output: RequestOutput) -> str:
        """Adds what one step brought; gives the text that can be shown for it."""
        answer, piece = self.completion, ""
        for position, token in enumerate(output.token_ids):
            self._ids.append(token)
            if output.logprobs is not None and answer.logprobs is not None:
                answer.logprobs.append(output.logprobs[position])
            if output.finish_reason == "stop" and position == len(output.token_ids) - 1:
                continue  # the stop token itself is no text
            piece += self._shown.push(token)
            if self.stopped:
                break
        if output.finish_reason is not None and not self.stopped:
            piece += self._shown.flush()
        answer.token_ids = self._ids
        answer.finish_reason = "stop" if self.stopped else output.finish_reason
        answer.error = output.error
        answer.prompt_tokens, answer.cached_tokens = output.prompt_tokens, output.cached_tokens
        answer.text += piece
        return piece
