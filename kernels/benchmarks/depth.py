"""Decode by context: `python kernels/benchmarks/depth.py ARTIFACT`. One sequence, a token a step, tokens/s by length.

Lengths take turns within one run, so that their ratio does not depend on what else the machine does meanwhile. Keys and
values are those of a prompt of random tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from arguments import count

from quantkit.artifact.read import open_artifact
from quantkit.runtime.executor import Executor
from quantkit.runtime.step import StepInputs

BLOCK = 16
CHUNK = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--lengths", type=count, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--rounds", type=count, default=150)
    parser.add_argument("--threads", type=count)
    options = parser.parse_args()
    lengths = sorted(options.lengths)
    artifact = open_artifact(options.artifact)
    blocks = -(-lengths[-1] // BLOCK)
    executor = Executor(
        artifact.program,
        artifact,
        max_tokens=CHUNK,
        max_seqs=1,
        max_rows=1,
        num_blocks=blocks + 1,
        block_size=BLOCK,
        max_model_len=lengths[-1],
        threads=options.threads,
        huge_cache=True,
    )
    tokens = np.random.default_rng(0).integers(0, artifact.program.vocab_size, lengths[-1]).astype(np.int32)
    table = np.arange(1, blocks + 1, dtype=np.int32)
    for start in range(0, lengths[-1], CHUNK):
        executor.step(one_sequence(tokens[start : start + CHUNK], start, table))
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(options.rounds):
        for length in lengths:
            inputs = one_sequence(tokens[length - 1 : length], length - 1, table)
            begin = time.perf_counter()
            executor.step(inputs)
            seconds[length].append(time.perf_counter() - begin)
    first = statistics.median(seconds[lengths[0]])
    for length in lengths:
        median = statistics.median(seconds[length])
        share = f"{first / median:.3f} of that at {lengths[0]}"
        print(f"{length:6d} tokens of context: {1 / median:7.1f} tokens/s, {share}")


def one_sequence(tokens: Sequence[int], start: int, table: np.ndarray) -> StepInputs:
    """A step of one sequence's `tokens` from position `start` on, the last row's logits wanted."""
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    return StepInputs(
        token_ids=np.asarray(tokens, np.int32),
        positions=positions,
        slot_mapping=(table[positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
        query_start_loc=np.asarray([0, len(tokens)], np.int32),
        seq_lens=np.asarray([start + len(tokens)], np.int32),
        block_table=table[None, : -(-(start + len(tokens)) // BLOCK)],
        logits_rows=np.asarray([len(tokens) - 1], np.int32),
    )


if __name__ == "__main__":
    main()
