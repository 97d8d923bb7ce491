"""Attention over the paged cache: `python kernels/benchmarks/attention.py [--isa avx2] [--threads 2]`.

Decode (one query a sequence; cache bytes/s against memory read) and prefill (operations/s, counting only visible
positions, against FP32 FMA or, over an INT8 cache, integer products of 8 bits, which it needs two of), on
SmolLM2-135M's heads by default.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from arguments import count
from ceilings import Ceilings, best_seconds
from figures import Figure, text

from quantkit_kernels import cpu
from quantkit_kernels.cache_formats import CACHE_FORMATS
from quantkit_kernels.ops import kv_cells
from quantkit_kernels.tensors import as_array

CASES = [("decode", 1, 128), ("decode", 1, 1024), ("decode", 1, 4096), ("decode", 16, 512), ("prefill", 1, 512)]
FORMATS = ("INT8", "FP8", "INT4", "FP16", "FP32")
BLOCK = 16


def measure(ceilings: Ceilings, caches: Sequence[str], heads: int, kv_heads: int, head_dim: int) -> list[Figure]:
    """One figure a kind of cache and case."""
    found, rng = [], np.random.default_rng(0)
    for name in caches:
        for case, sequences, length in CASES:
            blocks = -(-length // BLOCK)
            shape = (sequences * blocks, BLOCK, kv_heads, head_dim)
            kind = CACHE_FORMATS[name]
            scale = torch.full((kv_heads, head_dim), 4 / kind.top) if kind.top else None
            cells = (kv_cells.store(torch.randn(shape), scale, name).transpose(1, 2).contiguous() for _ in range(2))
            k, v = map(as_array, cells)
            k_scale = v_scale = None if scale is None else as_array(scale)
            fresh = length if case == "prefill" else 1
            table = rng.permutation(sequences * blocks).astype(np.int32).reshape(sequences, blocks)
            start = np.arange(0, sequences * fresh + 1, fresh, dtype=np.int32)
            lengths = np.full(sequences, length, np.int32)
            q = rng.standard_normal((sequences * fresh, heads * head_dim), np.float32)
            out = np.empty_like(q)
            calls = cpu.CallList(threads=ceilings.threads, isa=ceilings.isa)
            calls.paged_attention(
                q, k, v, k_scale, v_scale, table, start, lengths, out, heads, kv_heads, head_dim, name, head_dim**-0.5
            )
            tokens = sequences * fresh
            seconds = best_seconds(lambda calls=calls, t=tokens, s=sequences: calls.run(t, s, 0))
            seen = sequences * (length * (length + 1) // 2 if case == "prefill" else length)
            moved = 2.0 * kind.cell_bytes(head_dim) * sequences * length * kv_heads
            ceiling = ceilings.dot(8, 64) / 2 if kind.in_integers else ceilings.flops
            operations, label = 4.0 * seen * heads * head_dim, f"{case} {sequences} × {length}"
            found.append(Figure("attention", name, label, seconds, moved, operations, ceilings.read, ceiling))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", nargs="+", default=cpu.supported_isas(), choices=cpu.supported_isas())
    parser.add_argument("--threads", type=count, default=cpu.usable_threads())
    parser.add_argument("--cache", nargs="+", default=FORMATS, choices=CACHE_FORMATS)
    parser.add_argument("--heads", type=count, nargs=3, default=[9, 3, 64], help="query heads, KV heads, head_dim")
    options = parser.parse_args()
    for isa in options.isa:
        ceilings = Ceilings(isa, options.threads)
        print(ceilings.line())
        print(text(measure(ceilings, options.cache, *options.heads)))


if __name__ == "__main__":
    main()
