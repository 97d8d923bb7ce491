"""From a request's fields to checked sampling parameters within the engine's limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantkit.errors import RequestError
from quantkit.runtime.sampling import MAX_LOGPROBS, SamplingParams
from quantkit.runtime.text import ChatText
from quantkit.server.api_errors import bad_request
from quantkit.server.requests import ChatRequest, CompletionRequest

MAX_CHOICES = 128
MAX_STOPS = 16
COMPLETION_TOKENS = 16
"""Tokens a /v1/completions request gets when it names no number, as the API has it."""

_SAME = (
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop_token_ids",
    "ignore_eos",
)
"""Fields that SamplingParams has under the same name."""


@dataclass(frozen=True)
class Limits:
    """What the engine can take: tokens of prompt and answer together, and the ids its vocabulary has."""

    max_model_len: int
    vocab_size: int


def sampling_params(request: ChatRequest | CompletionRequest, text: ChatText, limits: Limits) -> SamplingParams:
    """The request's parameters over the model's defaults, judged before any prompt is tokenized.

    Raises:
        ApiError: 400 naming the field.
    """
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    given |= {"stop": _stops(request), "logprobs": _logprobs(request), "max_tokens": _max_tokens(request)}
    if request.top_k is not None:
        given["top_k"] = max(0, request.top_k) if request.top_k >= -1 else request.top_k
    _check_other_fields(request)
    try:
        params = text.default_sampling(**given)
        params.check_vocabulary(limits.vocab_size)
    except RequestError as error:
        field = error.what.split()[0].rstrip(":")
        raise bad_request(error.line(), field if hasattr(request, field) else None) from None
    return params


def fit(params: SamplingParams, prompt_tokens: int, limits: Limits, *, chat: bool) -> int:
    """Tokens the answer to a prompt of `prompt_tokens` may have.

    Raises:
        ApiError: 400 with both numbers when the prompt, or prompt and answer, exceed the model's length.
    """
    room = limits.max_model_len - prompt_tokens
    if room < 1:
        raise bad_request(
            f"the prompt has {prompt_tokens} tokens; with one token of answer that exceeds the limit of "
            f"{limits.max_model_len}",
            "messages" if chat else "prompt",
            "context_length_exceeded",
        )
    asked = params.max_tokens
    if asked is not None and asked > room:
        raise bad_request(
            f"max_tokens {asked} with a prompt of {prompt_tokens} tokens exceeds the limit of {limits.max_model_len}",
            "max_tokens",
            "context_length_exceeded",
        )
    allowed = asked or (room if chat else min(room, max(COMPLETION_TOKENS, params.min_tokens)))
    if params.min_tokens > allowed:
        raise bad_request(
            f"min_tokens {params.min_tokens} exceeds the {allowed} tokens the answer may have", "min_tokens"
        )
    return allowed


def check_ids(ids: list[int], limits: Limits, param: str) -> None:
    """400 unless every id belongs to the vocabulary."""
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise bad_request(f"token id {token} is outside the vocabulary of {limits.vocab_size}", param)


def _check_other_fields(request: ChatRequest | CompletionRequest) -> None:
    if request.n is not None and not 1 <= request.n <= MAX_CHOICES:
        raise bad_request(f"n must lie between 1 and {MAX_CHOICES}, got {request.n}", "n")
    if request.priority is not None and abs(request.priority) >= 2**31:
        raise bad_request(f"priority must fit in 32 bits, got {request.priority}", "priority")
    if request.deadline_ms is not None and not (request.deadline_ms > 0 and math.isfinite(request.deadline_ms)):
        raise bad_request(f"deadline_ms must be greater than 0, got {request.deadline_ms}", "deadline_ms")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    if request.cache_salt is not None and len(request.cache_salt) > 256:
        raise bad_request("cache_salt is longer than 256 characters", "cache_salt")


def _stops(request: ChatRequest | CompletionRequest) -> list[str]:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS:
        raise bad_request(f"at most {MAX_STOPS} stop strings, got {len(stops)}", "stop")
    if not all(stops):
        raise bad_request("a stop string must not be empty", "stop")
    return stops


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    name, wanted = "logprobs", request.logprobs
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        name, wanted = "top_logprobs", (request.top_logprobs or 0) if request.logprobs else None
    if wanted is not None and not 0 <= wanted <= MAX_LOGPROBS:
        raise bad_request(f"{name} must lie between 0 and {MAX_LOGPROBS}, got {wanted}", name)
    return wanted


def _max_tokens(request: ChatRequest | CompletionRequest) -> int | None:
    newer = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    return request.max_tokens if newer is None else newer
