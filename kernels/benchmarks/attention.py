"""Attention over the paged cache: `python kernels/benchmarks/attention.py [--isa avx2] [--threads 2]`.

Decode (one query a sequence; cache bytes/s against memory read) and prefill (operations/s against the FP32 FMA rate,
counting only visible positions), on SmolLM2-135M's heads by default.
"""

from __future__ import annotations

import argparse

import torch
from ceilings import best_seconds, measure

from quantkit_kernels import cpu

CASES = [("decode", 1, 128), ("decode", 1, 1024), ("decode", 1, 4096), ("decode", 16, 512), ("prefill", 1, 512)]
DTYPES = {"int8": torch.int8, "fp16": torch.float16, "fp32": torch.float32}
BLOCK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", nargs="*", default=cpu.supported_isas())
    parser.add_argument("--threads", type=int, default=cpu.usable_threads())
    parser.add_argument("--cache", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64], help="query heads, KV heads, head_dim")
    options = parser.parse_args()
    heads, kv_heads, head_dim = options.heads
    for isa in options.isa:
        ceilings = measure(isa, options.threads)
        print(ceilings.line(isa, options.threads))
        print(f"{'cache':>6} {'case':>8} {'seqs':>5} {'length':>7} {'us':>9} {'GB/s':>7} {'share':>6}", end=" ")
        print(f"{'GFLOP/s':>8} {'share':>6}")
        for name in options.cache:
            for case, sequences, length in CASES:
                blocks = -(-length // BLOCK)
                shape = (sequences * blocks, kv_heads, BLOCK, head_dim)
                dtype = DTYPES[name]
                if dtype == torch.int8:
                    k, v = (torch.randint(-127, 128, shape, dtype=dtype) for _ in range(2))
                    k_scale, v_scale = torch.rand(kv_heads, head_dim) * 0.01, torch.rand(kv_heads, head_dim)
                else:
                    k, v = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
                    k_scale = v_scale = None
                fresh = length if case == "prefill" else 1
                table = torch.randperm(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
                start = torch.arange(0, sequences * fresh + 1, fresh, dtype=torch.int32)
                lengths = torch.full((sequences,), length, dtype=torch.int32)
                q = torch.randn(sequences * fresh, heads * head_dim)
                out = torch.empty_like(q)
                calls = cpu.CallList(threads=options.threads, isa=isa)
                calls.paged_attention(
                    q, k, v, k_scale, v_scale, table, start, lengths, out, heads, kv_heads, head_dim, head_dim**-0.5
                )
                tokens = sequences * fresh
                seconds = best_seconds(lambda calls=calls, t=tokens, s=sequences: calls.run(t, s, 0))
                seen = sequences * (length * (length + 1) // 2 if case == "prefill" else length)
                rate = 2 * k.element_size() * sequences * length * kv_heads * head_dim / seconds
                flops = 4 * seen * heads * head_dim / seconds
                print(
                    f"{name:>6} {case:>8} {sequences:5d} {length:7d} {seconds * 1e6:9.1f} {rate / 1e9:7.1f}"
                    f" {rate / ceilings.read:6.0%} {flops / 1e9:8.1f} {flops / ceilings.flops:6.0%}"
                )


if __name__ == "__main__":
    main()
