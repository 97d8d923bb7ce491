"""The bodies the API takes, field by field, and their first check: JSON, types, unknown and unsupported fields."""

from __future__ import annotations

import difflib
import re
from typing import Any, TypeVar

import msgspec

from quantkit.server.api_errors import ApiError, bad_request


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """One part of a message's content; only text is understood."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation; the fields after `name` may only be empty."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None


class _Generation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of completion take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    deadline_ms: float | None = None
    cache_salt: str | None = None
    # Known to clients and without effect on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # Would change the answer and are not supported: refused unless neutral.
    response_format: dict[str, Any] | None = None
    store: bool | None = None


class ChatRequest(_Generation, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    parallel_tool_calls: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class CompletionRequest(_Generation, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/completions: one text, several texts, one list of token ids, or several."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /tokenize: a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "verbosity": ("medium",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
}
"""Fields that are understood but not supported, and the values that ask for nothing."""

_LONGEST_NAME = 100
"""Characters of a field's name beyond which it is nobody's typing error."""
Body = TypeVar("Body", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def parse(body: bytes, kind: type[Body]) -> Body:
    """The body as a typed request.

    Raises:
        ApiError: 400 naming the place: malformed JSON, a wrong type, an unknown or an unsupported field.
    """
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise bad_request("the body is not valid JSON: nested too deeply") from None
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise bad_request(f"{name} is not supported by this server", name, "unsupported_parameter")
    return request


def _invalid(text: str, kind: type[msgspec.Struct]) -> ApiError:
    """A 400 from msgspec's message, with the field as `param` and, for a typo, the nearest known one."""
    unknown = re.search(r"unknown field `(.*?)`", text)
    if unknown:
        name = unknown.group(1)
        typo = "$" not in text and len(name) <= _LONGEST_NAME
        near = difflib.get_close_matches(name, kind.__struct_fields__, 1) if typo else []
        return bad_request(
            f"unknown field {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""), name, "unknown_parameter"
        )
    missing = re.search(r"missing required field `(.*?)`", text)
    if missing:
        return bad_request(f"missing field {missing.group(1)!r}", missing.group(1))
    place = re.search(r"`\$\.?(.*?)`$", text)
    return bad_request(text, place.group(1) or None if place else None)
