"""A whole step's share of the ceilings: `python kernels/benchmarks/whole_step.py ARTIFACT [--rounds 30]`.

A prompt of 512 tokens, and a token after 128, by the executor that serves the artifact. What the ceilings allow: for a
prompt, each product's operations at the ceiling of its kind and attention's over visible positions at that of FP32 FMA;
for a token, the bytes of its weights and cache at the rate memory is read. Ceilings and steps take turns, as a
machine's neighbours change both: medians of all rounds, and by halves of what the ceilings gave.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from arguments import count
from ceilings import Ceilings
from depth import BLOCK, one_sequence

from quantkit.artifact.read import open_artifact
from quantkit.compile.roofline import Step, node_work
from quantkit.formats.schemes import SCHEMES
from quantkit.program.ir import Program
from quantkit.runtime.executor import Executor
from quantkit_kernels import cpu

PROMPT, CONTEXT = 512, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--rounds", type=count, default=30)
    parser.add_argument("--threads", type=count, default=cpu.usable_threads())
    options = parser.parse_args()
    artifact = open_artifact(options.artifact)
    program = artifact.program
    executor = Executor(
        program,
        artifact,
        max_tokens=PROMPT,
        max_seqs=1,
        max_rows=1,
        num_blocks=PROMPT // BLOCK + 1,
        block_size=BLOCK,
        max_model_len=PROMPT,
        threads=options.threads,
        huge_cache=True,
    )
    table = np.arange(1, PROMPT // BLOCK + 1, dtype=np.int32)
    tokens = np.random.default_rng(0).integers(0, program.vocab_size, PROMPT).astype(np.int32)
    prompt = one_sequence(tokens, 0, table)
    token = one_sequence(tokens[CONTEXT - 1 : CONTEXT], CONTEXT - 1, table)
    read = token_bytes(program, executor.weight_bytes)
    executor.step(prompt)
    prompts, decodes = [], []
    for _ in range(options.rounds):
        ceilings = Ceilings(cpu.supported_isas()[0], options.threads, rounds=2)
        allowed = prompt_seconds(program, ceilings)
        prompts.append((allowed, seconds(lambda: executor.step(prompt))))
        allowed = read / ceilings.read
        decodes.append((allowed, min(seconds(lambda: executor.step(token)) for _ in range(20))))
    report(f"prompt of {PROMPT}", "", prompts)
    report(f"token at {CONTEXT}", f", {read / 1e6:.1f} MB read", decodes)


def prompt_seconds(program: Program, ceilings: Ceilings) -> float:
    """What a prompt of PROMPT tokens takes at the ceilings."""
    total, step = 0.0, Step.prefill(PROMPT, PROMPT)
    for node in program.nodes:
        operations = node_work(node, program, step).operations
        if node.attrs.get("compute") == "int8":
            weight = program.weights[node.weights["weight"]]
            scheme = SCHEMES[weight.scheme]
            total += operations / ceilings.dot(scheme.bits, scheme.group_size or weight.shape[1])
        else:
            total += operations / ceilings.flops
    return total


def token_bytes(program: Program, weight_bytes: int) -> float:
    """Bytes a token at CONTEXT reads: every weight but the embedding's other rows, and the cache."""
    tables = sum(int(np.prod(weight.shape)) * 2 for weight in program.weights.values() if weight.kind == "table")
    return weight_bytes - tables + CONTEXT * sum(kv.token_bytes for kv in program.kv)


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def report(name: str, note: str, pairs: list[tuple[float, float]]) -> None:
    """Medians of what the ceilings allow, of what it took, and of their ratio."""
    ordered = sorted(pairs)
    half = max(1, len(pairs) // 2)
    for which, some in (("all", pairs), ("faster half", ordered[:half]), ("slower half", ordered[half:])):
        if not some:
            continue
        allowed, took = (statistics.median(pair[i] for pair in some) for i in (0, 1))
        share = statistics.median(a / t for a, t in some)
        print(f"{name}, {which}: {took * 1e3:.2f} ms, {allowed * 1e3:.2f} at the ceilings{note}: {share:.0%}")


if __name__ == "__main__":
    main()
