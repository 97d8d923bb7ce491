"""What an engine is asked, what it answers, and what it keeps about a request in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from quantkit.runtime.block_pool import Block
from quantkit.runtime.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate. Several answers to one prompt are several of these (see `forks`).

    Lower `priority` goes first. `deadline_ms` counts from add_request; a request still in the queue then is answered
    with finish reason `deadline`. `cache_salt` keeps tenants from sharing (and so probing) each other's prefixes.
    """

    request_id: str
    token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    deadline_ms: float | None = None
    cache_salt: str = ""
    fork_of: str | None = None
    """Another request with the same prompt: this one waits until that prompt is computed, then shares its blocks."""

    def forks(self, count: int) -> list[EngineRequest]:
        """`count` requests over this prompt, ids suffixed -0, -1, ...; a seed given counts up, so that they differ."""
        return [
            replace(
                self,
                request_id=f"{self.request_id}-{i}",
                params=self.params.fork(i),
                fork_of=f"{self.request_id}-0" if i else None,
            )
            for i in range(count)
        ]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, of the model's own distribution (before penalties and temperature).

    The chosen token's, and the likeliest ones best first.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds on the engine's clock. `admitted` and `first_token` are None where it did not come to that."""

    arrived: float
    admitted: float | None
    first_token: float | None
    finished: float


@dataclass(slots=True)
class RequestOutput:
    """What one step brought one request.

    `finish_reason` is set on the last one: `stop` (a stop id, the last token), `length`, `deadline` (never started) or
    `error` (with `error` saying why). `cached_tokens` of the prompt came from the prefix cache.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    times: RequestTimes | None = None


class State(Enum):
    """Where a request stands. A preempted one is WAITING again, with its output kept."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A request inside the engine.

    tokens: int32 `[num_tokens]` used of its capacity: prompt, then output. The first `num_computed` have their keys
    and values in `blocks`; `table` int32 holds those blocks' ids.
    """

    request_id: str
    params: SamplingParams
    tokens: NDArray[np.int32]
    prompt_len: int
    max_total: int
    """Tokens of prompt and output it may reach."""
    seed: int
    stop_ids: frozenset[int]
    order: tuple[int, float, int]
    """Priority, deadline, arrival: smaller goes first."""
    arrived: float
    deadline: float | None = None
    salt: str = ""
    parent: Request | None = None

    greedy: bool = False
    """Whether its next token is the plain argmax, `min_tokens` aside."""
    state: State = State.WAITING
    ticket: int = 0
    """Its place in the waiting queue; 0: not in it."""
    bypasses: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    blocks: list[Block] = field(default_factory=list)
    table: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    promised: int = 0
    """Idle blocks set aside for it and not yet taken."""
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    admitted: float | None = None
    first_token: float | None = None

    @property
    def num_output(self) -> int:
        """Tokens generated."""
        return self.num_tokens - self.prompt_len

    @property
    def lacks(self) -> int:
        """Tokens it still needs computed before its next token can be drawn."""
        return self.num_tokens - self.num_computed

    def hold(self, blocks: list[Block]) -> None:
        """Append blocks to its part of the cache."""
        have = len(self.blocks)
        if have + len(blocks) > len(self.table):
            self.table = np.concatenate([self.table[:have], np.zeros(max(have, 8) + len(blocks), np.int32)])
        self.table[have : have + len(blocks)] = [block.block_id for block in blocks]
        self.blocks += blocks

    def append(self, token: int) -> None:
        """One more token of output."""
        if self.num_tokens == len(self.tokens):
            grown = min(self.max_total, max(64, 2 * self.num_tokens))
            self.tokens = np.concatenate([self.tokens, np.empty(grown - self.num_tokens, np.int32)])
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
