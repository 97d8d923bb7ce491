"""The calibration set: candidates scrubbed, rendered once, stripped of near duplicates, chosen like the traffic,
counted, fingerprinted."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from quantkit.calibration.coverage import cover
from quantkit.calibration.near import NearDuplicates
from quantkit.calibration.pii import scrub
from quantkit.calibration.pool import Pool, Row, fill_pool
from quantkit.calibration.samples import CalibrationSet, Sample
from quantkit.calibration.sampling import CellKey, Lengths, choose, largest_remainder, quotas
from quantkit.errors import RecipeError, RequestError
from quantkit.profile.model import Profile

MOST_TRUNCATED = 0.01
"""Share of tokens that may be cut off before the build stops."""
_SPARE = 4
"""Candidates per sample wanted: room for duplicates, refusals, and a choice of lengths."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Text(Protocol):
    """What this module asks of `runtime.text.ChatText`."""

    folder: Path

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered."""
        ...

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of plain text."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, BOS once."""
        ...


@dataclass(frozen=True)
class _Candidate:
    """A row as it would be used, with what was replaced in it."""

    sample: Sample
    row: Row
    pii: Counter[str]


def load_samples(
    paths: Sequence[Path],
    text: Text,
    *,
    max_samples: int,
    max_tokens: int,
    seed: int,
    profile: Profile | None = None,
    scrub_pii: bool = True,
    max_position: int | None = None,
) -> CalibrationSet:
    """At most `max_samples` conversations from JSONL, Parquet or CSV files, by category × language × length.

    A row has `messages` (rendered with the chat template, which writes BOS itself; joined where there is none) or
    `text` (encoded as a bare prompt), and optionally `id`, `category` and `language` (guessed by script when absent).
    With a `profile` the sample follows its shares and lengths; without, it is spread evenly over category × language.
    Personal data is replaced before anything is compared or tokenized, unless `scrub_pii` is off. Rows that repeat
    another, or nearly do, and conversations that the template refuses are dropped and counted. Samples are cut at
    `max_tokens`, and at the model's `max_position` where that is lower.

    Memory holds the candidates (per cell a few times `max_samples`), not the files.

    Raises RecipeError for a file that cannot be read or a row without conversation (file and row), for no sample at
    all, and when more than 1 % of the chosen samples' tokens were cut off.
    """
    pool = fill_pool(paths, profile, per_cell=_SPARE * max_samples + 64, seed=seed)
    for rows in (_likely(pool, max_samples, profile), pool.rows):
        candidates, near, refused = _candidates(rows, text, scrub_pii)
        chosen = _chosen(candidates, max_samples, profile)
        if len(chosen) == max_samples or len(rows) == len(pool.rows):
            break
    if not chosen:
        raise RecipeError(
            f"no calibration sample is left of {pool.loaded} rows "
            f"({refused} refused by the chat template, {pool.outside} outside the profile)",
            where=", ".join(map(str, paths)),
            next="Give conversations this model's chat template accepts, of the profile's categories and languages",
        )
    limit = min(max_tokens, max_position or max_tokens)
    cut = [_cut(c.sample, limit) for c in chosen]
    lost = _require_whole([len(c.sample.ids) for c in chosen], limit, max_tokens)
    found = cover(
        cut,
        [c.row.cell for c in chosen],
        pool,
        profile,
        near_duplicates=near,
        refused=refused,
        truncated=lost,
        pii=sum((c.pii for c in chosen), Counter()),
        fair={} if profile is None else _fair(profile, max_samples),
    )
    return CalibrationSet(tuple(cut), _fingerprint(cut, text.folder, seed), dict(found))


def _likely(pool: Pool, count: int, profile: Profile | None) -> Sequence[Row]:
    """Rows enough for `count` samples unless most repeat each other: tokenizing the whole pool takes a while."""
    wanted = quotas(pool.cells, count, profile)
    first = sorted(pool.rows, key=lambda row: row.rank)
    taken: Counter[CellKey] = Counter()
    likely = []
    for row in first:
        taken[row.cell] += 1
        if taken[row.cell] <= _SPARE * wanted[row.cell] + 16:
            likely.append(row)
    return sorted(likely, key=lambda row: row.number)


def _candidates(rows: Sequence[Row], text: Text, scrub_pii: bool) -> tuple[list[_Candidate], int, int]:
    """What can be used of the rows, in file order; how many nearly repeat another, how many were refused."""
    seen, near, refused = NearDuplicates(), 0, 0
    found: list[_Candidate] = []
    for row in rows:
        counts: Counter[str] = Counter()
        clean = _scrubbed(row, counts) if scrub_pii else row
        sample = _sample(clean, text)
        if sample is None:
            refused += 1
        elif seen.first_like(_said(clean)) is not None:
            near += 1
        else:
            found.append(_Candidate(sample, row, counts))
    return found, near, refused


