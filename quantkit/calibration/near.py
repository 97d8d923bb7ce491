"""Near duplicates: MinHash finds likely pairs, the Jaccard index of their shingles decides.

Broder, "On the resemblance and containment of documents" (1997); banding as in Leskovec, Rajaraman and Ullman, "Mining
of Massive Datasets", section 3.4. Nothing random: the same texts in the same order give the same answer everywhere.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata

import numpy as np
from numpy.typing import NDArray

SIMILAR = 0.8
"""Jaccard index from which two texts count as one."""
_SHINGLE = 3
"""Units of a shingle: words, or single characters of scripts written without spaces."""
_BANDS, _ROWS = 32, 4
"""A pair of Jaccard index 0.8 shares none of the 32 bands of 4 with probability (1 - 0.8^4)^32 = 5e-8."""
_UNIT = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]|[^\W_]+?(?=[\u3040-\u9fff]|[\W_]|$)"
)


def shingles(text: str) -> NDArray[np.uint64]:
    """64-bit hashes of the text's runs of 3 words (or Chinese and Japanese characters), sorted, each once.

    Case, punctuation, white space and compatibility forms of Unicode make no difference. A text of fewer units is one
    shingle; an empty one has none.
    """
    units = _UNIT.findall(unicodedata.normalize("NFKC", text).casefold())
    runs = {" ".join(units[i : i + _SHINGLE]) for i in range(max(1, len(units) - _SHINGLE + 1))} if units else set()
    hashes = [int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "little") for run in runs]
    return np.unique(np.array(hashes, np.uint64))


def jaccard(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> float:
    """Shared shingles over all shingles of two texts; 0 when both have none."""
    shared = len(np.intersect1d(a, b, assume_unique=True))
    union = len(a) + len(b) - shared
    return shared / union if union else 0.0


class NearDuplicates:
    """Texts seen so far; `first_like` tells which of them a new one is nearly equal to."""

    def __init__(self) -> None:
        source = np.frombuffer(hashlib.shake_256(b"quantkit minhash").digest(16 * _BANDS * _ROWS), np.uint64)
        self._factor, self._offset = source[::2] | np.uint64(1), source[1::2]
        self._buckets: dict[bytes, list[int]] = {}
        self._seen: list[NDArray[np.uint64]] = []

    def first_like(self, text: str) -> int | None:
        """The number (from 0, over the texts kept) of the first one with a Jaccard index of at least 0.8; else None,
        and `text` is kept as the next."""
        made = shingles(text)
        if not len(made):
            return None
        keys = self._band_keys(made)
        likely = sorted({number for key in keys for number in self._buckets.get(key, ())})
        for number in likely:
            if jaccard(made, self._seen[number]) >= SIMILAR:
                return number
        for key in keys:
            self._buckets.setdefault(key, []).append(len(self._seen))
        self._seen.append(made)
        return None

    def _band_keys(self, made: NDArray[np.uint64]) -> list[bytes]:
        with np.errstate(over="ignore"):
            hashed = made[:, None] * self._factor + self._offset  # [shingles, bands * rows]
        rows = (hashed.min(0) >> np.uint64(32)).astype(np.uint32).reshape(_BANDS, _ROWS)
        return [band.to_bytes(1, "little") + row.tobytes() for band, row in enumerate(rows)]
