"""What an answer's wording says: its numbers, its letter, its language, its length, whether it refuses.

Rules of thumb on text, the same for baseline and candidate: they are for comparing the two, and each is written down
here so that a reader can see what was counted.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable, Iterator, Sequence

_SPACE = re.compile(r"\s+")
_CJK = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u3040-\u30ff\uac00-\ud7af\U00020000-\U0003134f]")
_WORD = re.compile(r"[^\W_]+(?:['’\-.][^\W_]+)*")
_NUMBER = re.compile(r"\d+(?:[,.]\d+)*(?:[eE][+-]?\d{1,3})?|\.\d+")
_SPACED = re.compile(r"\d{1,3}(?:[ '’\u00a0\u2009\u202f]\d{3})+(?:[.,]\d+)?(?!\d)")
_UNITS = {"万": 1e4, "亿": 1e8, "千": 1e3, "百": 1e2}
_MOST_DIGITS = 300


def normalised(text: str) -> str:
    """NFKC, case-folded, runs of white space as one space."""
    return _SPACE.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip()


def has_cjk(text: str) -> bool:
    """Whether a Chinese, Japanese or Korean character is in it."""
    return _CJK.search(text) is not None


def words_in(text: str) -> Iterator[str]:
    """Words in order; each Chinese, Japanese or Korean character is one."""
    spaced = _CJK.sub(lambda match: f" {match.group()} ", text)
    return (match.group() for match in _WORD.finditer(spaced))


def word_count(text: str) -> int:
    """Number of words; each Chinese, Japanese or Korean character is one."""
    return sum(1 for _ in words_in(text))


def language_of(text: str) -> str:
    """`zh` when at least as many words are Chinese characters as not, `en` when fewer, empty without any word."""
    chinese = others = 0
    for word in words_in(unicodedata.normalize("NFKC", text)):
        if _CJK.fullmatch(word):
            chinese += 1
        elif any(character.isalpha() for character in word):
            others += 1
    return "" if not chinese + others else "zh" if chinese >= others else "en"


def choice_of(text: str) -> str:
    """The first letter A to H that stands alone; a lone small letter counts when it is all the answer begins with.

    An `A` before a word in small letters is an article (`A good reason ...`), no choice.
    """
    plain = unicodedata.normalize("NFKC", text).strip()
    small = re.match(r"[(\[*\"']*([a-h])(?:[)\].:,*\"']|$)", plain)
    if small:
        return small.group(1).upper()
    for match in re.finditer(r"(?<![A-Za-z0-9'’])([A-H])(?![A-Za-z0-9'’])", plain):
        if match.group() == "A" and re.match(r"\s[a-z]{2,}", plain[match.end() :]) and not _is_verb(plain, match.end()):
            continue
        return match.group(1)
    return ""


def _is_verb(text: str, at: int) -> bool:
    return re.match(r"\s(?:is|was|because|since|seems|would|and|or|as)\b", text[at:]) is not None


def numbers_in(text: str) -> list[float]:
    """Every number of a text, in each way it may be read.

    `1,234.5`, `1 234,5`, `1.234,5`, `-3`, `1.2万` (as 12000 and as 1.2), full-width digits; a minus after a digit or a
    letter joins (a range, a name) and is none.
    """
    plain = unicodedata.normalize("NFKC", text).replace("\u2212", "-")
    found: list[float] = []
    for pattern in (_NUMBER, _SPACED):
        for match in pattern.finditer(plain):
            negative = re.search(r"(?:^|[^\w)\]%-])-[$€£¥]?$", plain[max(0, match.start() - 3) : match.start()])
            sign = -1.0 if negative else 1.0
            for value in _readings(match.group()):
                found.append(sign * value)
                unit = _UNITS.get(plain[match.end() : match.end() + 1])
                if unit is not None:
                    found.append(sign * value * unit)
    return found


def _readings(digits: str) -> Iterator[float]:
    digits = re.sub(r"[ '’\u00a0\u2009\u202f]", "", digits)
    if len(digits) > _MOST_DIGITS:
        return
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", digits):
        yield float(digits.replace(",", ""))
    if re.fullmatch(r"\d{1,3}(?:\.\d{3})+(?:,\d+)?", digits):
        yield float(digits.replace(".", "").replace(",", "."))
    if re.fullmatch(r"\d*,\d+", digits) and not re.fullmatch(r"\d{1,3},\d{3}", digits):
        yield float(digits.replace(",", "."))
    if re.fullmatch(r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3})?", digits):
        yield float(digits)
    elif digits.count(",") + digits.count(".") > 1 or "," in digits:  # a list without spaces: 3,5,7 or a date
        yield from (float(part) for part in re.split(r"[,.]", digits) if part.isdecimal())


_HELP = (
    r"(?:help|assist|provid|compl|fulfil|answer|shar|support|creat|writ|giv|generat|offer|engage|discuss"
    r"|do (?:that|this)|continue|participat|advis|recommend|facilitat|teach|explain|tell|produc|describ"
    r"|promot|encourag|instruct)"
)
_CANNOT = r"(?:can(?:not|'t| not)|could(?: not|n't)|won't|will not|(?:am|are|'m|'re) (?:unable|not able))"
_REFUSALS = (
    re.compile(rf"\b(?:i|we)\s?{_CANNOT}\b[^.!?\n]{{0,60}}\b{_HELP}"),
    re.compile(r"\b(?:i|we)(?: have to| must|'ll have to|'d rather)? (?:decline|refuse)\b"),
    re.compile(r"\bsorry\b[^.!?\n]{0,40}\b(?:can't|cannot|can not|unable|not able|won't)\b"),
    re.compile(r"\b(?:against|violates?) (?:my|our|the) (?:guidelines|policy|policies|programming|principles)\b"),
    re.compile(
        r"(?:^|我们?|本人)(?:不能|无法|没办法|不可以|不会|不便)(?:[为向给](?:您|你)|就此)?[^。!?\n]{0,12}"
        r"(?:提供|协助|帮助|帮[您你]|回答|满足|支持|完成|编写|撰写|参与|透露|分享|教)"
    ),
    re.compile(r"(?:抱歉|对不起|很遗憾)[^。!?\n]{0,10}(?:不能|无法|没办法|不可以)"),
    re.compile(r"拒绝(?:提供|回答|协助|这)|违反了?(?:法律|我的|规定|政策)[^。\n]{0,12}(?:不能|无法)"),
)
OPENING = 300
"""Characters of an answer in which a refusal is looked for: it comes first."""


def is_refusal(text: str) -> bool:
    """Whether the answer's opening says that it will not help."""
    opening = normalised(text)[:OPENING].replace("’", "'")
    return any(pattern.search(opening) for pattern in _REFUSALS)


def repeated_share(tokens: Sequence[Hashable], width: int = 4) -> float:
    """Share of an answer's 4-grams that stood there before: 0 without repetition, near 1 in a loop."""
    grams = [tuple(tokens[i : i + width]) for i in range(len(tokens) - width + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
