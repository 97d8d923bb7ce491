"""Domains: kinds of text that the gate judges on their own, so that damage to one of them cannot hide in the average.

By language and category, as the data says; by format: tokens inside JSON, wherever it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.gate.data import Window
from quantkit.runtime.text import ChatText

JSON = "json"


@dataclass(frozen=True)
class Domain:
    """Some scored tokens: `chosen` is a mask `[S]`. `conversations`: how many they come from."""

    kind: str
    value: str
    chosen: NDArray[np.bool_]
    conversations: int

    @property
    def name(self) -> str:
        """`language zh`, `category sql`, `format json`."""
        return f"{self.kind} {self.value}"


def domains_of(windows: Sequence[Window], in_json: NDArray[np.bool_]) -> list[Domain]:
    """The domains of `windows` in a fixed order. in_json: mask `[S]` over their scored tokens."""
    cluster = np.repeat(np.arange(len(windows)), [window.scored for window in windows])
    found = []
    for kind in ("language", "category"):
        for value in sorted({getattr(window, kind) for window in windows}):
            members = [i for i, window in enumerate(windows) if getattr(window, kind) == value]
            found.append(Domain(kind, value, np.isin(cluster, members), len(members)))
    if in_json.any():
        found.append(Domain("format", JSON, in_json, len(np.unique(cluster[in_json]))))
    return found


def json_tokens(windows: Sequence[Window], text: ChatText) -> NDArray[np.bool_]:
    """Which scored tokens of `windows` stand inside a JSON object or follow its brace: mask `[S]`."""
    found = [_inside(window, text)[window.first : -1] for window in windows]
    return np.concatenate(found) if found else np.zeros(0, bool)


def _inside(window: Window, text: ChatText) -> NDArray[np.bool_]:
    """Mask `[len(ids)]` of the tokens that hold a byte of a JSON object."""
    pieces = [text.token_bytes(token) for token in window.ids]
    ends = np.cumsum([len(piece) for piece in pieces])
    mask = np.zeros(len(pieces), bool)
    for start, stop in _spans(b"".join(pieces)):
        mask[np.searchsorted(ends, start, side="right") : np.searchsorted(ends, stop - 1, side="right") + 1] = True
    return mask


def _spans(raw: bytes) -> Iterator[tuple[int, int]]:
    """Byte ranges of the JSON objects of a text that have at least one key."""
    whole = raw.decode("latin-1")  # one character a byte: offsets stay, and JSON's own signs are ASCII
    decoder, at = json.JSONDecoder(), whole.find("{")
    while at >= 0:
        try:
            value, stop = decoder.raw_decode(whole, at)
        except (ValueError, RecursionError):
            stop, value = at + 1, None
        if value:
            yield at, stop
        at = whole.find("{", stop)
