"""Calibration conversations: read, rendered once, deduplicated, sampled evenly, counted, fingerprinted."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from quantkit.calibration.coverage import cover
from quantkit.calibration.rows import read_rows
from quantkit.calibration.samples import CalibrationSet, Sample
from quantkit.errors import RecipeError, RequestError

MOST_TRUNCATED = 0.01
"""Share of tokens that may be cut off before the build stops."""

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


def load_samples(
    paths: Sequence[Path],
    text: Text,
    *,
    max_samples: int,
    max_tokens: int,
    seed: int,
    allow_truncation: bool = False,
) -> CalibrationSet:
    """At most `max_samples` conversations from JSONL, Parquet or CSV files, spread evenly over category × language.

    A row has `messages` (rendered with the chat template, which writes BOS itself; joined where there is none) or
    `text` (encoded as a bare prompt), and optionally `id`, `category` and `language`. Exact duplicates (the same
    tokens) are dropped; conversations that the template refuses are dropped and counted. Samples are cut at
    `max_tokens`.

    Raises RecipeError for a file that cannot be read or a row without conversation (file and row), for no sample at
    all, and when more than 1 % of the chosen samples' tokens were cut off, unless `allow_truncation`.
    """
    loaded = refused = duplicates = 0
    seen: set[tuple[int, ...]] = set()
    candidates: list[Sample] = []
    for path in paths:
        for number, row in enumerate(read_rows(path), start=1):
            loaded += 1
            sample = _sample(row, text, f"{path.name}:{number}", path)
            if sample is None:
                refused += 1
            elif sample.ids in seen:
                duplicates += 1
            else:
                seen.add(sample.ids)
                candidates.append(sample)
    chosen = _spread(candidates, max_samples, seed)
    if not chosen:
        raise RecipeError(
            f"no calibration sample is left of {loaded} rows ({refused} refused by the chat template)",
            where=", ".join(map(str, paths)),
            next="Give conversations this model's chat template accepts",
        )
    before = sum(len(sample.ids) for sample in chosen)
    cut = [Sample(s.ids[:max_tokens], s.language, s.category, s.name) for s in chosen]
    lost = before - sum(len(sample.ids) for sample in cut)
    if lost > MOST_TRUNCATED * before and not allow_truncation:
        longest = max(len(sample.ids) for sample in chosen)
        raise RecipeError(
            f"{lost} of {before} calibration tokens ({lost / before:.1%}) lie beyond max_tokens {max_tokens}",
            where="calibration",
            next=f"Raise calibration.max_tokens (the longest sample has {longest}) or shorten the data",
        )
    found = cover(cut, loaded=loaded, duplicates=duplicates, refused=refused, truncated=lost)
    return CalibrationSet(tuple(cut), _fingerprint(cut, text.folder, seed), found)


def _sample(row: Mapping[str, Any], text: Text, place: str, path: Path) -> Sample | None:
    """The row tokenized, or None when the chat template refuses it or nothing is in it."""
    messages, plain = row.get("messages"), row.get("text")
    if isinstance(messages, Sequence) and not isinstance(messages, str) and messages:
        try:
            ids = _encode(messages, text)
        except RequestError:
            return None
    elif isinstance(plain, str):
        ids = text.encode(plain, add_special_tokens=True)
    else:
        raise RecipeError(
            "the row has neither `messages` nor `text`",
            where=f"{path} row {place.rpartition(':')[2]}",
            next='Write {"messages": [{"role": "user", "content": "..."}, ...]}',
        )
    if not ids:
        return None
    return Sample(
        tuple(ids),
        str(row.get("language") or "unknown"),
        str(row.get("category") or "unknown"),
        str(row.get("id") or place),
    )


def _encode(messages: Sequence[Mapping[str, Any]], text: Text) -> list[int]:
    """Through the chat template; as plain text where the model has none."""
    if text.has_template:
        return text.encode_chat(messages, add_generation_prompt=False)
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return text.encode("\n\n".join(c for c in contents if isinstance(c, str)), add_special_tokens=True)


def _spread(candidates: Sequence[Sample], count: int, seed: int) -> list[Sample]:
    """`count` samples, taken in turn from each (category, language), shuffled within; in their original order."""
    strata: dict[tuple[str, str], list[int]] = {}
    for index, sample in enumerate(candidates):
        strata.setdefault((sample.category, sample.language), []).append(index)
    source = random.Random(seed)
    queues = [strata[key] for key in sorted(strata)]
    for queue in queues:
        source.shuffle(queue)
    picked: list[int] = []
    while len(picked) < min(count, len(candidates)):
        for queue in queues:
            if queue and len(picked) < count:
                picked.append(queue.pop())
    return [candidates[index] for index in sorted(picked)]


def _fingerprint(samples: Sequence[Sample], folder: Path, seed: int) -> str:
    """`sha256:<hex>` over the ordered token ids, the tokenizer's and template's bytes, and the seed."""
    digest = hashlib.sha256(json.dumps([list(sample.ids) for sample in samples]).encode())
    for name in _TOKENIZER_FILES:
        path = folder / name
        digest.update(f"\n{name}\n".encode() + (hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""))
    digest.update(f"\nseed {seed}\n".encode())
    return f"sha256:{digest.hexdigest()}"
