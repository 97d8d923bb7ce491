"""Regular expressions that people wrote, tried on text that models wrote: within a second, within a gigabyte."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import regex

from quantkit.errors import RecipeError

PATTERN_SECONDS = 1.0


@lru_cache(maxsize=512)
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern, regex.DOTALL)


def pattern_problem(pattern: str) -> str:
    """What is wrong with a pattern; empty when nothing."""
    try:
        _compiled(pattern)
    except regex.error as error:
        return f"the pattern does not compile: {error}"
    except RecursionError:
        return "the pattern is nested too deeply"
    return ""


def matches(pattern: str, text: str) -> bool:
    """Whether `pattern` is found in `text`. RecipeError when that takes too long or too much memory."""
    try:
        return _compiled(pattern).search(text, timeout=PATTERN_SECONDS) is not None
    except (TimeoutError, MemoryError) as error:
        much = f"longer than {PATTERN_SECONDS:g} s" if isinstance(error, TimeoutError) else "more memory than there is"
        raise RecipeError(
            f"this pattern takes {much} on an answer", where=pattern[:80], next="Write it without nested repetition"
        ) from None
