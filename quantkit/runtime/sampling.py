"""SamplingParams: how one request's tokens are drawn, checked when made. A mistake is a RequestError, never a crash."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.errors import RequestError
from quantkit.numeric import is_number

MAX_LOGPROBS = 20
"""Alternatives a position may report, as the API has it."""
_MAX_COUNT = 2**31 - 1
_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are drawn. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    Order: logit bias, repetition penalty (prompt and output), presence and frequency penalties (output), temperature,
    then top_k, top_p over what top_k leaves, min_p relative to the likeliest token.

    Raises:
        RequestError: a value outside its range, with the range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Positive logits of tokens seen are divided by it, negative ones multiplied (CTRL, arXiv:1909.05858)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> number added to its logit, -100 to 100."""
    seed: int | None = None
    """Draws depend on the seed and the output position alone; None: the engine picks one for the request."""
    max_tokens: int | None = None
    """Tokens to generate at most; None: until a stop or the model's length."""
    min_tokens: int = 0
    """Stop ids and stop strings do not count before this many tokens are out."""
    stop: tuple[str, ...] = ()
    """Strings that end the text, cut before the first of them (seen by what turns ids into text)."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Go on past the model's own stop set; `stop_token_ids` still count."""
    logprobs: int | None = None
    """Alternatives to report beside the chosen token's log probability, 0 to 20; None: no log probabilities."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, kind in (("stop", Iterable), ("stop_token_ids", Iterable), ("logit_bias", Mapping)):
            if not isinstance(value := getattr(self, name), kind):
                raise RequestError(f"{name} must be a {'mapping' if kind is Mapping else 'list'}, got {value!r}")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("top_k", self.top_k, 0, _MAX_COUNT)
        _integer("min_tokens", self.min_tokens, 0, _MAX_COUNT)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), _MAX_SEED)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError("a stop string must be a string that is not empty")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, _MAX_COUNT)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, _MAX_COUNT)
            _number("logit_bias", bias, -100.0, 100.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """RequestError unless every token id named belongs to a vocabulary of `vocab_size`."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    raise RequestError(f"{name}: token id {token} is outside the vocabulary of {vocab_size}")

    def fork(self, index: int) -> SamplingParams:
        """Parameters of the answer `index` of several to one prompt: a seed given counts up, so that they differ."""
        if self.seed is None or index == 0:
            return self
        seed = self.seed + index
        return replace(self, seed=seed if seed <= _MAX_SEED else seed - _MAX_SEED - 1)

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before the draw (min_tokens aside)."""
        return bool(self.logit_bias or self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the logits as they come (min_tokens aside)."""
        return self.temperature == 0.0 and self.logprobs is None and not self.adjusts


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if not is_number(value) or not low <= value <= high or (open_low and value == low):
        bound = f"greater than {low:g}" if open_low else f"at least {low:g}"
        limit = "" if high == math.inf else f" and at most {high:g}"
        raise RequestError(f"{name} must be {bound}{limit}, got {value!r}")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limit = "" if high is None else f" and at most {high}"
        raise RequestError(f"{name} must be an integer of at least {low}{limit}, got {value!r}")
