"""Checks on an answer: plain data in a prompt file, pure functions from the answer's text to yes or no.

Text is compared in one form: NFKC (full-width letters, digits and punctuation become half-width), one case, runs of
white space as one space. No check ever raises on an answer, whatever the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import RecipeError
from quantkit.gate.json_answers import equals, find_json, pointer, satisfies, schema_error
from quantkit.gate.patterns import matches, pattern_problem
from quantkit.gate.wording import (
    choice_of,
    is_refusal,
    language_of,
    normalised,
    numbers_in,
    word_count,
)
from quantkit.numeric import is_number

MOST_TEXT = 1 << 16
"""Characters of an answer that are looked at."""


@dataclass(frozen=True)
class Check:
    """One thing that an answer must satisfy; `arguments` as the prompt file has them."""

    kind: str
    arguments: Mapping[str, Any]

    def passes(self, answer: str) -> bool:
        """Whether `answer` satisfies it. RecipeError only when its own pattern takes too much time or memory."""
        try:
            return _KINDS[self.kind].test(answer[:MOST_TEXT], self.arguments)
        except RecursionError:  # JSON nested about as deeply as can be read
            return False


def parse_check(row: Any, where: str) -> Check:
    """A check from a prompt file's row `{"kind": ..., ...}`.

    RecipeError names what is wrong with it: an unknown kind, an argument that is missing, unknown or of another type.
    """
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        raise RecipeError("a check is an object with a 'kind'", where=where)
    kind = _KINDS.get(row["kind"])
    if kind is None:
        raise RecipeError(f"unknown check {row['kind']!r}", where=where, next=f"Known: {', '.join(sorted(_KINDS))}")
    arguments = {key: value for key, value in row.items() if key != "kind"}
    problem = kind.problem(arguments)
    if problem:
        raise RecipeError(f"check {row['kind']!r}: {problem}", where=where)
    return Check(row["kind"], arguments)


@dataclass(frozen=True)
class _Kind:
    """What a kind of check takes (argument -> valid?) and how it decides."""

    takes: Mapping[str, Callable[[Any], bool]]
    test: Callable[[str, Mapping[str, Any]], bool]
    optional: frozenset[str] = frozenset()
    examine: Callable[[Mapping[str, Any]], str] = lambda arguments: ""

    def problem(self, arguments: Mapping[str, Any]) -> str:
        """What is wrong with `arguments`; empty when nothing."""
        for name in sorted(arguments.keys() - self.takes.keys()):
            return f"unknown argument {name!r}"
        for name, valid in self.takes.items():
            if name not in arguments and name not in self.optional:
                return f"needs {name!r}"
            if name in arguments and not valid(arguments[name]):
                return f"{name!r} cannot be {str(arguments[name])[:60]!r}"
        return self.examine(arguments)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) and text.strip() for text in value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _pointers(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(key == "" or key.startswith("/") for key in value)


def _contained(answer: str, arguments: Mapping[str, Any]) -> list[bool]:
    text = normalised(answer)
    return [normalised(value) in text for value in arguments["values"]]


def _near(answer: str, arguments: Mapping[str, Any]) -> bool:
    wanted = float(arguments["value"])
    room = float(arguments.get("tolerance", 0)) + 1e-9 * max(1.0, abs(wanted))
    return any(abs(found - wanted) <= room for found in numbers_in(answer))


def _valid_json(answer: str, arguments: Mapping[str, Any]) -> bool:
    found = find_json(answer)
    return found is not None and satisfies(found.value, arguments.get("schema", True))


def _json_equals(answer: str, arguments: Mapping[str, Any]) -> bool:
    found = find_json(answer)
    if found is None:
        return False
    for place, wanted in arguments["values"].items():
        there, value = pointer(found.value, place)
        if not there or not equals(value, wanted):
            return False
    return True


def _lines(answer: str, arguments: Mapping[str, Any]) -> bool:
    count = sum(1 for line in answer.splitlines() if line.strip())
    return arguments.get("min", 0) <= count <= arguments.get("max", count)


_KINDS: dict[str, _Kind] = {
    "contains_all": _Kind({"values": _texts}, lambda text, a: all(_contained(text, a))),
    "contains_any": _Kind({"values": _texts}, lambda text, a: any(_contained(text, a))),
    "contains_none": _Kind({"values": _texts}, lambda text, a: bool(text.strip()) and not any(_contained(text, a))),
    "number": _Kind(
        {"value": is_number, "tolerance": lambda v: is_number(v) and v >= 0}, _near, frozenset({"tolerance"})
    ),
    "choice": _Kind(
        {"value": lambda v: isinstance(v, str) and len(v) == 1 and v in "ABCDEFGH"},
        lambda text, a: choice_of(text) == a["value"],
    ),
    "regex": _Kind(
        {"pattern": lambda v: isinstance(v, str) and bool(v)},
        lambda text, a: matches(a["pattern"], text),
        examine=lambda a: pattern_problem(a["pattern"]),
    ),
    "json": _Kind(
        {"schema": lambda v: isinstance(v, dict)},
        _valid_json,
        frozenset({"schema"}),
        lambda a: schema_error(a.get("schema", {})),
    ),
    "json_equals": _Kind({"values": _pointers}, _json_equals),
    "max_words": _Kind({"value": _count}, lambda text, a: bool(text.strip()) and word_count(text) <= a["value"]),
    "min_words": _Kind({"value": _count}, lambda text, a: word_count(text) >= a["value"]),
    "lines": _Kind({"min": _count, "max": _count}, _lines, frozenset({"min", "max"})),
    "language": _Kind({"value": lambda v: v in ("en", "zh")}, lambda text, a: language_of(text) == a["value"]),
    "refusal": _Kind(
        {"value": lambda v: isinstance(v, bool)},
        lambda text, a: bool(text.strip()) and is_refusal(text) == a["value"],
    ),
}

KINDS = tuple(sorted(_KINDS))
JSON_KINDS = ("json", "json_equals")
