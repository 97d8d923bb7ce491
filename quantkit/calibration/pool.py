"""Candidates out of data files of any size: per cell the few rows that a seeded hash puts first, and no more.

Keeping the rows of least hash (bottom-k sampling; Cohen and Kaplan, "Summarizing data using bottom-k sketches", 2007)
is a uniform sample without replacement in one pass. Equal rows have equal hashes, so a duplicate never takes a place.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.calibration.rows import read_rows
from quantkit.calibration.sampling import CellKey, cell_for
from quantkit.errors import RecipeError
from quantkit.profile.language import language_of
from quantkit.profile.model import Profile, label

_MOST_CELLS = 1000
UNLABELLED = "unknown"
"""Category of a row that states none."""


@dataclass(frozen=True)
class Row:
    """One row of a data file: a conversation, or plain `text`. `number`: over all files; `rank`: its seeded hash."""

    messages: Sequence[Mapping[str, Any]] | None
    text: str
    category: str
    language: str
    name: str
    cell: CellKey
    number: int
    rank: int


@dataclass(frozen=True)
class Pool:
    """The rows kept, in file order. `loaded`: rows read; `duplicates`: of those, equal to one kept at that time;
    `outside`: of a category and language that the profile does not have; `cells`: of each one that it has."""

    rows: tuple[Row, ...]
    cells: Mapping[CellKey, int]
    loaded: int
    duplicates: int
    outside: int


def fill_pool(paths: Sequence[Path], profile: Profile | None, *, per_cell: int, seed: int) -> Pool:
    """Read every row of `paths`; keep at most `per_cell` of each cell (0: only count).

    RecipeError for a file that cannot be read, a row without conversation (file and row), and for more than a thousand
    cells.
    """
    cells: dict[CellKey, list[tuple[int, int, Row]]] = {}
    counts: dict[CellKey, int] = {}
    kept: set[int] = set()
    loaded = duplicates = outside = 0
    for path in paths:
        for number, data in enumerate(read_rows(path), start=1):
            loaded += 1
            row = _row(data, path, number, loaded, profile, seed)
            if row is None:
                outside += 1
            elif row.rank in kept:
                duplicates += 1
            else:
                heap = cells.setdefault(row.cell, [])
                counts[row.cell] = counts.get(row.cell, 0) + 1
                if len(cells) > _MOST_CELLS:
                    raise RecipeError(
                        f"more than {_MOST_CELLS} pairs of category and language",
                        where=f"{path} row {number}",
                        next="`category` names a kind of conversation, not each one: leave it out or map it to a few",
                    )
                kept.add(row.rank)
                heapq.heappush(heap, (-row.rank, -row.number, row))
                if len(heap) > per_cell:
                    kept.discard(heapq.heappop(heap)[2].rank)
    rows = sorted((entry[2] for heap in cells.values() for entry in heap), key=lambda row: row.number)
    return Pool(tuple(rows), counts, loaded, duplicates, outside)


def _row(
    data: Mapping[str, Any], path: Path, number: int, loaded: int, profile: Profile | None, seed: int
) -> Row | None:
    messages, text = data.get("messages"), data.get("text")
    if isinstance(messages, Sequence) and not isinstance(messages, str) and messages:
        text = ""
    elif isinstance(text, str):
        messages = None
    else:
        raise RecipeError(
            "the row has neither `messages` nor `text`",
            where=f"{path} row {number}",
            next='Write {"messages": [{"role": "user", "content": "..."}, ...]}',
        )
    category = label(data.get("category") or UNLABELLED)
    language = label(data.get("language") or language_of(last_user_text(messages) if messages else text))
    cell = cell_for(profile, category, language)
    if cell is None:
        return None
    content = json.dumps([messages, text], sort_keys=True, default=str)
    digest = hashlib.blake2b(content.encode(), digest_size=16, key=f"seed {seed}".encode()).digest()
    name = label(data.get("id") or f"{path.name}:{number}")
    return Row(messages, text, category, language, name, cell, loaded, int.from_bytes(digest, "big"))


def last_user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """What the user said last, else what anyone said first."""
    said = [
        (m.get("role"), m["content"]) for m in messages if isinstance(m, Mapping) and isinstance(m.get("content"), str)
    ]
    users = [content for role, content in said if role == "user"]
    return users[-1] if users else said[0][1] if said else ""
