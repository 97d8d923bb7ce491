"""GuardedTokenizer: a checkpoint's `tokenizer.json`, tried at load and never random, whose failures are one line.

The library's own errors are no better than `Exception`, and what its Rust code gives up on comes as a `BaseException`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tokenizers import AddedToken, Tokenizer

from quantkit.errors import CheckpointError, RequestError
from quantkit.terminal import silenced

T = TypeVar("T")

_TRIAL = 'Hello, world!\n\t{"naïve": 12.5}  你好，世界。 Ωμέγα 🙂\u0378'
_MOST_GROWTH = 256
"""Characters that a normalizer may make of one."""


class GuardedTokenizer:
    """The tokenizer in the file `path`, without truncation, padding and dropout.

    Raises:
        CheckpointError: it is missing, no tokenizer, cannot encode or decode ordinary text, or blows text up without
            bound.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError("missing", where=str(path), next="A checkpoint needs its tokenizer.json")

        def refuse(what: str) -> NoReturn:
            raise CheckpointError(what, where=str(path), next="Fetch the checkpoint again")

        with silenced(2):  # Rust tells of its panics there, in several lines
            self._tokenizer: Tokenizer = _guarded(
                lambda: Tokenizer.from_file(str(path)), lambda error: refuse(f"not a tokenizer ({error})")
            )
            if _growth(path) > _MOST_GROWTH:
                refuse(f"its normalizer may make more than {_MOST_GROWTH} characters of one")
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            if getattr(self._tokenizer.model, "dropout", None):
                self._tokenizer.model.dropout = None  # of training: the same text would be other tokens each time
            _guarded(self._try, lambda error: refuse(f"cannot encode and decode ordinary text ({error})"))

    def _try(self) -> None:
        for special in (False, True):
            ids = self._tokenizer.encode(_TRIAL, add_special_tokens=special).ids
            self._tokenizer.decode(ids, skip_special_tokens=special)
            self._tokenizer.decode(ids[:1], skip_special_tokens=special)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; RequestError where the tokenizer cannot encode `text`."""
        return _guarded(
            lambda: list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids),
            lambda error: _fail(f"the tokenizer cannot encode the text ({error})"),
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text; RequestError where the tokenizer cannot decode `ids`."""
        return _guarded(
            lambda: str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)),
            lambda error: _fail(f"the tokenizer cannot decode the tokens ({error})"),
        )

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones counted."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def added(self) -> dict[int, AddedToken]:
        """The added tokens by id."""
        return dict(self._tokenizer.get_added_tokens_decoder())

    @property
    def byte_level(self) -> bool:
        """Whether its tokens stand for bytes by GPT-2's alphabet."""
        return "ByteLevel" in repr(self._tokenizer.decoder)

    def add_special(self, content: str) -> None:
        """Make sure that `content` is a token, and special."""
        if self.id_of(content) is None:
            self._tokenizer.add_special_tokens([AddedToken(content, special=True)])

    def id_of(self, content: str) -> int | None:
        """The id of a token; None: there is none."""
        found: int | None = self._tokenizer.token_to_id(content)
        return found

    def piece_of(self, token: int) -> str | None:
        """A token as the vocabulary spells it; None: no such id."""
        found: str | None = self._tokenizer.id_to_token(token)
        return found


def _guarded(call: Callable[[], T], failed: Callable[[str], NoReturn]) -> T:
    """What `call` returns; `failed` gets the first line of whatever the library raises."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 (a panic of the library is no Exception)
        failed(str(error).split("\n", 1)[0][:200])


def _fail(what: str) -> NoReturn:
    raise RequestError(what)


def _growth(path: Path) -> float:
    """Characters that the file's normalizer may make of one, by its replacements."""
    steps: list[Any] = [json.loads(path.read_text("utf-8")).get("normalizer")]
    growth = 1.0
    while steps:
        step = steps.pop()
        if isinstance(step, dict):
            steps += step.get("normalizers") or ()
            growth *= max(1, len(str(step.get("content", "")))) if step.get("type") == "Replace" else 1
    return growth if math.isfinite(growth) else math.inf
