"""Engine: an artifact, served in Python. `Engine("artifact/").generate(...)`, whole, streaming or async."""

from __future__ import annotations

import asyncio
import itertools
import numbers
import queue
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from quantkit.errors import RequestError
from quantkit.runtime.answer import Answer, Completion
from quantkit.runtime.engine import EngineStats
from quantkit.runtime.load import EngineOptions, Loaded, load_artifact, load_source
from quantkit.runtime.request import EngineRequest, RequestOutput
from quantkit.runtime.sampling import SamplingParams
from quantkit.runtime.text import ChatText
from quantkit.runtime.worker import EngineThread

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Plain text, token ids, or a conversation (messages with role and content)."""

Params = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, one for each, or the model's own defaults."""


@dataclass(frozen=True)
class Piece:
    """What one answer gained: text that can be shown (maybe none), and the answer so far."""

    text: str
    completion: Completion

    @property
    def index(self) -> int:
        """Which answer of the call, as `generate` would order them."""
        return self.completion.index


class Engine:
    """Serves one artifact from a thread of its own; close it, or use it in a `with`.

    Args:
        path: the artifact's folder.
        options: fields of EngineOptions (`max_num_seqs`, `max_model_len`, `kv_cache_gib`, `threads`,
            `accept_ungated`, ...).

    Raises:
        QuantkitError: the artifact cannot be trusted, may not serve here, or does not fit.
    """

    def __init__(self, path: Path | str, **options: Any) -> None:
        self._start(load_artifact(path, EngineOptions(**options)))

    @classmethod
    def from_source(cls, location: str, *, kv_format: str = "FP32", base: Path = Path("."), **options: Any) -> Engine:
        """An engine over a source model, unquantized."""
        engine = cls.__new__(cls)
        engine._start(load_source(location, EngineOptions(**options), kv_format=kv_format, base=base))
        return engine

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, n: int = 1, **scheduling: Any
    ) -> list[Completion]:
        """Answers to one prompt or many, in order; with `n`, the n answers to a prompt stand one after the other.

        `scheduling`: `priority`, `deadline_ms`, `cache_salt` of EngineRequest.

        Raises:
            RequestError: a prompt or parameter that cannot be served; then nothing of the call is.
        """
        call = _Call(self.text, self._numbers, prompts, params, n, scheduling)
        for _ in self._pieces(call):
            pass
        return call.completions

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, n: int = 1, **scheduling: Any
    ) -> Iterator[Piece]:
        """Like `generate`, piece by piece as they come; leaving the iterator aborts what is unfinished."""
        return self._pieces(_Call(self.text, self._numbers, prompts, params, n, scheduling))

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, n: int = 1, **scheduling: Any
    ) -> list[Completion]:
        """`generate` that does not block the event loop; cancelling it aborts what is unfinished."""
        call = _Call(self.text, self._numbers, prompts, params, n, scheduling)
        async for _ in self._apieces(call):
            pass
        return call.completions

    def astream(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, n: int = 1, **scheduling: Any
    ) -> AsyncIterator[Piece]:
        """`stream` for an event loop."""
        return self._apieces(_Call(self.text, self._numbers, prompts, params, n, scheduling))

    def stats(self) -> EngineStats:
        """Gauges and counters of the engine."""
        return self._thread.stats()

    def close(self) -> None:
        """Stop serving; calls still waiting get an exception."""
        self._thread.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, loaded: Loaded) -> None:
        self.loaded, self.text = loaded, loaded.text
        self._thread = EngineThread(loaded.core)
        self._numbers = itertools.count()

    def _pieces(self, call: _Call) -> Iterator[Piece]:
        arrivals: queue.SimpleQueue[list[RequestOutput] | Exception] = queue.SimpleQueue()
        self._thread.submit(call.requests, arrivals.put)
        try:
            while call.unfinished:
                pieces, stopped = call.take(arrivals.get())
                self._thread.abort(stopped, finished=True)
                yield from pieces
        finally:
            self._thread.abort(list(call.unfinished))

    async def _apieces(self, call: _Call) -> AsyncIterator[Piece]:
        loop = asyncio.get_running_loop()
        arrivals: asyncio.Queue[list[RequestOutput] | Exception] = asyncio.Queue()

        def sink(arrived: list[RequestOutput] | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrivals.put_nowait, arrived)

        self._thread.submit(call.requests, sink)
        try:
            while call.unfinished:
                pieces, stopped = call.take(await arrivals.get())
                self._thread.abort(stopped, finished=True)
                for piece in pieces:
                    yield piece
        finally:
            self._thread.abort(list(call.unfinished))


