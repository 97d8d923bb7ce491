"""EngineCore: requests in, tokens out. Schedules, runs the executor, draws; knows nothing of text or HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import RequestError
from quantkit.numeric import is_number
from quantkit.runtime.batch import StepBatch
from quantkit.runtime.block_pool import BlockPool
from quantkit.runtime.prefix_cache import PrefixCache
from quantkit.runtime.request import EngineRequest, Request, RequestOutput, RequestTimes, State
from quantkit.runtime.sampler import Draw, Sampler
from quantkit.runtime.scheduler import Scheduler, SchedulerConfig
from quantkit.runtime.step import StepInputs
from quantkit_kernels.ops.sample import uniform

LogitsObserver = Callable[[str, int, NDArray[np.float32]], None]
"""Called with request id, output position and that position's logits `[V]`, a view good for the call only."""


class StepExecutor(Protocol):
    """What the engine needs of an executor."""

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Run one step; logits `[R, V]`."""
        ...


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine serves with. `num_blocks` counts the null block, as the executor's cache does."""

    vocab_size: int
    num_blocks: int
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    stop_token_ids: frozenset[int] = frozenset()
    """The model's own stop set."""
    enable_prefix_caching: bool = True
    cache_identity: str = ""
    """What cached blocks depend on besides tokens: artifact id and KV format."""
    check_prefix_tokens: bool = False
    seed: int = 0
    """From which requests without a seed of their own get one."""
    threads: int | None = None
    """That draw tokens: the executor's. None: the cores this process may use."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state after a step. Counters count from the start; accepted = finished + failed + aborted + in the engine."""

    running: int
    waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    blocks_total: int
    accepted: int
    refused: int
    finished: int
    failed: int
    aborted: int
    first_tokens: int
    prompt_tokens: int
    generated_tokens: int
    prefix_queries: int
    prefix_hits: int
    """Prompt tokens looked up in and found in the prefix cache, once a request."""
    preemptions: int
    steps: int


