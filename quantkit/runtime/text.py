"""ChatText: a checkpoint's tokenizer, chat template, stop set and sampling defaults, without torch or Transformers."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError, RequestError
from quantkit.runtime.chat_template import ChatTemplate, Message
from quantkit.runtime.detokenizer import Detokenizer
from quantkit.runtime.sampling import SamplingParams
from quantkit.runtime.tokenizer import GuardedTokenizer

if TYPE_CHECKING:
    from quantkit.models.source import ModelSource


def _byte_level() -> dict[str, int]:
    """GPT-2's alphabet of byte-level BPE: printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level()
_HALF = re.compile("[\ud800-\udfff]")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatText:
    """What turns conversations into token ids and back, read from a checkpoint or artifact `folder`.

    The chat template owns the BOS token: a rendered chat is encoded as it stands, so BOS comes exactly as often as the
    template writes it. A bare prompt gets the tokenizer's own special tokens; one that already begins with BOS (a chat
    rendered elsewhere) does not get a second.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        config = _read_json(self.folder / "tokenizer_config.json")
        model = _read_json(self.folder / "config.json")
        self.generation_config = _read_json(self.folder / "generation_config.json")
        self._tokenizer = GuardedTokenizer(self.folder / "tokenizer.json")
        tokens = _named_tokens(config)
        for content in tokens.values():
            self._tokenizer.add_special(content)
        self._added = self._tokenizer.added
        self.special_token_ids = frozenset(token for token, added in self._added.items() if added.special)
        self.bos_token_id = self._id(tokens.get("bos_token"))
        self.eos_token_id = self._id(tokens.get("eos_token"))
        self.vocab_size = self._tokenizer.vocab_size
        self.stop_token_ids = self._stop_set(model, tokens)
        self._adds_bos = config.get("add_bos_token") is True
        self._templates = {
            name: ChatTemplate(source, tokens) for name, source in _template_sources(self.folder, config).items()
        }
        try:
            self.default_sampling()
        except (RequestError, TypeError, ValueError) as error:
            where = str(self.folder / "generation_config.json")
            raise CheckpointError(f"not usable as sampling defaults: {error}", where=where) from None

    @classmethod
    def of_source(cls, source: ModelSource, folder: Path | None = None) -> ChatText:
        """The same of a source, by copies of its files in `folder` or a passing one. Errors name the source."""
        if folder is None:
            with tempfile.TemporaryDirectory(prefix="quantkit-") as scratch:
                return cls.of_source(source, Path(scratch))
        source.write_tokenizer(folder)
        try:
            return cls(folder)
        except CheckpointError as error:
            where = f"{source.location}: {Path(error.where).name or 'tokenizer'}"
            raise CheckpointError(error.what, where=where, next=error.next or "Correct the model's file") from None

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. With `add_special_tokens`, those the tokenizer adds to a bare prompt (BOS once).

        Raises:
            RequestError: `text` is no Unicode text (half of a surrogate pair), or the tokenizer cannot encode it.
        """
        if _HALF.search(text):
            raise RequestError("the text holds half of a surrogate pair, which is no character")
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        bos = self.bos_token_id
        if not add_special_tokens or bos is None:
            return ids
        if self._adds_bos and ids[:1] != [bos]:
            return [bos, *ids]
        plain = self._tokenizer.encode(text, add_special_tokens=False)
        return plain if plain[:1] == [bos] and ids[:2] == [bos, bos] else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`, special tokens left out unless told otherwise."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The conversation as the chat template writes it; `kwargs` (`tools`, ...) go to the template.

        Raises:
            RequestError: no template, no message, or a conversation the template refuses.
        """
        if not messages:
            raise RequestError("a conversation needs at least one message")
        if not self._templates:
            raise RequestError(f"{self.folder} has no chat template", next="Send a plain prompt instead")
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        return template.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any) -> list[int]:
        """Token ids of a conversation, BOS exactly where the template puts it."""
        return self.encode(self.render(messages, add_generation_prompt, **kwargs))

    def detokenizer(self, skip_special: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one request's output."""
        return Detokenizer(self._tokenizer, self.special_token_ids, skip_special=skip_special)

    def token_text(self, token: int) -> str:
        """One token's own text, as log probabilities show it (special tokens by name)."""
        return self.decode([token], skip_special=False)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for, be they part of a character; added tokens by name, unknown ids nothing."""
        piece = self._tokenizer.piece_of(token)
        if piece is None:
            return b""
        if token in self._added:
            return piece.encode()
        if self._tokenizer.byte_level:
            return bytes(_BYTE_LEVEL[character] for character in piece if character in _BYTE_LEVEL)
        fallback = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
        return bytes([int(fallback.group(1), 16)]) if fallback else piece.replace("\u2581", " ").encode()

    def default_sampling(self, **given: Any) -> SamplingParams:
        """SamplingParams with what `given` leaves open taken from generation_config.json.

        `do_sample: true` there brings its temperature, top_p, top_k and min_p; otherwise the model's default is
        greedy, as Transformers has it.
        """
        config = self.generation_config
        values: dict[str, Any] = {"temperature": 0.0}
        if config.get("do_sample") is True:
            values["temperature"] = 1.0
            values |= {k: config[k] for k in ("temperature", "top_p", "top_k", "min_p") if config.get(k) is not None}
        if config.get("repetition_penalty") is not None:
            values["repetition_penalty"] = config["repetition_penalty"]
        return SamplingParams(**(values | given))

    def _id(self, content: str | None) -> int | None:
        return None if content is None else self._tokenizer.id_of(content)

    def _stop_set(self, model: dict[str, Any], tokens: dict[str, str]) -> frozenset[int]:
        listed = self.generation_config.get("eos_token_id", model.get("eos_token_id"))
        ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
        if not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
            raise CheckpointError(
                f"eos_token_id must be a token id or a list of them, found {str(listed)[:60]!r}",
                where=str(self.folder / "generation_config.json"),
            )
        named = {self._id(tokens.get(name)) for name in ("eos_token", "eot_token")}
        return frozenset(token for token in {*ids, *named} if token is not None)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an absent file is an empty one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair is no text
    except (OSError, ValueError) as error:
        raise CheckpointError(f"not readable as JSON ({error})", where=str(path)) from error
    if not isinstance(value, dict):
        raise CheckpointError("not a JSON object", where=str(path))
    return value


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by role, model-specific roles included; entries are strings or {"content": string}."""
    extra = config.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **{k: config.get(k) for k in (*_NAMED_TOKENS, "eot_token")}}
    contents = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _template_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: the file, else tokenizer_config.json's string or list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return {"default": path.read_text("utf-8")}
        except ValueError:
            raise CheckpointError("not UTF-8 text", where=str(path)) from None
    stored = config.get("chat_template")
    if isinstance(stored, str):
        return {"default": stored}
    try:
        found = {entry["name"]: entry["template"] for entry in stored or ()}
    except (TypeError, LookupError):
        found = {"": None}
    if not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise CheckpointError(
            "chat_template must be a string or a list of named ones", where=str(folder / "tokenizer_config.json")
        )
    return found
