"""Messages and prompts as they come in, checked and made plain."""

from __future__ import annotations

from quantkit.server.api_errors import bad_request
from quantkit.server.params import Limits, check_ids
from quantkit.server.requests import CompletionRequest, Message

MAX_PROMPTS = 128
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_EMPTY_ONLY = ("audio", "function_call", "tool_calls", "tool_call_id")


def chat_messages(messages: list[Message]) -> list[dict[str, str]]:
    """`{"role", "content"}` of each message, text parts joined; `developer` is today's name for `system`.

    Raises:
        ApiError: 400 naming the message: none at all, an unknown role, no text, a part that is not text.
    """
    if not messages:
        raise bad_request("messages must not be empty", "messages")
    return [_plain(message, f"messages[{position}]") for position, message in enumerate(messages)]


def completion_prompts(request: CompletionRequest, limits: Limits) -> list[str | list[int]]:
    """The prompts one by one, as text or checked token ids.

    Raises:
        ApiError: 400 for an empty prompt, a mixture of kinds, an id outside the vocabulary, or echo with logprobs.
    """
    given = request.prompt
    if request.echo and request.logprobs is not None:
        raise bad_request("echo with logprobs is not supported by this server", "echo", "unsupported_parameter")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_request("best_of is not supported by this server", "best_of", "unsupported_parameter")
    prompts: list[str | list[int]] = []
    if isinstance(given, str):
        prompts = [given]
    elif all(isinstance(part, int) for part in given):
        prompts = [[part for part in given if isinstance(part, int)]]
    elif all(isinstance(part, str) for part in given) or all(isinstance(part, list) for part in given):
        prompts = [part for part in given if not isinstance(part, int)]
    else:
        raise bad_request("prompt must be a text, texts, token ids or lists of token ids, not a mixture", "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(f"at most {MAX_PROMPTS} prompts in one request, got {len(prompts)}", "prompt")
    for prompt in prompts:
        if not prompt:
            raise bad_request("a prompt must not be empty", "prompt")
        if isinstance(prompt, list):
            check_ids(prompt, limits, "prompt")
    return prompts


def _plain(message: Message, where: str) -> dict[str, str]:
    if message.role not in _ROLES:
        raise bad_request(
            f"{where}: unknown role {message.role!r}; one of {', '.join(_ROLES)} is expected", f"{where}.role"
        )
    for name in _EMPTY_ONLY:
        if getattr(message, name):
            raise bad_request(
                f"{where}: {name} is not supported by this server", f"{where}.{name}", "unsupported_parameter"
            )
    content = message.content
    if content is None:
        raise bad_request(f"{where}: content is missing", f"{where}.content")
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise bad_request(
                    f"{where}: content parts of type {part.type!r} are not supported; only text is", f"{where}.content"
                )
        content = "".join(part.text or "" for part in content)
    return {"role": _ROLES[message.role], "content": content}
