"""Text from models and files, made safe and visible: it stays text whatever it holds.

The template escapes HTML's special characters. Before that, control characters, characters that turn the writing
direction and those with no shape of their own are replaced by their names, so that nothing hides and nothing rearranges
the page around it.
"""

from __future__ import annotations

import unicodedata

from markupsafe import Markup

MOST = 2000
"""Characters of any one text that are shown; the template cuts some shorter."""
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def visible(value: object) -> object:
    """A value as the template may print it: text without hidden characters, nothing for None; our own markup stays."""
    if isinstance(value, Markup):
        return value
    return "" if value is None else shown(shorten(str(value), MOST))


def shorten(text: str, most: int) -> str:
    """At most about `most` characters, the middle left out and counted."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [… {len(text) - 2 * half} characters …] {text[-half:]}"


def signs(token: str) -> str:
    """One token with spaces and line ends shown as signs, ∅ when it has no text of its own."""
    return shorten(token, 60).replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "∅"


def shown(text: str) -> str:
    """Text whole, hidden and turning characters replaced by their names."""
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    if unicodedata.category(character) in _UNSEEN or code & 0xFFFE == 0xFFFE:  # the last two are no characters
        return f"[U+{code:04X}]"
    return character
