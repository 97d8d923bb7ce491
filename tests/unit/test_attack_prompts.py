"""Prompt files and held-out text that are hostile or careless, answers that no check expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import RecipeError
from quantkit.gate.checks import parse_check
from quantkit.gate.data import read_conversations
from quantkit.gate.prompts import read_prompts

LARGE = "1" + "0" * 400


def prompt(check: str = '{"kind": "json"}', text: str = "Hello?", name: str = "a") -> str:
    turns = f'[{{"role": "user", "content": "{text}"}}]'
    return f'{{"id": "{name}", "category": "c", "language": "en", "messages": {turns}, "checks": [{check}]}}\n'


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ('{"kind": "number", "value": 1e999}', "1e999 is not JSON"),
        ('{"kind": "number", "value": NaN}', "NaN is not JSON"),
        (f'{{"kind": "number", "value": {LARGE}}}', "is not JSON"),
        ('{"kind": "number", "value": 1, "tolerance": -1}', "'tolerance' cannot be '-1'"),
        ('{"kind": "regex", "pattern": "%s"}' % ("(" * 3000 + ")" * 3000), "nested too deeply"),
        ('{"kind": "json", "schema": %s}' % ('{"not":' * 400 + "{}" + "}" * 400), "nested too deeply"),
        ('{"kind": "json", "schema": {"$ref": "file:///etc/passwd"}}', "nothing is fetched"),
        ('{"kind": "json", "schema": {"patternProperties": {"^(a|a)*$": {}}}}', "patternProperties"),
        ('{"kind": "contains_all", "values": ["\\ud83d"]}', "surrogates not allowed"),
    ],
    ids=lambda value: value[:60],
)
def test_a_check_that_could_not_decide_is_refused_with_its_line(tmp_path: Path, check: str, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(prompt(name="good") + prompt(check))
    with pytest.raises(RecipeError, match=said) as caught:
        read_prompts([path])
    assert f"{path}:2" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"kind": "json_equals", "values": {"/a": 1.5}}, f'{{"a": {LARGE}}}'),
        ({"kind": "json_equals", "values": {"/a": 1.5}}, '{"a": 1e999}'),
        ({"kind": "json", "schema": {"properties": {"a": {"multipleOf": 0.5}}}}, '{"a": 1e999}'),
        ({"kind": "json", "schema": {"items": {"$ref": "#"}}}, "[" * 900 + "]" * 900),
    ],
    ids=["whole", "infinite", "multiple", "deep"],
)
def test_a_value_that_nothing_can_hold_is_a_wrong_answer(row: dict[str, Any], answer: str) -> None:
    assert not parse_check(row, "here").passes(answer)


def test_values_nested_as_deep_as_can_be_read_are_compared_or_wrong() -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    check = parse_check({"kind": "json_equals", "values": {"": deep}}, "here")
    assert not check.passes("[" * 900 + "2" + "]" * 900)


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "json", "schema": {"type": "string", "pattern": r"^(\w|\w\w)+$"}},
        {"kind": "json", "schema": {"propertyNames": {"pattern": r"^(\w|\w\w)+$"}}},
    ],
    ids=["value", "name"],
)
def test_a_schema_s_pattern_that_never_ends_is_the_authors_mistake(row: dict[str, Any]) -> None:
    long = "a" * 200 + "!"
    with pytest.raises(RecipeError, match="takes longer than 1 s"):
        parse_check(row, "here").passes(f'"{long}"' if "type" in row["schema"] else f'{{"{long}": 1}}')


@pytest.mark.parametrize("key", ["id", "text"])
def test_held_out_text_with_half_a_character_is_refused_before_anything_is_built(tmp_path: Path, key: str) -> None:
    good, bad = ({"id": "a"}, {"id": "b", key: "\\ud83d"})
    rows = [
        f'{{"id": "{r["id"]}", "category": "c", "language": "en", "text": "{r.get("text", "x")}"}}' for r in (good, bad)
    ]
    path = tmp_path / "held.jsonl"
    path.write_text("\n".join(rows))
    with pytest.raises(RecipeError, match=r"held\.jsonl:2: holds half of a surrogate pair"):
        read_conversations([path])
