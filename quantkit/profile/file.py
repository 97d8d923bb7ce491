"""Profiles as files: YAML or JSON, checked with the line of what is wrong.

version: 1
categories: {support: 0.7, sql: 0.3}        # every category occurs in every language alike, or:
languages: {en: 0.6, zh: 0.4}
prompt_tokens: {up_to: [64, 256, 1024], share: [0.2, 0.5, 0.3]}
output_tokens: {up_to: [64, 512], share: [0.5, 0.5]}
cells:                                      # each pair with its own share and lengths
  - {category: support, language: en, share: 0.5, prompt_tokens: {...}, output_tokens: {...}}
concurrency: {mean: 3.5, peak: 12}          # optional, as are requests and tokenizer
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from quantkit.errors import RecipeError
from quantkit.numeric import is_number
from quantkit.profile.model import Cell, Concurrency, Histogram, Profile
from quantkit.yaml_source import Loc, YamlSource, read_yaml

VERSION = 1
_OFF_BY = 0.02
"""How far stated shares may be from summing to 1; they are scaled to do so."""
_MOST_CELLS = 1000
_MOST_TOKENS = 1 << 24
_KEYS = (
    "version",
    "requests",
    "tokenizer",
    "categories",
    "languages",
    "prompt_tokens",
    "output_tokens",
    "cells",
    "concurrency",
)


def read_profile(path: Path) -> Profile:
    """The profile in a YAML or JSON file; RecipeError (`file:line`) for one that cannot be read or makes no sense."""
    return _Reader(read_yaml(path, "traffic profile", "quantkit profile")).profile()


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile: JSON when `path` ends so, else YAML. RecipeError when the file cannot be written."""
    data = profile_data(profile)
    if path.suffix.lower() == ".json":
        text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    else:
        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"cannot be written: {error.strerror}", where=str(path)) from None


def profile_data(profile: Profile) -> dict[str, Any]:
    """The profile as the plain data its file holds; shares rounded to a millionth."""
    data: dict[str, Any] = {"version": VERSION}
    if profile.requests is not None:
        data["requests"] = profile.requests
    if profile.tokenizer is not None:
        data["tokenizer"] = profile.tokenizer
    data["cells"] = [_cell_data(cell) for cell in profile.cells]
    if profile.concurrency is not None:
        data["concurrency"] = {"mean": profile.concurrency.mean, "peak": profile.concurrency.peak}
    return data


def _cell_data(cell: Cell) -> dict[str, Any]:
    data: dict[str, Any] = {"category": cell.category, "language": cell.language, "share": round(cell.share, 6)}
    for name, histogram in (("prompt_tokens", cell.prompt_tokens), ("output_tokens", cell.output_tokens)):
        if histogram is not None:
            data[name] = {"up_to": list(histogram.up_to), "share": [round(share, 6) for share in histogram.share]}
    return data


