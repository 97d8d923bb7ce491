"""What one step of an executor reads: which tokens, where they stand, where their keys and values go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class StepInputs:
    """T tokens of B sequences, flattened in sequence order; all int32.

    token_ids, positions, slot_mapping: `[T]` (slot = block · block_size + offset, -1: not written).
    query_start_loc: `[B + 1]`, first token of each sequence in the flattened step. seq_lens: `[B]`, tokens of each
    sequence in the cache once this step's are written. block_table: `[B, M]`, M at most the executor's
    blocks a sequence. logits_rows: `[R]`, indices into T whose next-token logits are wanted.
    """

    token_ids: Ints
    positions: Ints
    slot_mapping: Ints
    query_start_loc: Ints
    seq_lens: Ints
    block_table: Ints
    logits_rows: Ints

    @staticmethod
    def of_rows(count: int) -> StepInputs:
        """A step for the head alone: `count` rows, of no sequence."""
        nothing = np.zeros(count, np.int32)
        return StepInputs(
            token_ids=nothing,
            positions=nothing,
            slot_mapping=nothing - 1,
            query_start_loc=np.asarray([0, count], np.int32),
            seq_lens=np.asarray([count], np.int32),
            block_table=np.zeros((1, 1), np.int32),
            logits_rows=np.arange(count, dtype=np.int32),
        )

    @staticmethod
    def of_sequences(
        sequences: list[list[int]],
        blocks: list[list[int]],
        *,
        starts: list[int] | None = None,
        block_size: int = 16,
        logits: str = "last",
    ) -> StepInputs:
        """A step of whole sequences: `sequences[b]` are new tokens from position `starts[b]` (default 0).

        `blocks[b]` are the cache blocks of sequence b from its first position on. logits: `last` (one row a
        sequence), `all` (one a token) or `none`.
        """
        starts = starts or [0] * len(sequences)
        counts = [len(ids) for ids in sequences]
        loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = [np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, counts, strict=True)]
        slots = [np.asarray(b, np.int32)[p // block_size] * block_size + p % block_size
                 for b, p in zip(blocks, positions, strict=True)]  # fmt: skip
        table = np.zeros((len(sequences), max(map(len, blocks), default=0)), np.int32)
        for row, ids in zip(table, blocks, strict=True):
            row[: len(ids)] = ids
        rows = {"last": loc[1:] - 1, "all": np.arange(loc[-1]), "none": np.zeros(0)}[logits]
        return StepInputs(
            token_ids=np.concatenate([np.asarray(ids, np.int32) for ids in sequences]),
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate(slots).astype(np.int32),
            query_start_loc=loc,
            seq_lens=np.asarray([s + n for s, n in zip(starts, counts, strict=True)], np.int32),
            block_table=table,
            logits_rows=rows.astype(np.int32),
        )
