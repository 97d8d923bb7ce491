"""Token ids to text as they come: no character is split, and the pieces join to what decoding all at once gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

REPLACEMENT = "�"
_PATIENCE = 64
"""Tokens held back for a character that never completes, before they are shown as they are."""


class Decoder(Protocol):
    """What a Detokenizer needs of a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The text of `ids`."""
        ...


class Detokenizer:
    """Turns one request's token ids into text pieces.

    A piece is what decoding gains when the new tokens follow the last ones shown; spaces at token boundaries
    (SentencePiece) thus come out as in the whole text. Text that ends inside a UTF-8 character waits for the rest.
    """

    def __init__(self, tokenizer: Decoder, special_ids: frozenset[int], *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = special_ids if skip_special else frozenset()
        self._shown: list[int] = []  # the last ids whose text is out: the left context of the next piece
        self._shown_text = ""
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """The text that can be shown now that `ids` have come; often empty."""
        self._pending += [token for token in ids if token not in self._hidden]
        if not self._pending:
            return ""
        text = self._decode(self._shown + self._pending)
        if text.endswith(REPLACEMENT) and len(self._pending) < _PATIENCE:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """What is still held back, when no token will come any more."""
        return self._show(self._decode(self._shown + self._pending)) if self._pending else ""

    def _show(self, text: str) -> str:
        piece = text[len(self._shown_text) :]
        if piece:
            self._shown, self._pending = self._pending, []
            self._shown_text = self._decode(self._shown)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
