"""Logits of a checkpoint through our own path (reader, spec, program, paged cache) and through Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from quantkit.models import ModelSource, SourceWeights
from quantkit.program import Program
from quantkit.runtime.executor import Executor
from quantkit.runtime.step import StepInputs

BLOCK = 16


def transformers_logits(folder: Path, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Float32 logits `[len(sequence), V]` of each sequence alone, by Transformers' eager attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([list(ids)])).logits[0] for ids in sequences]


class Runner:
    """An Executor over a program, with scattered cache blocks for a few sequences."""

    def __init__(
        self, program: Program, source: ModelSource, sequences: int, length: int, backend: str, max_model_len: int = 0
    ) -> None:
        per_sequence = -(-length // BLOCK)
        order = np.random.default_rng(0).permutation(sequences * per_sequence) + 1
        self.blocks = order.reshape(sequences, per_sequence).tolist()
        self.executor = Executor(
            program,
            SourceWeights(source),
            max_tokens=sequences * length,
            max_seqs=sequences,
            num_blocks=sequences * per_sequence + 1,
            max_model_len=max_model_len or length,
            backend=backend,
            threads=2,
        )

    def step(self, new: Sequence[Sequence[int]], starts: Sequence[int]) -> list[torch.Tensor]:
        """Feed each sequence's new tokens from position `starts[b]`; logits `[len(new[b]), V]` of each."""
        inputs = StepInputs.of_sequences(
            [list(ids) for ids in new], self.blocks, starts=list(starts), block_size=BLOCK, logits="all"
        )
        logits = torch.from_numpy(self.executor.step(inputs).copy())
        return list(logits.split([len(ids) for ids in new]))

    def prefill(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """All positions' logits of each sequence, in one step."""
        return self.step(sequences, [0] * len(sequences))

    def decode(self, sequences: Sequence[Sequence[int]], prompt: int) -> list[torch.Tensor]:
        """The same, but with only `prompt` tokens in the first step and every later token in a step of its own."""
        pieces = [[piece] for piece in self.step([ids[:prompt] for ids in sequences], [0] * len(sequences))]
        for position in range(prompt, len(sequences[0])):
            step = self.step([ids[position : position + 1] for ids in sequences], [position] * len(sequences))
            for piece, row in zip(pieces, step, strict=True):
                piece.append(row)
        return [torch.cat(piece) for piece in pieces]


def worst(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Largest absolute difference; NaN counts as infinite."""
    differences = [(a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)]
    return max(float("inf") if value != value else value for value in differences)
