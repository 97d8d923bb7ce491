"""Both models answer the same prompts, one after the other: each through its own template, tokenizer and stop set."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.gate.answers import Pair, judged
from quantkit.gate.evaluate import Tick, Variant
from quantkit.gate.generate import Asked, Generator, TrailKeeper, ask, first_divergence
from quantkit.gate.prompts import Prompt
from quantkit.runtime.text import ChatText

MAX_NEW_TOKENS = 96
"""Tokens of an answer unless the recipe says otherwise."""
MAX_PROMPTS = 140

DIVERGENCE = (
    "mean KL(baseline‖artifact) in nats over the tokens of the baseline's answer, teacher-forced, summed over the "
    "baseline's 64 likeliest tokens and the rest as one"
)
"""What `Pair.divergence` is, for whoever reads the evidence."""


@dataclass(frozen=True)
class Answered:
    """Both models' answers in prompt order. `left_out`: prompts that leave no room for an answer."""

    pairs: tuple[Pair, ...]
    left_out: tuple[str, ...]
    seconds: dict[str, float]


def cost(asked: Sequence[Asked]) -> int:
    """Tokens that both models' answers and the teacher-forced pass take at most."""
    return 3 * sum(len(item.ids) + item.max_tokens for item in asked)


@dataclass(frozen=True)
class Questions:
    """The prompts that both models can answer, as each reads them."""

    baseline: tuple[Asked, ...]
    candidate: tuple[Asked, ...]
    left_out: tuple[str, ...]


def questions(
    prompts: Sequence[Prompt], source: ChatText, artifact: ChatText, *, max_new_tokens: int, max_length: int
) -> Questions:
    """Render `prompts` for both; those too long for either are left out and named."""
    ours = {a.prompt.id: a for a in ask(prompts, artifact, max_new_tokens=max_new_tokens, max_length=max_length)}
    theirs = {a.prompt.id: a for a in ask(prompts, source, max_new_tokens=max_new_tokens, max_length=max_length)}
    kept = [prompt.id for prompt in prompts if prompt.id in ours and prompt.id in theirs]
    return Questions(
        baseline=tuple(theirs[name] for name in kept),
        candidate=tuple(ours[name] for name in kept),
        left_out=tuple(prompt.id for prompt in prompts if prompt.id not in ours or prompt.id not in theirs),
    )


def answer(
    asked: Questions,
    baseline: tuple[Variant, ChatText],
    candidate: tuple[Variant, ChatText],
    *,
    about: Callable[[str], Tick],
) -> Answered:
    """Baseline first, then the candidate, which also runs along the baseline's answers; one model in memory at a time.

    `about(what)` gives what hears of the tokens of a part.
    """
    began = time.monotonic()
    keeper = TrailKeeper()
    model = Generator(baseline[0], asked.baseline, baseline[1])
    theirs = model.answers(about("baseline's answers"), on_logits=keeper)
    model.close()
    seconds = {"baseline's answers": round(time.monotonic() - began, 2)}
    began = time.monotonic()
    model = Generator(candidate[0], asked.candidate, candidate[1])
    ours = model.answers(about("artifact's answers"))
    seconds["artifact's answers"] = round(time.monotonic() - began, 2)
    began = time.monotonic()
    strays = model.divergences(theirs, keeper.trails(), about("along the answers"))
    model.close()
    seconds["along the answers"] = round(time.monotonic() - began, 2)
    pairs = tuple(
        Pair(
            item.prompt,
            base,
            mine,
            first_divergence(base.token_ids, mine.token_ids),
            stray,
            judged(item.prompt, base, mine),
        )
        for item, base, mine, stray in zip(asked.baseline, theirs, ours, strays, strict=True)
    )
    return Answered(pairs, asked.left_out, seconds)
