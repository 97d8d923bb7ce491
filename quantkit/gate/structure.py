"""Is what surrounds the weights the source's own? Tokenizer, chat template, stop set, sampling defaults: exact rules.

None of it is quantized, so nothing of it may differ; yet each was lost in some conversion before, and a lost stop token
or a template without its system turn costs more than any rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.errors import RequestError
from quantkit.gate.rule import Rule, exact
from quantkit.runtime.chat_template import Message
from quantkit.runtime.text import ChatText

_USER = {"role": "user", "content": "Where is my order 4711?"}
_ANSWER = {"role": "assistant", "content": "On its way; it arrives on Friday."}
_MORE = {"role": "user", "content": "Thank you. Can you change the address?"}
_SYSTEM = {"role": "system", "content": "You answer customers of a bookshop in one sentence."}
_CHINESE = ({"role": "system", "content": "你是一名客服。"}, {"role": "user", "content": "请问发票什么时候能开？"})

PROBES: dict[str, tuple[Sequence[Message], bool]] = {
    "one user turn": ((_USER,), True),
    "a system turn": ((_SYSTEM, _USER), True),
    "several turns": ((_USER, _ANSWER, _MORE), True),
    "several turns after a system turn": ((_SYSTEM, _USER, _ANSWER, _MORE), True),
    "Chinese": (_CHINESE, True),
    "a finished conversation": ((_USER, _ANSWER), False),
    "white space and braces": (({"role": "user", "content": "  a\n\n{{ b }}\t{% c %} "},), True),
}
"""Conversations by what they try, and whether the assistant's turn is opened."""

TEXTS = (
    "The total is $1,234.56, due 2026-12-01.",
    "请在星期五之前回复客户，谢谢！",
    '{"name": "Ann", "items": [1, 2.5, null]}',
    "def f(x):\n    return x ** 2  # naïve café 🙂",
    "  leading and trailing  ",
)
_NO_DEFAULTS = frozenset(("transformers_version", "_from_model_config", "eos_token_id", "bos_token_id", "pad_token_id"))
"""Keys of generation_config.json that say nothing of sampling, or that the stop set covers."""


def structural_rules(source: ChatText, artifact: ChatText) -> list[Rule]:
    """One rule each on stop set, tokenizer, chat template and sampling defaults; a difference fails and is named."""
    return [
        _stop_set(source, artifact),
        _tokenizer(source, artifact),
        _template(source, artifact),
        _defaults(source.generation_config, artifact.generation_config),
    ]


def _stop_set(source: ChatText, artifact: ChatText) -> Rule:
    lost = sorted(source.stop_token_ids - artifact.stop_token_ids)
    gained = sorted(artifact.stop_token_ids - source.stop_token_ids)
    text = f"the stop set is the source's: {_tokens(source, sorted(source.stop_token_ids)) or 'none'}"
    if lost or gained:
        said = [f"{word} {_tokens(text, ids)}" for word, text, ids in
                (("lost", source, lost), ("gained", artifact, gained)) if ids]  # fmt: skip
        text = f"the stop set has {' and '.join(said)}: answers end otherwise than the source's"
    return exact("stop_set", len(lost) + len(gained), text, "structure")


def _tokens(text: ChatText, ids: Sequence[int]) -> str:
    return ", ".join(f"{text.token_text(token)} ({token})" for token in ids)


def _tokenizer(source: ChatText, artifact: ChatText) -> Rule:
    wrong = [sample for sample in TEXTS if _ids(source, sample) != _ids(artifact, sample)]
    wrong += [f"{side} special tokens" for side, ids in (
        ("lost", source.special_token_ids - artifact.special_token_ids),
        ("gained", artifact.special_token_ids - source.special_token_ids)) if ids]  # fmt: skip
    text = f"{len(TEXTS)} texts give the source's token ids"
    if wrong:
        text = f"the tokenizer is not the source's: {wrong[0]!r} differs ({len(wrong)} of {len(TEXTS)} texts)"
    return exact("tokenizer", len(wrong), text, "structure")


def _ids(text: ChatText, sample: str) -> tuple[list[int], str]:
    ids = text.encode(sample, add_special_tokens=True)
    return ids, text.decode(ids)


def _template(source: ChatText, artifact: ChatText) -> Rule:
    wrong = []
    for name, (messages, opened) in PROBES.items():
        theirs, ours = (_rendered(text, messages, opened) for text in (source, artifact))
        if theirs != ours:
            wrong.append((name, _difference(theirs, ours)))
    text = f"{len(PROBES)} conversations render as the source's template renders them"
    if wrong:
        names = ", ".join(name for name, _ in wrong)
        text = f"the chat template is not the source's: {names} rendered otherwise; {wrong[0][1]}"
    return exact("chat_template", len(wrong), text, "structure")


def _rendered(text: ChatText, messages: Sequence[Message], opened: bool) -> tuple[str, list[int]]:
    """What the model reads, as text and ids; a refusal counts as text of its own."""
    if not text.has_template:
        return "no template", []
    try:
        rendered = text.render(messages, opened)
    except RequestError:
        return "refused", []
    return rendered, text.encode(rendered)


def _difference(theirs: tuple[str, list[int]], ours: tuple[str, list[int]]) -> str:
    """Where two renderings part, in a few characters of each."""
    if theirs[0] == ours[0]:
        return "its text has other token ids"
    same = next((i for i, (a, b) in enumerate(zip(theirs[0], ours[0], strict=False)) if a != b), None)
    at = min(len(theirs[0]), len(ours[0])) if same is None else same
    begin = max(0, at - 20)
    return f"the source has {theirs[0][begin : at + 40]!r}, the artifact {ours[0][begin : at + 40]!r}"


def _defaults(source: Mapping[str, Any], artifact: Mapping[str, Any]) -> Rule:
    keys = sorted((source.keys() | artifact.keys()) - _NO_DEFAULTS)
    wrong = [f"{key} was {source.get(key)!r}, is {artifact.get(key)!r}" for key in keys
             if source.get(key) != artifact.get(key)]  # fmt: skip
    text = "the sampling defaults are the source's"
    if wrong:
        text = f"the sampling defaults are not the source's: {'; '.join(wrong)[:300]}"
    return exact("sampling_defaults", len(wrong), text, "structure")
