"""JSON inside an answer: found, parsed strictly, compared. A number that no double holds is none (RFC 7493)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import referencing
import referencing.exceptions

from quantkit.gate.patterns import matches, pattern_problem

ATTEMPTS = 64
"""Brackets of an answer from which a value is tried to be read."""
_MOST_DIGITS = 300
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Found:
    """A JSON value that an answer holds."""

    value: Any


def find_json(answer: str) -> Found | None:
    """The first JSON value of `answer`: of the first code fence that holds one, else of the text.

    The whole text may be any value; inside prose only objects and arrays count. NaN, Infinity and 1e999 are no JSON.
    """
    for text in (*_FENCE.findall(answer), answer):
        found = _first(text)
        if found is not None:
            return found
    return None


def satisfies(value: Any, schema: Any) -> bool:
    """Whether `value` is valid by a JSON Schema (2020-12); nothing is fetched for its references.

    RecipeError when a pattern of the schema takes too much time or memory.
    """
    try:
        return bool(_validator(schema).is_valid(value))
    except (RecursionError, referencing.exceptions.Unresolvable):
        return False


def schema_error(schema: Any) -> str:
    """What is wrong with a schema; empty when nothing."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        return next(_unreadable(schema), "")
    except jsonschema.SchemaError as error:
        return f"the schema is not valid: {error.message}"[:160]
    except RecursionError:
        return "the schema is nested too deeply"


def pointer(value: Any, place: str) -> tuple[bool, Any]:
    """Whether something stands at the JSON Pointer `place` (RFC 6901), and what."""
    for step in place.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isascii() and key.isdecimal() and len(key) < 9 and int(key) < len(value):
            value = value[int(key)]
        else:
            return False, None
    return True, value


def equals(found: Any, wanted: Any) -> bool:
    """Equal by value: numbers as numbers, text trimmed and in one case, lists and objects part by part."""
    if isinstance(wanted, bool) or wanted is None or isinstance(found, bool):
        return found is wanted
    if isinstance(wanted, int | float):
        return isinstance(found, int | float) and abs(found - wanted) <= 1e-9 * max(1.0, abs(wanted))
    if isinstance(wanted, str):
        return isinstance(found, str) and found.strip().casefold() == wanted.strip().casefold()
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(equals, found, wanted))
    return (
        isinstance(found, dict)
        and found.keys() == wanted.keys()
        and all(equals(found[key], wanted[key]) for key in wanted)
    )


def strict_json(text: str) -> Any:
    """One JSON value. ValueError for what is none, NaN and numbers that no double holds among it."""
    return _DECODER.decode(text)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _float(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits[:40])


def _int(digits: str) -> int:
    return int(digits) if len(digits) <= _MOST_DIGITS else _refuse(f"{digits[:40]}...")


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_float, parse_int=_int)


def _first(text: str) -> Found | None:
    whole = text.strip()
    found = _decode(whole, 0, whole=True)
    if found is not None:
        return found
    starts = (match.start() for match in re.finditer(r"[{\[]", whole))
    for _, start in zip(range(ATTEMPTS), starts, strict=False):
        found = _decode(whole, start)
        if found is not None:
            return found
    return None


def _decode(text: str, start: int, *, whole: bool = False) -> Found | None:
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return None if whole and end != len(text) else Found(value)


def _unreadable(schema: Any) -> Iterator[str]:
    """What of a valid schema is not read here: other documents, and patterns that nothing could stop."""
    if isinstance(schema, list):
        for item in schema:
            yield from _unreadable(item)
    if not isinstance(schema, dict):
        return
    if "patternProperties" in schema:
        yield "the schema has patternProperties, which is not read here"
    if isinstance(place := schema.get("$ref"), str) and not place.startswith("#"):
        yield f"the schema refers to {place[:60]!r}: nothing is fetched, write it out under $defs"
    if isinstance(pattern := schema.get("pattern"), str):
        yield from filter(None, [pattern_problem(pattern)])
    for part in schema.values():
        yield from _unreadable(part)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str) and not matches(pattern, instance):
        yield jsonschema.ValidationError(f"does not match {pattern!r}")


_Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern})


def _validator(schema: Any) -> Any:
    return _Validator(schema, registry=referencing.Registry())