class _Call:
    """The requests of one call and what has come of them."""

    def __init__(
        self,
        text: ChatText,
        numbering: Iterator[int],
        prompts: Prompt | Sequence[Prompt],
        params: Params,
        n: int,
        scheduling: Mapping[str, Any],
    ) -> None:
        if not isinstance(n, int) or n < 1:
            raise RequestError(f"n must be an integer of at least 1, got {n!r}")
        prompts = _listed(prompts, "prompts")
        every = [cast(Prompt, prompts)] if _is_one(prompts) else list(cast(Sequence[Prompt], prompts))
        chosen = text.default_sampling() if params is None else params
        each = [chosen] * len(every) if isinstance(chosen, SamplingParams) else list(chosen)
        if not all(isinstance(sampling, SamplingParams) for sampling in each):
            raise RequestError("params must be SamplingParams, or one for each prompt")
        if len(each) != len(every):
            raise RequestError(f"{len(every)} prompts but {len(each)} sampling parameters")
        self.requests: list[EngineRequest] = []
        self._answers: dict[str, Answer] = {}
        for prompt, sampling in zip(every, each, strict=True):
            asked = EngineRequest(str(next(numbering)), _encode(text, prompt), sampling, **scheduling)
            for request in asked.forks(n) if n > 1 else [asked]:
                self._answers[request.request_id] = Answer(len(self._answers), text, sampling)
                self.requests.append(request)
        self.unfinished = set(self._answers)

    @property
    def completions(self) -> list[Completion]:
        """The answers so far, in order."""
        return [answer.completion for answer in self._answers.values()]

    def take(self, arrived: list[RequestOutput] | Exception) -> tuple[list[Piece], list[str]]:
        """Pieces that a step brought, and the requests that a stop string has ended."""
        if isinstance(arrived, Exception):
            self.unfinished.clear()
            raise arrived
        pieces, stopped = [], []
        for output in arrived:
            if output.request_id not in self.unfinished:
                continue  # computed before the engine learned of the stop string
            answer = self._answers[output.request_id]
            pieces.append(Piece(answer.take(output), answer.completion))
            if answer.completion.finish_reason is not None:
                self.unfinished.discard(output.request_id)
            if answer.stopped:
                stopped.append(output.request_id)
        return pieces, stopped


def _is_one(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], numbers.Integral | Mapping)


def _encode(text: ChatText, prompt: Prompt) -> list[int]:
    prompt = _listed(prompt, "a prompt")
    if isinstance(prompt, str):
        return text.encode(prompt, add_special_tokens=True)
    if len(prompt) and isinstance(prompt[0], Mapping):
        return text.encode_chat(cast(Sequence[Mapping[str, Any]], prompt))
    if not all(isinstance(token, numbers.Integral) and not isinstance(token, bool) for token in prompt):
        raise RequestError("a prompt must be all token ids or all messages")
    return [int(token) for token in cast(Sequence[int], prompt)]


def _listed(given: Any, what: str) -> Any:
    """`given` as a text or a sequence; arrays and tensors as lists.

    Raises:
        RequestError: it is neither.
    """
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, Sequence) and not isinstance(given, bytes | bytearray | memoryview):
        return given
    raise RequestError(
        f"{what} must be a text, token ids, or messages"
        + (", or a list of such" if what == "prompts" else "")
        + f", got {type(given).__name__}"
    )
