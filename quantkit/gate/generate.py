"""Greedy answers of a model to prompts, by the engine that serves: continuous batching, prefix cache, stop set.

Rows do not depend on their batch (decision 4), so an answer here is the answer a user gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.errors import NumericsError
from quantkit.freed_memory import return_freed_memory
from quantkit.gate.data import Window, encode
from quantkit.gate.evaluate import Tick, Variant, budget
from quantkit.gate.prompts import Prompt
from quantkit.gate.steps import BLOCK, Composition, compose, offsets
from quantkit.runtime.answer import Answer
from quantkit.runtime.engine import EngineConfig, EngineCore, LogitsObserver
from quantkit.runtime.executor import Executor
from quantkit.runtime.request import EngineRequest
from quantkit.runtime.sampling import SamplingParams
from quantkit.runtime.scheduler import SchedulerConfig
from quantkit.runtime.text import ChatText

SEQUENCES = 16
STEP_TOKENS = 256
KEPT = 64
"""Likeliest tokens of the baseline whose probabilities are kept at each of its answers' tokens."""


@dataclass(frozen=True)
class Generated:
    """One answer: its text (special tokens and the stop token left out), all its token ids, and why it ended."""

    text: str
    token_ids: tuple[int, ...]
    finish: str


@dataclass(frozen=True)
class Asked:
    """A prompt as one model reads it, and the tokens it may answer with."""

    prompt: Prompt
    ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Trail:
    """The baseline along one of its answers: its likeliest tokens `[n, KEPT]` and their log-probabilities."""

    tokens: Tensor
    log_probabilities: Tensor


def ask(prompts: Sequence[Prompt], text: ChatText, *, max_new_tokens: int, max_length: int) -> list[Asked]:
    """Prompts through the chat template. Those that leave no room for an answer in `max_length` tokens are left out."""
    found = []
    for prompt in prompts:
        ids = encode(prompt.conversation, text, add_generation_prompt=True)
        most = min(prompt.max_tokens, max_new_tokens, max_length - len(ids))
        if most >= 1:
            found.append(Asked(prompt, tuple(ids), most))
    return found


class Generator:
    """A model loaded for answering: an executor with an engine over it."""

    def __init__(self, variant: Variant, asked: Sequence[Asked], text: ChatText) -> None:
        self._asked, self._text = asked, text
        self._longest = max(len(item.ids) + item.max_tokens for item in asked)
        self._rows = max(SEQUENCES, budget(variant.program))
        self._name = variant.name
        self.executor = Executor(
            variant.program,
            variant.weights,
            max_tokens=max(STEP_TOKENS, self._rows),
            max_seqs=SEQUENCES,
            max_rows=self._rows,
            num_blocks=1 + SEQUENCES * -(-self._longest // BLOCK),
            block_size=BLOCK,
            max_model_len=self._longest,
            threads=variant.threads,
            backend=variant.backend,
            spill=variant.spill,
        )

    def answers(self, tick: Tick, *, on_logits: LogitsObserver | None = None) -> list[Generated]:
        """The greedy answer to each prompt, in order. `tick` is told prompt and answer tokens, unused room included.

        NumericsError when the model's logits are NaN or Inf.
        """
        core = self._core(on_logits)
        made: list[Answer] = []
        for number, item in enumerate(self._asked):
            params = SamplingParams(temperature=0.0, max_tokens=item.max_tokens)
            core.add_request(EngineRequest(str(number), item.ids, params))
            made.append(Answer(number, self._text, params))
        while core.has_work():
            for output in core.step():
                number = int(output.request_id)
                made[number].take(output)
                if output.error is not None:
                    where = self._asked[number].prompt.where
                    raise NumericsError(f"{self._name} cannot answer: {output.error}", where=where)
                if output.finish_reason is not None:
                    tick(len(self._asked[number].ids) + self._asked[number].max_tokens)
        return [_generated(answer) for answer in made]

    def divergences(self, answers: Sequence[Generated], trails: Mapping[int, Trail], tick: Tick) -> list[float]:
        """Mean KL(baseline‖this model) in nats along each of the baseline's `answers`, teacher-forced.

        Summed over the baseline's KEPT likeliest tokens and the rest as one: never more than over the whole vocabulary.
        """
        windows = [
            Window(item.prompt.id, "", "", (*item.ids, *answer.token_ids), len(item.ids) - 1, False)
            for item, answer in zip(self._asked, answers, strict=True)
        ]
        self.executor.clear_cache()
        starts = offsets(windows)
        found = np.zeros(int(starts[-1]))
        tokens = torch.cat([trails[number].tokens for number in range(len(windows))])
        kept = torch.cat([trails[number].log_probabilities for number in range(len(windows))])
        for step in compose(windows, Composition(self._rows, concurrent=4, piece=self._rows)):
            logits = self.executor.step(step.inputs)
            if len(step.index):
                rows = torch.from_numpy(step.index)
                found[step.index] = coarse_kl(tokens[rows], kept[rows], torch.from_numpy(logits)).numpy()
            tick(len(step.inputs.token_ids))
        return [float(found[a:b].mean()) for a, b in pairwise(starts)]

    def close(self) -> None:
        """Let the model's memory go."""
        del self.executor
        return_freed_memory()

    def _core(self, on_logits: LogitsObserver | None) -> EngineCore:
        capacity = self.executor.capacity
        config = EngineConfig(
            vocab_size=self.executor.program.vocab_size,
            num_blocks=capacity.num_blocks,
            scheduler=SchedulerConfig(
                max_num_seqs=SEQUENCES,
                max_num_batched_tokens=STEP_TOKENS,
                max_model_len=self._longest,
                block_size=BLOCK,
            ),
            stop_token_ids=self._text.stop_token_ids,
        )
        return EngineCore(self.executor, config, on_logits=on_logits)


class TrailKeeper:
    """Hears every logits row of an engine and keeps its likeliest tokens."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, request_id: str, position: int, logits: NDArray[np.float32]) -> None:
        """The observer that EngineCore calls."""
        row = torch.from_numpy(logits)
        values, tokens = torch.topk(row, min(KEPT, len(row)))
        self._rows.setdefault(int(request_id), []).append((tokens, values - row.logsumexp(0)))

    def trails(self) -> dict[int, Trail]:
        """By request number."""
        return {
            number: Trail(torch.stack([t for t, _ in rows]), torch.stack([p for _, p in rows]))
            for number, rows in self._rows.items()
        }


def coarse_kl(tokens: Tensor, base: Tensor, logits: Tensor) -> Tensor:
    """float32 `[R]` KL in nats between distributions over `tokens` `[R, K]` and everything else as one outcome.

    base: log-probabilities `[R, K]`. logits: `[R, V]` of the other model.
    """
    ours = torch.log_softmax(logits, -1).gather(1, tokens)
    probability = base.exp()
    rest_base = (1 - probability.sum(-1)).clamp_min(1e-9)
    rest_ours = (1 - ours.exp().sum(-1)).clamp_min(1e-9)
    return ((probability * (base - ours)).sum(-1) + rest_base * (rest_base / rest_ours).log()).clamp_min(0)


def first_divergence(base: Sequence[int], candidate: Sequence[int]) -> int | None:
    """Index of the first differing token; None when the answers are the same."""
    for index, (a, b) in enumerate(zip(base, candidate, strict=False)):
        if a != b:
            return index
    return None if len(base) == len(candidate) else min(len(base), len(candidate))


def _generated(answer: Answer) -> Generated:
    made = answer.completion
    return Generated(made.text, tuple(made.token_ids or ()), made.finish_reason or "length")
