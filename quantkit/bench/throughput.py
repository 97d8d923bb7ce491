"""How fast an artifact runs here, on the three jobs every engine is compared on.

prefill: one prompt of 512 random tokens to its first token. decode: 96 tokens after a prompt of 32, one sequence, the
prefill not counted. serve: many requests at once, 128 random prompt tokens and 64 output tokens each, output tokens
over the whole run. Greedy, end of text ignored, no prefix cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.artifact.layout import MANIFEST
from quantkit.runtime.engine import EngineCore
from quantkit.runtime.load import EngineOptions, load_artifact, load_source
from quantkit.runtime.request import EngineRequest
from quantkit.runtime.sampling import SamplingParams

PREFILL_TOKENS = 512
DECODE_PROMPT, DECODE_TOKENS = 32, 96
SERVE_PROMPT, SERVE_TOKENS = 128, 64
SERVE_SEQUENCES = (8, 16, 32)
MAX_MODEL_LEN = PREFILL_TOKENS + 1
_LOWEST_ID = 100
"""Random token ids start here, past most special tokens."""


@dataclass(frozen=True)
class Run:
    """Seconds from the start to the first token of the last sequence that got one, and to the end."""

    first_tokens: float
    total: float


def load(model: Path, threads: int) -> EngineCore:
    """An engine for `throughput` over an artifact (gated or not) or an unquantized source."""
    options = EngineOptions(
        max_num_seqs=max(SERVE_SEQUENCES),
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=PREFILL_TOKENS,
        enable_prefix_caching=False,
        threads=threads,
        accept_ungated=True,
    )
    loaded = load_artifact(model, options) if (model / MANIFEST).is_file() else load_source(str(model), options)
    return loaded.core


def throughput(core: EngineCore) -> Iterator[tuple[str, float]]:
    """Name and tokens/s of each job, as they end.

    Args:
        core: what `load` gives.
    """
    rng = np.random.default_rng(0)
    run(core, rng, 1, 16, 4)
    yield "prefill_512", PREFILL_TOKENS / run(core, rng, 1, PREFILL_TOKENS, 1).total
    single = run(core, rng, 1, DECODE_PROMPT, DECODE_TOKENS + 1)
    yield "decode_1", DECODE_TOKENS / (single.total - single.first_tokens)
    for sequences in SERVE_SEQUENCES:
        yield (
            f"serve_{sequences}",
            sequences * SERVE_TOKENS / run(core, rng, sequences, SERVE_PROMPT, SERVE_TOKENS).total,
        )


def run(core: EngineCore, rng: np.random.Generator, sequences: int, prompt: int, output: int) -> Run:
    """Serve `sequences` random prompts of `prompt` tokens at once, `output` tokens each."""
    highest = core.config.vocab_size
    ids = rng.integers(min(_LOWEST_ID, highest // 2), highest, (sequences, prompt))
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    start = time.perf_counter()
    for number, row in enumerate(ids.tolist()):
        core.add_request(EngineRequest(f"bench-{number}", row, params))
    seen: set[str] = set()
    first_tokens = 0.0
    while core.has_work():
        new = {made.request_id for made in core.step()} - seen
        if new:
            seen |= new
            first_tokens = time.perf_counter() - start
    return Run(first_tokens, time.perf_counter() - start)