def _chosen(candidates: Sequence[_Candidate], count: int, profile: Profile | None) -> list[_Candidate]:
    """In file order."""
    cells: dict[CellKey, list[_Candidate]] = {}
    for candidate in sorted(candidates, key=lambda c: c.row.rank):
        cells.setdefault(candidate.row.cell, []).append(candidate)
    given = quotas({key: len(found) for key, found in sorted(cells.items())}, count, profile)
    chosen: list[_Candidate] = []
    for key, number in given.items():
        found = cells.get(key, [])
        lengths = [_lengths(candidate.sample) for candidate in found]
        chosen += [found[i] for i in choose(lengths, number, profile.cell(*key) if profile else None)]
    return sorted(chosen, key=lambda c: c.row.number)


def _cut(sample: Sample, limit: int) -> Sample:
    prompt = None if sample.prompt_tokens is None else min(sample.prompt_tokens, limit)
    return replace(sample, ids=sample.ids[:limit], prompt_tokens=prompt)


def _fair(profile: Profile, count: int) -> dict[CellKey, int]:
    return largest_remainder({cell.key: cell.share for cell in profile.cells if cell.share > 0}, count)


def _require_whole(sizes: Sequence[int], limit: int, max_tokens: int) -> int:
    """Tokens beyond `limit`; RecipeError when they are more than 1 %."""
    before, lost = sum(sizes), sum(max(0, size - limit) for size in sizes)
    if lost <= MOST_TRUNCATED * before:
        return lost
    share = f"{lost} of {before} calibration tokens ({lost / before:.1%}) lie beyond"
    if limit < max_tokens:
        raise RecipeError(
            f"{share} the model's own limit of {limit} positions; the longest sample has {max(sizes)} tokens",
            where="calibration.data",
            next=f"Give conversations of at most {limit} tokens: this model can be given no longer ones",
        )
    raise RecipeError(
        f"{share} max_tokens {max_tokens}",
        where="calibration",
        next=f"Raise calibration.max_tokens (the longest sample has {max(sizes)}) or shorten the data",
    )


def _scrubbed(row: Row, counts: Counter[str]) -> Row:
    """The row without personal data; `counts` grows by what was replaced."""

    def clean(content: Any) -> Any:
        if not isinstance(content, str):
            return content
        made = scrub(content)
        counts.update(made.counts)
        return made.text

    if row.messages is None:
        return replace(row, text=clean(row.text))
    turns = [
        {**message, "content": clean(message.get("content"))} if isinstance(message, Mapping) else message
        for message in row.messages
    ]
    return replace(row, messages=turns)


def _said(row: Row) -> str:
    """What the row would be recognised by: instructions to the model are shared by many conversations."""
    if row.messages is None:
        return row.text
    turns = [m for m in row.messages if isinstance(m, Mapping) and isinstance(m.get("content"), str)]
    return "\n".join(str(m["content"]) for m in turns if m.get("role") != "system")


def _sample(row: Row, text: Text) -> Sample | None:
    """The row tokenized, or None when the chat template refuses it or nothing is in it."""
    prompt: int | None = None
    try:
        if row.messages is None:
            ids = text.encode(row.text, add_special_tokens=True)
        else:
            ids = _encode(row.messages, text)
            prompt = _prompt_tokens(row.messages, text, len(ids))
    except RequestError:
        return None
    return Sample(tuple(ids), row.language, row.category, row.name, prompt) if ids else None


def _encode(messages: Sequence[Mapping[str, Any]], text: Text) -> list[int]:
    """Through the chat template; as plain text where the model has none."""
    if text.has_template:
        return text.encode_chat(messages, add_generation_prompt=False)
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return text.encode("\n\n".join(c for c in contents if isinstance(c, str)), add_special_tokens=True)


def _prompt_tokens(messages: Sequence[Mapping[str, Any]], text: Text, total: int) -> int | None:
    """Tokens up to where the last answer begins; None when the assistant does not speak last."""
    last = messages[-1]
    if len(messages) < 2 or not isinstance(last, Mapping) or last.get("role") != "assistant":
        return None
    if not text.has_template:
        return min(total, len(_encode(messages[:-1], text)))
    return min(total, len(text.encode_chat(messages[:-1], add_generation_prompt=True)))


def _lengths(sample: Sample) -> Lengths:
    if sample.prompt_tokens is None:
        return Lengths(len(sample.ids), None)
    return Lengths(sample.prompt_tokens, len(sample.ids) - sample.prompt_tokens)


def _fingerprint(samples: Sequence[Sample], folder: Path, seed: int) -> str:
    """`sha256:<hex>` over the ordered token ids, the tokenizer's and template's bytes, and the seed."""
    digest = hashlib.sha256(json.dumps([list(sample.ids) for sample in samples]).encode())
    for name in _TOKENIZER_FILES:
        path = folder / name
        digest.update(f"\n{name}\n".encode() + (hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""))
    digest.update(f"\nseed {seed}\n".encode())
    return f"sha256:{digest.hexdigest()}"
