"""Do tokenizer and embedding belong together?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quantkit.errors import CheckpointError


def require_known(texts: Iterable[Sequence[int]], vocab_size: int, where: str) -> None:
    """CheckpointError when a token id lies beyond the embedding's `vocab_size` rows.

    The tokenizer's own size proves nothing: Gemma 3's text models know one token (an image's) more than they embed.
    """
    highest = max((max(ids, default=0) for ids in texts), default=0)
    if highest >= vocab_size:
        raise CheckpointError(
            f"the tokenizer gives token id {highest}, the embedding has {vocab_size} rows",
            where=where,
            next="Give the tokenizer that belongs to these weights",
        )
