"""Sampler: the next token of each row of logits. A row's draw depends on that row and its request alone.

The arithmetic is the kernels' (`quantkit_kernels.ops.sample` says what it is); here a request becomes what they take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quantkit.runtime.isa import REFERENCE, instruction_set
from quantkit.runtime.request import Request, TokenLogprobs
from quantkit_kernels import cpu
from quantkit_kernels.ops import sample as op


class Draw(NamedTuple):
    """A drawn token; `token` None: the row holds NaN or infinity at its maximum."""

    token: int | None
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Draws tokens over a vocabulary of `vocab_size`.

    threads: those of the executor, whose team draws as well; None: the cores this process may use.
    """

    def __init__(self, vocab_size: int, threads: int | None = None) -> None:
        isa = instruction_set()
        self._sample: Callable[[NDArray[np.float32], Sequence[op.SampleRow]], list[op.Sampled]] = (
            op.reference if isa == REFERENCE else cpu.Sampler(vocab_size, threads, isa).sample
        )

    def sample(self, logits: NDArray[np.float32], requests: Sequence[Request]) -> list[Draw]:
        """One draw for each row of `logits` float32 `[R, V]`, which belongs to the request of the same index."""
        return [_draw(sampled) for sampled in self._sample(logits, [_row(request) for request in requests])]


def _row(request: Request) -> op.SampleRow:
    params, early = request.params, request.num_output < request.params.min_tokens
    if request.greedy and not early:
        return op.GREEDY
    looks = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    return op.SampleRow(
        bias=params.logit_bias,
        tokens=request.tokens[: request.num_tokens if looks else 0],
        prompt=request.prompt_len if looks else 0,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        banned=request.stop_ids if early else (),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request.seed,
        position=request.num_output,
        logprobs=params.logprobs,
    )


def _draw(sampled: op.Sampled) -> Draw:
    if sampled.logprob is None:
        return Draw(sampled.token)
    return Draw(sampled.token, TokenLogprobs(sampled.logprob, list(sampled.top_ids), list(sampled.top_logprobs)))
