"""Which words two texts do not share, for showing them side by side."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence

Segments = list[tuple[str, bool]]
"""(text, whether the other side lacks it), which joined give the whole text back."""

_WORDS = re.compile(r"\s+|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]|\w+|[^\w\s]")
_ALL = 0.8
"""Share of marked words in both texts above which neither is marked."""
_MOST = 1200
"""Words of a text beyond which what is between common beginning and end is marked whole: matching takes time."""


def differing(one: str, two: str) -> tuple[Segments, Segments]:
    """Both texts in segments, marked where they differ. A Chinese, Japanese or Korean character is a word.

    Texts that share next to nothing are not marked at all: everything underlined says less than nothing underlined.
    """
    left, right = _WORDS.findall(one), _WORDS.findall(two)
    marked: tuple[list[bool], list[bool]] = ([True] * len(left), [True] * len(right))
    for start, other, length in _shared(left, right):
        for offset in range(length):
            marked[0][start + offset] = marked[1][other + offset] = False
    if all(_share(words, marks) > _ALL for words, marks in zip((left, right), marked, strict=True)):
        marked = ([False] * len(left), [False] * len(right))
    return _segments(left, marked[0]), _segments(right, marked[1])


def _share(words: Sequence[str], marked: Sequence[bool]) -> float:
    """Share of the words, white space left out, that are marked."""
    marks = [mark for word, mark in zip(words, marked, strict=True) if not word.isspace()]
    return sum(marks) / len(marks) if marks else 0.0


def _shared(left: Sequence[str], right: Sequence[str]) -> list[tuple[int, int, int]]:
    """(place in left, place in right, length) of shared runs."""
    if len(left) + len(right) <= 2 * _MOST:
        matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
        return [(block.a, block.b, block.size) for block in matcher.get_matching_blocks()]
    shortest, first = min(len(left), len(right)), 0
    while first < shortest and left[first] == right[first]:
        first += 1
    last = 0
    while last < shortest - first and left[-1 - last] == right[-1 - last]:
        last += 1
    return [(0, 0, first), (len(left) - last, len(right) - last, last)]


def _segments(words: Sequence[str], marked: Sequence[bool]) -> Segments:
    """Neighbouring words of one kind joined; white space between two marked words is marked with them."""
    shown = []
    for index, (word, mark) in enumerate(zip(words, marked, strict=True)):
        between = word.isspace() and 0 < index < len(words) - 1
        shown.append((marked[index - 1] and marked[index + 1]) if between else mark and not word.isspace())
    runs = itertools.groupby(zip(words, shown, strict=True), key=lambda pair: pair[1])
    return [("".join(word for word, _ in run), mark) for mark, run in runs]
