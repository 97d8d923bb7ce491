"""StepBatch: a scheduler's step as the executor's arrays, written into memory allocated once."""

from __future__ import annotations

import numpy as np

from quantkit.runtime.request import Request
from quantkit.runtime.scheduler import SchedulerConfig, Step
from quantkit.runtime.step import StepInputs


class StepBatch:
    """Builds StepInputs. What `build` returns is a view of its own buffers, good until the next call."""

    def __init__(self, config: SchedulerConfig) -> None:
        tokens, seqs, size = config.max_num_batched_tokens, config.max_num_seqs, config.block_size
        self._block_size = size
        self._token_ids = np.zeros(tokens, np.int32)
        self._positions = np.zeros(tokens, np.int32)
        self._slots = np.zeros(tokens, np.int32)
        self._starts = np.zeros(seqs + 1, np.int32)
        self._seq_lens = np.zeros(seqs, np.int32)
        self._table = np.zeros((seqs, -(-config.max_model_len // size)), np.int32)
        self._rows = np.zeros(seqs, np.int32)
        self._all_positions = np.arange(config.max_model_len, dtype=np.int32)

    def build(self, step: Step) -> tuple[StepInputs, list[Request]]:
        """The step's arrays, and the requests whose next token it decides, in the order of its logits rows."""
        size, at, width = self._block_size, 0, 0
        drawing: list[Request] = []
        for seq, (request, count) in enumerate(step.items()):
            start, stop, held = request.num_computed, request.num_computed + count, len(request.blocks)
            if count == 1:
                self._token_ids[at] = request.tokens[start]
                self._positions[at] = start
                self._slots[at] = request.blocks[start // size].block_id * size + start % size
            else:
                positions = self._all_positions[start:stop]
                self._token_ids[at : at + count] = request.tokens[start:stop]
                self._positions[at : at + count] = positions
                self._slots[at : at + count] = request.table[positions // size] * size + positions % size
            at += count
            self._starts[seq + 1] = at
            self._seq_lens[seq] = stop
            self._table[seq, :held] = request.table[:held]
            width = max(width, held)
            if stop == request.num_tokens:
                self._rows[len(drawing)] = at - 1
                drawing.append(request)
        seqs = len(step)
        inputs = StepInputs(
            token_ids=self._token_ids[:at],
            positions=self._positions[:at],
            slot_mapping=self._slots[:at],
            query_start_loc=self._starts[: seqs + 1],
            seq_lens=self._seq_lens[:seqs],
            block_table=self._table[:seqs, :width],
            logits_rows=self._rows[: len(drawing)],
        )
        return inputs, drawing
