"""Scheduler: what each step computes. No phases: every request gets tokens it lacks, within one token budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quantkit.errors import RecipeError, RequestError
from quantkit.runtime.block_pool import Block, BlockPool
from quantkit.runtime.prefix_cache import PrefixCache
from quantkit.runtime.request import Request, State
from quantkit.runtime.waiting import WaitingQueue

Step = dict[Request, int]
"""Request -> tokens to compute in this step, in batch order."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and rules of admission.

    `no-evict` admits a request when its prompt and `optimism` of what it may still generate fit beside what is already
    promised, so that with optimism 1 nobody is ever preempted. `max-utilization` asks for the prompt alone and
    preempts (recomputing later) when blocks run out.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    block_size: int = 16
    admission: Literal["no-evict", "max-utilization"] = "no-evict"
    optimism: float = 1.0
    max_bypass: int = 32
    """Times a request that does not fit may see later ones admitted before it; then all wait for it."""
    ageing_s: float = 30.0

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise RecipeError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs}",
                next="A step must hold one token of every running request",
            )


class Scheduler:
    """Owns who runs, who waits, and which blocks they hold."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, cache: PrefixCache) -> None:
        self.config, self.pool, self.cache = config, pool, cache
        self.running: list[Request] = []
        self.waiting = WaitingQueue(config.ageing_s)
        self.promised = 0
        """Idle blocks set aside for running requests; never given to others."""
        self.preemptions = self.prefix_queries = self.prefix_hits = 0
        self._too_little: int | None = None
        """Room with which the last attempt admitted nobody: not tried again before there is more, or someone new."""

    def schedule(self, now: float) -> Step:
        """Decodes first, one token each; then prompts, old before new, a long one leaving room for those behind it."""
        step: Step = {}
        budget, preempted = self.config.max_num_batched_tokens, self.preemptions
        for request in [r for r in self.running if r.lacks == 1]:
            if request.state is State.RUNNING and self._grow(request, 1, step):
                step[request] = 1
        budget -= len(step)
        if preempted == self.preemptions:
            self._admit(now)
        prompts = [request for request in self.running if request not in step]
        for place, request in enumerate(prompts, start=1):
            share = budget if place == len(prompts) or request.lacks <= budget else (budget + 1) // 2
            count = min(request.lacks, share)
            if count and self._grow(request, count, step):
                step[request] = count
                budget -= count
        for request in prompts:  # what those behind a long prompt left over
            count = min(budget, request.lacks - step.get(request, 0))
            if count and request in step and self._grow(request, step[request] + count, step):
                step[request] += count
                budget -= count
        return step

    def add(self, request: Request) -> None:
        """Queue a request; RequestError at once when the whole pool could not hold it."""
        need = self._blocks_for(request.max_total - 1)
        if need > self.pool.total:
            raise RequestError(
                f"prompt and answer of {request.max_total} tokens need {need} cache blocks, there are "
                f"{self.pool.total} ({self.pool.total * self.config.block_size} tokens)",
                next="Lower max_tokens or give the engine more KV memory",
            )
        self.waiting.push(request)
        self._too_little = None

    def remove(self, request: Request) -> None:
        """Take a request out, whatever its state, and give back all it holds."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            self._give_back(request)
        else:
            self.waiting.cancel(request)
        request.state = State.FINISHED
        request.parent = None

    @property
    def _room(self) -> int:
        """Idle blocks nobody has been promised."""
        return self.pool.num_idle - self.promised

    def _admit(self, now: float) -> None:
        if self._too_little is not None and self._room <= self._too_little:
            return
        unfit: list[Request] = []
        expecting: list[Request] = []
        most, window = self.config.max_bypass, self.config.max_num_seqs + self.config.max_bypass
        while len(self.running) < self.config.max_num_seqs and len(unfit) + len(expecting) <= window:
            request = None if any(other.bypasses >= most for other in unfit) else self.waiting.pop(now)
            if request is None:
                break
            if self._prompt_is_coming(request):
                expecting.append(request)
                continue
            hits = self.cache.find(request)
            need = self._expected_blocks(request) - len(hits)
            if need + sum(not block.ref_count for block in hits) <= self._room:
                self._start(request, hits, need, now)
                for other in unfit:
                    other.bypasses += 1
                continue
            unfit.append(request)
        for request in (*unfit, *expecting):
            self.waiting.push(request)
        self._too_little = self._room if unfit and not expecting else None

    def _start(self, request: Request, hits: list[Block], promise: int, now: float) -> None:
        self.pool.share(hits)
        request.hold(hits)
        request.num_computed = request.num_published = 0
        request.num_computed = len(hits) * self.config.block_size
        request.num_published = len(hits)
        request.promised = promise
        self.promised += promise
        if request.admitted is None:  # statistics count once, whatever the retries and preemptions
            request.admitted = now
            request.cached_tokens = request.num_computed
            self.prefix_queries += request.prompt_len
            self.prefix_hits += request.num_computed
        request.bypasses = 0
        request.state = State.RUNNING
        self.running.append(request)

    def _grow(self, request: Request, count: int, step: Step) -> bool:
        """Blocks for `count` more tokens, preempting the least urgent where need be; False: it was `request` itself."""
        missing = self._blocks_for(request.num_computed + count) - len(request.blocks)
        if missing <= 0:
            return True
        while missing - request.promised > self._room:
            victim = max(self.running, key=lambda r: r.order)
            self._preempt(victim)
            step.pop(victim, None)
            if victim is request:
                return False
        kept = min(missing, request.promised)
        request.promised -= kept
        self.promised -= kept
        request.hold(self.pool.take(missing))
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the queue with its tokens kept; keys and values are computed again when it returns."""
        self.running.remove(request)
        self._give_back(request)
        request.state = State.WAITING
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.push(request)

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks.clear()
        self.promised -= request.promised
        request.promised = request.num_computed = request.num_published = 0

    def _prompt_is_coming(self, request: Request) -> bool:
        """Whether a request with the same prompt is about to bring blocks this one wants to share."""
        parent = request.parent
        if parent is None or parent.state is State.FINISHED or parent.prompt_len <= self.config.block_size:
            return False
        return parent.num_computed < parent.prompt_len

    def _expected_blocks(self, request: Request) -> int:
        if self.config.admission == "max-utilization":
            tokens = min(request.num_tokens + self.config.block_size, request.max_total - 1)
        else:
            left = request.max_total - 1 - request.num_tokens
            tokens = request.num_tokens + max(0, round(left * self.config.optimism))
        return self._blocks_for(max(tokens, request.num_tokens))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)