class _Reader:
    """Checks the data of one file; every message names the line."""

    def __init__(self, source: YamlSource) -> None:
        self._source = source

    def profile(self) -> Profile:
        data = self._mapping(self._source.data, (), _KEYS)
        if data.get("version") != VERSION:
            raise self._wrong(("version",), f"version must be {VERSION}, not {data.get('version')!r}")
        shared = {name: self._histogram(data[name], (name,)) for name in _KEYS[5:7] if data.get(name) is not None}
        if data.get("cells") is not None:
            cells = self._cells(data["cells"], shared)
            if data.get("categories") is not None or data.get("languages") is not None:
                raise self._wrong(("cells",), "cells state every share: leave categories and languages out")
        else:
            shares = {name: self._shares(data.get(name), (name,)) for name in ("categories", "languages")}
            cells = [
                Cell(category, language, a * b, shared.get("prompt_tokens"), shared.get("output_tokens"))
                for category, a in shares["categories"].items()
                for language, b in shares["languages"].items()
            ]
        return Profile(
            tuple(sorted(cells, key=lambda cell: cell.key)),
            None if data.get("concurrency") is None else self._concurrency(data["concurrency"]),
            None if data.get("requests") is None else self._count(data["requests"], ("requests",)),
            None if data.get("tokenizer") is None else self._text(data["tokenizer"], ("tokenizer",)),
        )

    def _cells(self, value: Any, shared: Mapping[str, Histogram]) -> list[Cell]:
        rows = self._list(value, ("cells",))
        if not 1 <= len(rows) <= _MOST_CELLS:
            raise self._wrong(("cells",), f"cells must be 1 to {_MOST_CELLS} entries, not {len(rows)}")
        found: dict[tuple[str, str], Cell] = {}
        for index, entry in enumerate(rows):
            loc: Loc = ("cells", index)
            row = self._mapping(entry, loc, ("category", "language", "share", "prompt_tokens", "output_tokens"))
            lengths = {
                name: shared.get(name) if row.get(name) is None else self._histogram(row[name], (*loc, name))
                for name in ("prompt_tokens", "output_tokens")
            }
            cell = Cell(
                self._text(row.get("category"), (*loc, "category")),
                self._text(row.get("language"), (*loc, "language")),
                self._share(row.get("share"), (*loc, "share")),
                lengths["prompt_tokens"],
                lengths["output_tokens"],
            )
            if cell.key in found:
                raise self._wrong(loc, f"{cell.category} in {cell.language} is listed twice")
            found[cell.key] = cell
        scaled = self._to_one([cell.share for cell in found.values()], ("cells",))
        return [
            Cell(cell.category, cell.language, share, cell.prompt_tokens, cell.output_tokens)
            for cell, share in zip(found.values(), scaled, strict=True)
        ]

    def _histogram(self, value: Any, loc: Loc) -> Histogram:
        data = self._mapping(value, loc, ("up_to", "share"))
        edges = [self._count(edge, (*loc, "up_to", i)) for i, edge in enumerate(self._list(data.get("up_to"), loc))]
        parts = [self._share(part, (*loc, "share", i)) for i, part in enumerate(self._list(data.get("share"), loc))]
        if not edges or len(edges) != len(parts):
            raise self._wrong(loc, f"{len(edges)} bins in up_to, {len(parts)} in share: one share a bin is needed")
        if any(low >= high for low, high in itertools.pairwise(edges)):
            raise self._wrong((*loc, "up_to"), "the bins' upper edges must ascend")
        return Histogram(tuple(edges), tuple(self._to_one(parts, (*loc, "share"))))

    def _shares(self, value: Any, loc: Loc) -> dict[str, float]:
        if value is None:
            raise self._wrong((), f"{loc[0]} is missing", "State categories and languages, or cells")
        data = self._mapping(value, loc)
        scaled = self._to_one([self._share(share, (*loc, name)) for name, share in data.items()], loc)
        return dict(zip(data, scaled, strict=True))

    def _concurrency(self, value: Any) -> Concurrency:
        loc: Loc = ("concurrency",)
        data = self._mapping(value, loc, ("mean", "peak"))
        mean, peak = data.get("mean"), self._count(data.get("peak"), (*loc, "peak"))
        if not is_number(mean) or not 0 < (average := float(mean)) <= peak:
            raise self._wrong((*loc, "mean"), f"mean must be a number above 0, at most the peak, not {_shown(mean)}")
        return Concurrency(average, peak)

    def _to_one(self, shares: Sequence[float], loc: Loc) -> list[float]:
        total = math.fsum(shares)
        if abs(total - 1) > _OFF_BY:
            raise self._wrong(loc, f"the shares sum to {total:.3f}, not 1")
        return [share / total for share in shares]

    def _share(self, value: Any, loc: Loc) -> float:
        if not is_number(value) or not 0 <= value <= 1:
            raise self._wrong(loc, f"a share is a number from 0 to 1, not {_shown(value)}")
        return float(value)

    def _count(self, value: Any, loc: Loc) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_TOKENS:
            raise self._wrong(loc, f"must be a whole number from 1 to {_MOST_TOKENS}, not {_shown(value)}")
        return value

    def _text(self, value: Any, loc: Loc) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= 200:
            raise self._wrong(loc, f"{loc[-1]} must be 1 to 200 characters of text, not {_shown(value)}")
        return value

    def _list(self, value: Any, loc: Loc) -> list[Any]:
        if not isinstance(value, list):
            raise self._wrong(loc, f"a list is needed, not {_shown(value)}")
        return value

    def _mapping(self, value: Any, loc: Loc, known: Sequence[str] | None = None) -> dict[str, Any]:
        if not isinstance(value, dict) or not value:
            raise self._wrong(loc, f"a mapping of keys is needed, not {_shown(value)}")
        for key in value:
            if known is not None and key not in known:
                raise self._wrong((*loc, key), f"unknown key {key!r}; known here: {', '.join(known)}")
        return value

    def _wrong(self, loc: Loc, what: str, next: str = "") -> RecipeError:
        return RecipeError(what, where=self._source.where(loc), next=next)


def _shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
