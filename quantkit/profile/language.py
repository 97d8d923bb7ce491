"""A text's language by its script; Latin ones by their commonest words. A guess for statistics, no more."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

UNKNOWN = "unknown"
_LOOKED_AT = 2000
"""Characters that are looked at."""

_SCRIPTS = {
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "HANGUL": "ko",
    "CJK": "zh",
    "CYRILLIC": "ru",
    "ARABIC": "ar",
    "HEBREW": "he",
    "GREEK": "el",
    "THAI": "th",
    "DEVANAGARI": "hi",
    "LATIN": "latin",
}
_WEIGHTS = {"zh": 3, "ja": 3, "ko": 3}
"""A character of these carries about a syllable or a word, a Latin letter does not."""
_COMMON = {
    "en": "the and is of to in that for with you this are what how please not from your can my we it on",
    "de": "der die das und ist nicht ein eine zu den mit ich sie für auf wie bitte im sich wir",
    "fr": "le les et est une des pour dans que vous je pas sur avec au qui nous bonjour mon",
    "es": "el los las es una que para con del se mi cómo está usted y por qué hola",
    "it": "il gli che di con non sono del della mi grazie questo lo sul dei ciao vorrei",
    "pt": "os é uma que para com não do da um se você meu olá obrigado está",
    "nl": "het een en van niet dat ik voor zijn er maar hoe wat mijn graag jullie",
}
_WORDS = {language: frozenset(words.split()) for language, words in _COMMON.items()}
_WORD = re.compile(r"[^\W\d_]+")


def language_of(text: str) -> str:
    """A two-letter code; `unknown` for a text without letters. Latin script without known words counts as English."""
    head = text[:_LOOKED_AT]
    if head.isascii():
        return _latin(head) if any(map(str.isalpha, head)) else UNKNOWN
    counts: Counter[str] = Counter()
    for character in head:
        if character.isalpha():
            language = (
                "latin" if character.isascii() else _SCRIPTS.get(unicodedata.name(character, "").split(" ")[0], "")
            )
            counts[language] += _WEIGHTS.get(language, 1)
    counts.pop("", None)
    if not counts:
        return UNKNOWN
    if counts["ja"] and counts["ja"] + counts["zh"] > counts["latin"]:
        return "ja"  # Japanese mixes kana with Chinese characters
    language = max(sorted(counts), key=counts.__getitem__)
    return _latin(head) if language == "latin" else language


def _latin(text: str) -> str:
    """The language with the most known words: another than English where those are several and clearly more."""
    words = [word.casefold() for word in _WORD.findall(text)]
    hits = {language: sum(word in known for word in words) for language, known in _WORDS.items()}
    best = max(hits, key=hits.__getitem__)  # the first of equals
    return best if hits[best] >= 2 and hits[best] > 1.5 * hits["en"] else "en"
