"""From prompts to token ids for the API: long texts in a thread, and none tokenized far beyond what could be served.

A thread cannot be cancelled: without the bound, a few megabytes of text that are to be refused anyway would hold a core
for seconds after their client has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from quantkit.runtime.text import ChatText
from quantkit.server.api_errors import bad_request
from quantkit.server.params import Limits

_LONG = 20_000
"""Characters from which tokenizing moves to a thread, so that other streams go on."""
_PART = 16_384
"""Characters counted at a time when a long text is measured."""
_CUT = 16
"""Tokens by which cutting a text into two parts may raise their number."""


async def prompt_ids(text: ChatText, prompt: str, limits: Limits, *, special: bool = True) -> list[int]:
    """Token ids of a bare prompt, with the special tokens the tokenizer adds to one.

    Raises:
        ApiError: 400 when the prompt is far longer than the model's length.
    """

    def work() -> list[int]:
        _refuse_hopeless(text, prompt, limits, "prompt")
        return text.encode(prompt, special)

    return await _off_loop(len(prompt), work)


async def chat_ids(
    text: ChatText, messages: list[dict[str, str]], limits: Limits, *, generation_prompt: bool
) -> list[int]:
    """Token ids of a conversation. Always in a thread: what a template costs is the artifact's to say.

    Raises:
        ApiError: 400 when the conversation is far longer than the model's length.
        RequestError: the template refuses it.
    """

    def work() -> list[int]:
        rendered = text.render(messages, generation_prompt)
        _refuse_hopeless(text, rendered, limits, "messages")
        return text.encode(rendered)

    return await asyncio.to_thread(work)


async def _off_loop(length: int, work: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(work) if length > _LONG else work()


def _refuse_hopeless(text: ChatText, prompt: str, limits: Limits, param: str) -> None:
    """400 as soon as the prompt's first parts alone are more tokens than fit; exact counting is for what may fit."""
    if len(prompt) <= max(_LONG, limits.max_model_len):  # a token is a character at least, mostly
        return
    count = 0
    for start in range(0, len(prompt), _PART):
        count += len(text.encode(prompt[start : start + _PART])) - _CUT
        if count > limits.max_model_len:
            raise bad_request(
                f"the prompt has more than {count} tokens; with one token of answer that exceeds the limit of "
                f"{limits.max_model_len}",
                param,
                "context_length_exceeded",
            )