class EngineCore:
    """Continuous batching over one executor. Not thread-safe: one thread calls it.

    Args:
        executor: its capacity must cover the config's.
        config: limits and the model's facts.
        on_logits: sees every logits row before its token is drawn.
        clock: seconds; for deadlines, ageing and times.
    """

    def __init__(
        self,
        executor: StepExecutor,
        config: EngineConfig,
        *,
        on_logits: LogitsObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.executor, self.config, self.on_logits = executor, config, on_logits
        self._clock = clock
        self.pool = BlockPool(config.num_blocks)
        cache = PrefixCache(
            self.pool,
            config.scheduler.block_size,
            config.cache_identity,
            enabled=config.enable_prefix_caching,
            check_tokens=config.check_prefix_tokens,
        )
        self._cache = cache
        self.scheduler = Scheduler(config.scheduler, self.pool, cache)
        self._batch = StepBatch(config.scheduler)
        self._sampler = Sampler(config.vocab_size, config.threads)
        self._requests: dict[str, Request] = {}
        self._accepted = self._refused = self._finished = self._failed = self._aborted = 0
        self._first_tokens = self._prompt_tokens = self._generated = self._steps = 0

    def add_request(self, asked: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: a bad parameter, a prompt or answer too long, an id in use. The engine is untouched.
        """
        try:
            request = self._checked(asked)
            self.scheduler.add(request)
        except RequestError:
            self._refused += 1
            raise
        self._requests[asked.request_id] = request
        self._accepted += 1
        self._prompt_tokens += request.prompt_len

    def abort(self, request_id: str, *, finished: bool = False) -> bool:
        """Forget a request in any state and give back its blocks. Unknown ids are no error: False.

        `finished`: it got all it wanted (a stop string was met), so it counts as finished.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self.scheduler.remove(request)
        if finished:
            self._finished += 1
        else:
            self._aborted += 1
        return True

    def has_work(self) -> bool:
        """Whether any request is in the engine."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Compute one step. Gives what each request got from it; nothing for those whose prompt goes on."""
        now = self._clock()
        outputs = [self._end(r, "deadline", _late(r, now)) for r in self.scheduler.waiting.pop_expired(now)]
        step = self.scheduler.schedule(now)
        if not step:
            return outputs
        inputs, drawing = self._batch.build(step)
        logits = self.executor.step(inputs)
        self._steps += 1
        for request, count in step.items():
            request.num_computed += count
            self._cache.publish(request)
        if self.on_logits is not None:
            for request, row in zip(drawing, logits, strict=True):
                self.on_logits(request.request_id, request.num_output, row)
        draws = self._sampler.sample(logits, drawing) if drawing else []
        for request, draw in zip(drawing, draws, strict=True):
            outputs.append(self._take(request, draw))
        return outputs

    def stats(self) -> EngineStats:
        """Gauges and counters."""
        blocks, scheduler = self.pool.counts(), self.scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_free=blocks.free,
            blocks_cached=blocks.cached,
            blocks_used=blocks.used,
            blocks_total=blocks.total,
            accepted=self._accepted,
            refused=self._refused,
            finished=self._finished,
            failed=self._failed,
            aborted=self._aborted,
            first_tokens=self._first_tokens,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            steps=self._steps,
        )

    def _checked(self, asked: EngineRequest) -> Request:
        config, params = self.config, asked.params
        if asked.request_id in self._requests:
            raise RequestError(f"request id {asked.request_id!r} is already in use")
        if isinstance(asked.priority, bool) or not isinstance(asked.priority, int):
            raise RequestError(f"priority must be an integer, got {asked.priority!r}")
        if not isinstance(asked.cache_salt, str):
            raise RequestError(f"cache_salt must be a text, got {asked.cache_salt!r}")
        late = asked.deadline_ms
        if late is not None and not (is_number(late) and late > 0):
            raise RequestError(f"deadline_ms must be greater than 0, got {late!r}")
        params.check_vocabulary(config.vocab_size)
        prompt = _prompt(asked, config.vocab_size)
        limit = config.scheduler.max_model_len
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; with one token of answer that exceeds the limit of {limit}"
            )
        if params.max_tokens is not None and len(prompt) + params.max_tokens > limit:
            raise RequestError(
                f"max_tokens {params.max_tokens} with a prompt of {len(prompt)} tokens exceeds the limit of {limit}"
            )
        room = min(limit, self.pool.total * config.scheduler.block_size + 1)
        most = room - len(prompt) if params.max_tokens is None else params.max_tokens
        now, number = self._clock(), self._accepted
        deadline = None if late is None else now + late / 1000
        seed = params.seed if params.seed is not None else int(uniform(config.seed, number) * 2**53)
        own_stops = frozenset() if params.ignore_eos else config.stop_token_ids
        stop_ids = own_stops | frozenset(params.stop_token_ids)
        if params.min_tokens and len(stop_ids) >= config.vocab_size:
            raise RequestError("stop_token_ids and min_tokens together leave no token to draw")
        return Request(
            request_id=asked.request_id,
            params=params,
            tokens=prompt,
            prompt_len=len(prompt),
            max_total=len(prompt) + max(1, most),
            seed=seed,
            stop_ids=stop_ids,
            order=(asked.priority, float("inf") if deadline is None else deadline, number),
            arrived=now,
            deadline=deadline,
            salt=asked.cache_salt,
            parent=self._requests.get(asked.fork_of) if asked.fork_of and config.enable_prefix_caching else None,
            greedy=params.plain_greedy,
            num_tokens=len(prompt),
        )

    def _take(self, request: Request, draw: Draw) -> RequestOutput:
        """A drawn token into its request, and what that means for it."""
        if draw.token is None:
            return self._end(request, "error", "the model gave NaN or infinite logits")
        request.append(draw.token)
        self._generated += 1
        if request.first_token is None:
            request.first_token = self._clock()
            self._first_tokens += 1
        output = RequestOutput(
            request.request_id,
            [draw.token],
            None if draw.logprobs is None else [draw.logprobs],
            prompt_tokens=request.prompt_len,
            cached_tokens=request.cached_tokens,
        )
        if draw.token in request.stop_ids and request.num_output >= request.params.min_tokens:
            return self._end(request, "stop", output=output)
        if request.num_tokens == request.max_total:
            return self._end(request, "length", output=output)
        return output

    def _end(
        self, request: Request, reason: str, error: str | None = None, *, output: RequestOutput | None = None
    ) -> RequestOutput:
        """Take a request out for good; the last output about it."""
        self.scheduler.remove(request)
        del self._requests[request.request_id]
        if error is None:
            self._finished += 1
        else:
            self._failed += 1
        output = output or RequestOutput(request.request_id, [], prompt_tokens=request.prompt_len)
        output.finish_reason, output.error = reason, error
        output.times = RequestTimes(request.arrived, request.admitted, request.first_token, self._clock())
        return output

    def check(self) -> None:
        """RuntimeError unless blocks, promises and counters reconcile. For tests and debugging: O(blocks)."""
        counts, running = self.pool.counts(), self.scheduler.running
        owned = [block for request in running for block in request.blocks]
        for name, left, right in (
            ("free + cached + used", counts.free + counts.cached + counts.used, counts.total),
            ("references", sum(block.ref_count for block in self.pool.blocks), len(owned)),
            ("used blocks", counts.used, len({block.block_id for block in owned})),
            ("idle blocks listed", len(self.pool.idle_order()), self.pool.num_idle),
            ("promised blocks", self.scheduler.promised, sum(request.promised for request in running)),
            ("requests held", len(self._requests), len(running) + len(self.scheduler.waiting)),
            ("requests accepted", self._accepted - self._finished - self._failed - self._aborted, len(self._requests)),
        ):
            if left != right:
                raise RuntimeError(f"{name}: {left}, expected {right}")
        if any(request.state is not State.RUNNING for request in running):
            raise RuntimeError("a request that is not running is in the running list")


def _prompt(asked: EngineRequest, vocab_size: int) -> NDArray[np.int32]:
    """The prompt as int32 `[n]`; RequestError when it is empty or names ids the vocabulary lacks."""
    if not len(asked.token_ids):
        raise RequestError("the prompt is empty")
    try:
        ids = np.asarray(asked.token_ids)
    except (ValueError, TypeError):
        raise RequestError("the prompt must be a list of token ids") from None
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise RequestError("the prompt must be a list of token ids")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise RequestError(f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}")
    return ids.astype(np.int32)


def _late(request: Request, now: float) -> str:
    return f"its deadline passed in the queue, after {1000 * (now - request.arrived):.0f} ms"
