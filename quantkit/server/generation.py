"""One generating HTTP request: its choices are submitted, their outputs gathered, and none outlives the caller."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from quantkit.runtime.request import EngineRequest, RequestOutput
from quantkit.runtime.sampling import SamplingParams
from quantkit.server.api_errors import ApiError, bad_request, internal, too_late
from quantkit.server.choices import Choice, Piece
from quantkit.server.inbox import Inbox
from quantkit.server.metrics import Metrics
from quantkit.server.records import Record
from quantkit.server.supervisor import Supervisor

_ERRORS: dict[str | None, Callable[[str], ApiError]] = {"refused": bad_request, "deadline": too_late}
"""What a request's end with an error means to the caller, by the engine's reason."""


@dataclass(frozen=True)
class Terms:
    """What holds for all choices of a request."""

    params: SamplingParams
    priority: int = 0
    deadline_ms: float | None = None
    cache_salt: str = ""


class Generation:
    """Runs `choices` (with `max_tokens[i]` tokens each) on the engine."""

    def __init__(
        self,
        choices: Sequence[Choice],
        max_tokens: Sequence[int],
        terms: Terms,
        *,
        supervisor: Supervisor,
        record: Record,
        metrics: Metrics,
    ) -> None:
        self.choices = choices
        self._max_tokens, self._terms = max_tokens, terms
        self._supervisor, self._record, self._metrics = supervisor, record, metrics
        self._last_tokens = record.arrived

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """Pieces as they come, until every choice is finished. Closing it aborts what is left.

        Raises:
            ApiError: the engine refused the request or died.
        """
        inbox = Inbox()
        try:
            self._submit(inbox)
            choices = {choice.request_id: choice for choice in self.choices}
            while not all(choice.finished for choice in self.choices):
                gained: dict[str, list[RequestOutput]] = {}
                for output in await inbox.take():
                    gained.setdefault(output.request_id, []).append(output)
                self._observe(sum(len(output.token_ids) for outputs in gained.values() for output in outputs))
                for request_id, outputs in gained.items():
                    choice = choices[request_id]
                    if not choice.finished:
                        yield choice, self._piece(choice, outputs)
        finally:
            self._supervisor.abort(choice.request_id for choice in self.choices)
            self._note()

    def usage(self) -> dict[str, object]:
        """Token counts in the API's shape; a prompt counts once, however many choices it has."""
        prompts = {id(choice.prompt): len(choice.prompt) for choice in self.choices}
        prompt, completion = sum(prompts.values()), sum(choice.completion_tokens for choice in self.choices)
        cached = sum({id(choice.prompt): choice.cached_tokens for choice in reversed(self.choices)}.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _submit(self, inbox: Inbox) -> None:
        """Send every choice; those of one prompt after its first wait in the engine and share its blocks."""
        terms = self._terms
        first: dict[int, Choice] = {}
        for choice, max_tokens in zip(self.choices, self._max_tokens, strict=True):
            choice.request_id = f"{self._record.request_id}-{choice.index}"
            owner = first.setdefault(id(choice.prompt), choice)
            self._supervisor.submit(
                EngineRequest(
                    choice.request_id,
                    choice.prompt,
                    replace(terms.params.fork(choice.index), max_tokens=max_tokens, stop=()),
                    priority=terms.priority,
                    deadline_ms=terms.deadline_ms,
                    cache_salt=terms.cache_salt,
                    fork_of=None if owner is choice else owner.request_id,
                ),
                inbox,
            )

    def _piece(self, choice: Choice, outputs: list[RequestOutput]) -> Piece:
        last = outputs[-1]
        if last.error is not None:
            raise _ERRORS.get(last.finish_reason, internal)(last.error)
        piece = choice.take(outputs)
        if choice.finished and last.finish_reason is None:
            self._supervisor.abort([choice.request_id], finished=True)
        return piece

    def _observe(self, tokens: int) -> None:
        if tokens == 0:
            return
        now = time.monotonic()
        if self._record.first_token is None:
            self._record.first_token = now
            self._metrics.ttft.observe(now - self._record.arrived)
        else:
            self._metrics.itl.observe((now - self._last_tokens) * len(self.choices) / tokens)
        self._last_tokens = now

    def _note(self) -> None:
        """Leave the counts in the request's record."""
        usage, record = self.usage(), self._record
        record.prompt_tokens, record.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]  # type: ignore[assignment]
        record.cached_tokens = sum(choice.cached_tokens for choice in self.choices)
        record.finish_reason = ",".join(sorted({choice.finish_reason or "none" for choice in self.choices}))
        if record.first_token is not None:
            later = max(choice.completion_tokens for choice in self.choices) - 1
            if later > 0:
                self._metrics.tpot.observe((self._last_tokens - record.first_token) / later)
