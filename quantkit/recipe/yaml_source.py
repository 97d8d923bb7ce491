"""YAML as plain data that remembers the line of every key and item, so that an error can point at it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quantkit.errors import RecipeError

Loc = tuple[str | int, ...]


@dataclass(frozen=True)
class YamlSource:
    """Plain data and where it was written. `places[loc]` reads `file:line` for the key or list item at `loc`."""

    data: Any
    places: dict[Loc, str]

    def where(self, loc: Loc) -> str:
        """`file:line` of `loc`, or of the nearest enclosing key that was written."""
        while loc not in self.places and loc:
            loc = loc[:-1]
        return self.places.get(loc, "")


def read_yaml(path: Path) -> YamlSource:
    """Parse one YAML file of mappings, lists and scalars.

    Raises RecipeError (`file:line`) on a file that cannot be read, on YAML that does not parse, on duplicate keys,
    keys that are not words, anchors and aliases.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError("no such recipe", where=str(path), next="`quantkit init` writes one") from None
    except IsADirectoryError:
        raise RecipeError("is a folder, not a recipe file", where=str(path)) from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"not UTF-8 text (byte {error.start})", where=str(path)) from None
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(path)) from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> YamlSource:
    """`read_yaml` for text that is already in hand; `name` stands for the file in messages."""
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise RecipeError("anchors and aliases are not part of a recipe", where=f"{name}:{_line(event)}")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        places: dict[Loc, str] = {(): f"{name}:1"}
        data = None if root is None else _plain(root, (), loader, name, places)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise RecipeError(f"not valid YAML: {error.problem or error.context}", where=where) from None
    except yaml.YAMLError as error:
        raise RecipeError(f"not valid YAML: {' '.join(str(error).split())}", where=name) from None
    return YamlSource(data, places)


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def _plain(node: yaml.Node, loc: Loc, loader: yaml.SafeLoader, name: str, places: dict[Loc, str]) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, loc, loader, name, places)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for i, item in enumerate(node.value):
            places[(*loc, i)] = f"{name}:{item.start_mark.line + 1}"
            items.append(_plain(item, (*loc, i), loader, name, places))
        return items
    return loader.construct_object(node)


def _mapping(
    node: yaml.MappingNode, loc: Loc, loader: yaml.SafeLoader, name: str, places: dict[Loc, str]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"{name}:{key_node.start_mark.line + 1}"
        key = loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise RecipeError("a key must be a plain word", where=where)
        if key in result:
            first = places[(*loc, key)].rpartition(":")[2]
            raise RecipeError(f"duplicate key {key!r}, first given in line {first}", where=where)
        places[(*loc, key)] = where
        result[key] = _plain(value_node, (*loc, key), loader, name, places)
    return result
