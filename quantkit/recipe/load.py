"""From a recipe file and `--set` options to a checked, resolved recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from quantkit.errors import RecipeError
from quantkit.recipe.schema import SCHEMA_VERSION, Recipe, nearest
from quantkit.resources import resource
from quantkit.userpath import user_path
from quantkit.yaml_source import Loc, YamlSource, parse_yaml, read_yaml

_BUILTIN = "builtin:"
_SHOWN = 120
_INDEX = re.compile(r"[0-9]{1,9}")
_POWER = re.compile(r"[-+]?[0-9]+e[-+]?[0-9]+", re.IGNORECASE)


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe with the file it came from and the `--set` options that were laid over it."""

    recipe: Recipe
    path: Path
    sets: tuple[str, ...]
    source: YamlSource

    @property
    def name(self) -> str:
        """Names the artifact and its run folder."""
        return self.recipe.name or self.path.stem

    @property
    def base(self) -> Path:
        """The folder that the recipe's paths are relative to."""
        return self.path.resolve().parent

    def where(self, *loc: str | int) -> str:
        """`file:line` of a key, for errors found after loading."""
        return self.source.where(loc)

    def file(self, text: str, *loc: str | int) -> Path:
        """The existing file that `text` (`builtin:kind/...` or a path relative to the recipe) names."""
        if text.startswith(_BUILTIN):
            try:
                path = resource(text.removeprefix(_BUILTIN))
            except RecipeError as error:
                raise RecipeError(error.what, where=self.where(*loc), next=error.next) from None
        else:
            path = user_path(text, self.base, where=self.where(*loc))
        if not path.is_file():
            raise RecipeError(f"no file at {path}", where=self.where(*loc))
        return path

    def resolved(self) -> dict[str, Any]:
        """Every field with its value, defaults filled in, and the `--set` options; plain JSON data."""
        return {**self.recipe.model_dump(mode="json"), "name": self.name, "set": list(self.sets)}

    def canonical_json(self) -> str:
        """`resolved()` in one canonical form: sorted keys, no spaces."""
        return json.dumps(self.resolved(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def load_recipe(path: Path, sets: Sequence[str] = ()) -> LoadedRecipe:
    """Read, overlay `--set key.sub=value`, check. RecipeError names file and line (or the `--set` option)."""
    source = read_yaml(path)
    data = {} if source.data is None else source.data
    if not isinstance(data, dict):
        raise RecipeError("a recipe is a mapping of sections", where=source.where(()), next="See `quantkit init`")
    source = YamlSource(data, dict(source.places))
    for option in sets:
        _apply(option, data, source.places)
    _check_version(source)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise _as_recipe_error(error, source) from None
    return LoadedRecipe(recipe, path, tuple(sets), source)


def _check_version(source: YamlSource) -> None:
    version = source.data.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version != SCHEMA_VERSION:
        raise RecipeError(
            f"recipe version {version} is not known to this quantkit",
            where=source.where(("version",)),
            next=f"It reads version {SCHEMA_VERSION}; `quantkit schema` shows it",
        )


def _apply(option: str, data: dict[str, Any], places: dict[Loc, str]) -> None:
    """Lay `a.b.0.c=value` over `data`; the value is read as YAML."""
    where = f"--set {option if len(option) <= _SHOWN else option[: _SHOWN - 3] + '...'}"
    dotted, equals, text = option.partition("=")
    keys: list[str | int] = [int(k) if _INDEX.fullmatch(k) else k for k in dotted.strip().split(".")]
    if not equals or "" in keys:
        raise RecipeError("an option reads key=value, with dots between keys", where=where)
    value = parse_yaml(text, where).data
    target: Any = data
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(key, int):
            if not isinstance(target, list) or key >= len(target):
                raise RecipeError(f"no item {key} at {'.'.join(map(str, keys[:depth]))!r}", where=where)
        elif not isinstance(target, dict):
            raise RecipeError(f"{'.'.join(map(str, keys[:depth]))!r} holds no keys", where=where)
        elif not last and target.get(key) is None:
            target[key] = {}
        places[tuple(keys[: depth + 1])] = places.get(tuple(keys[: depth + 1]), where)
        if last:
            target[key] = value
            places[tuple(keys)] = where
        else:
            target = target[key]


def _as_recipe_error(error: ValidationError, source: YamlSource) -> RecipeError:
    """The problems in the file, a line each, unknown keys before others."""
    problems = []
    for item in error.errors(include_url=False):
        loc = tuple(item["loc"])
        where = source.where(loc)
        line = "" if where.startswith("--set ") else where.rpartition(":")[2]
        typo = item["type"] == "extra_forbidden"  # told first: it explains what is missing elsewhere
        order = (not typo, int(line) if line.isdecimal() else 0)
        problems.append((order, where, _message(dict(item), loc)))
    problems.sort(key=lambda problem: problem[0])
    return RecipeError.of([RecipeError(message, where=where) for _, where, message in problems])


_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "list_type": "a list",
    "model_type": "a section of keys",
    "bool_type": "true or false",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "too_short": "a list of at least {min_length}",
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-', starting with a letter or digit",
}


def _message(item: dict[str, Any], loc: Loc) -> str:
    kind, key, given = str(item["type"]), ".".join(map(str, loc)), item["input"]
    context = item.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key {key!r}; {nearest(str(loc[-1]), _known_keys(loc[:-1]))}"
    if kind == "missing":
        return f"key {key!r} is missing"
    if kind == "value_error":
        return f"{key}: {context['error']}"
    if kind == "literal_error":
        return f"{key} must be {context['expected']}, not {_shown(given)}"
    if kind in _KINDS:
        power = kind == "float_type" and _POWER.fullmatch(str(given))
        hint = " (YAML takes 1e-3 for text: write 1.0e-3)" if power else ""
        return f"{key} must be {_KINDS[kind].format(**context)}, not {_shown(given)}{hint}"
    return f"{key}: {item['msg']}, got {_shown(given)}"


def _shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _known_keys(loc: Loc) -> list[str]:
    """The keys of the section at `loc`."""
    model: type[BaseModel] = Recipe
    for key in loc:
        if isinstance(key, str):
            annotation = model.model_fields[key].annotation
            inner = get_args(annotation)[0] if get_origin(annotation) is list else annotation
            assert isinstance(inner, type)
            model = inner
    return list(model.model_fields)
