"""YAML as plain data that remembers the line of every key and item, so that an error can point at it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quantkit.errors import RecipeError

Loc = tuple[str | int, ...]

_MOST_BYTES = 1 << 20
_MOST_DEPTH = 32


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


def read_yaml(path: Path, kind: str = "recipe", make: str = "quantkit init") -> YamlSource:
    """Parse one YAML (or JSON) file of mappings, lists and scalars; messages call it a `kind`, written by `make`.

    Raises RecipeError (`file:line`) on a file that cannot be read, on YAML that does not parse, on duplicate keys,
    keys that are not words, anchors and aliases, nesting beyond 32 levels, more than 1 MiB.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise RecipeError(f"no such {kind}", where=str(path), next=f"`{make}` writes one") from None
    except IsADirectoryError:
        raise RecipeError(f"is a folder, not a {kind} file", where=str(path)) from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"not UTF-8 text (byte {error.start})", where=str(path)) from None
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if len(content) > _MOST_BYTES:
        raise RecipeError(f"is no {kind}: it has more than {_MOST_BYTES >> 20} MiB", where=str(path))
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> YamlSource:
    """`read_yaml` for text that is already in hand; `name` stands for the file in messages."""
    try:
        _refuse_tricks(text, name)
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


def _refuse_tricks(text: str, name: str) -> None:
    """RecipeError at the first anchor, alias or level too deep, before anything is built of the text."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if getattr(event, "anchor", None) is not None:
            raise RecipeError("anchors and aliases are not read here", where=f"{name}:{line}")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_DEPTH:
            raise RecipeError(f"nested deeper than {_MOST_DEPTH} levels", where=f"{name}:{line}")


def _plain(node: yaml.Node, loc: Loc, loader: yaml.SafeLoader, name: str, places: dict[Loc, str]) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, loc, loader, name, places)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for i, item in enumerate(node.value):
            places[(*loc, i)] = f"{name}:{item.start_mark.line + 1}"
            items.append(_plain(item, (*loc, i), loader, name, places))
        return items
    return _scalar(node, loader, name)


def _scalar(node: yaml.Node, loader: yaml.SafeLoader, name: str) -> Any:
    try:
        return loader.construct_object(node)
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError):  # what PyYAML's constructors let out
        kind = str(node.tag).rpartition(":")[2]
        where = f"{name}:{node.start_mark.line + 1}"
        raise RecipeError(f"{str(node.value)[:40]!r} cannot be read as {kind}", where=where) from None


def _mapping(
    node: yaml.MappingNode, loc: Loc, loader: yaml.SafeLoader, name: str, places: dict[Loc, str]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"{name}:{key_node.start_mark.line + 1}"
        key = _scalar(key_node, loader, name) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise RecipeError("a key must be a plain word", where=where)
        if key in result:
            first = places[(*loc, key)].rpartition(":")[2]
            raise RecipeError(f"duplicate key {key!r}, first given in line {first}", where=where)
        places[(*loc, key)] = where
        result[key] = _plain(value_node, (*loc, key), loader, name, places)
    return result
