"""Products with packed weights: `python kernels/benchmarks/linear.py [--isa avx2] [--threads 2]`.

Weights of one shape, many times over so that they do not fit L2, at one row (bytes/s against memory read) and at many
(operations/s against the FP32 FMA rate).
"""

from __future__ import annotations

import argparse

import torch
from ceilings import best_seconds, measure

from quantkit_kernels import cpu

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
FORMS = {"int4 g64": (4, 64), "int8": (8, 0), "fp16": (16, 0), "fp32": (32, 0)}


def packed(bits: int, group: int, rows: int, columns: int) -> cpu.PackedMatrix:
    if bits >= 16:
        return cpu.pack_matrix(torch.randn(rows, columns).to(torch.float16 if bits == 16 else torch.float32))
    codes = torch.randint(-7, 8, (rows, columns), dtype=torch.int8)
    scale = (torch.rand(rows, columns // (group or columns)) * 0.01).half().float()
    return cpu.pack_matrix(codes, bits=bits, scale=scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", nargs="*", default=cpu.supported_isas())
    parser.add_argument("--threads", type=int, default=cpu.usable_threads())
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), help="names or NxK")
    parser.add_argument("--megabytes", type=int, default=48, help="weights of one measurement")
    options = parser.parse_args()
    for isa in options.isa:
        ceilings = measure(isa, options.threads, options.megabytes)
        print(ceilings.line(isa, options.threads))
        print(f"{'weights':>9} {'shape':>8} {'rows':>5} {'us':>9} {'GB/s':>7} {'share':>6} {'GFLOP/s':>8} {'share':>6}")
        for form in options.forms:
            for name in options.shapes:
                rows, columns = SHAPES[name] if name in SHAPES else map(int, name.split("x"))
                weight = packed(*FORMS[form], rows, columns)
                copies = max(1, (options.megabytes << 20) // weight.nbytes)
                weights = [packed(*FORMS[form], rows, columns) for _ in range(copies - 1)] + [weight]
                for tokens in options.rows:
                    used = weights[: max(1, copies * 4 // (3 + tokens))]
                    x, out = torch.randn(tokens, columns), torch.empty(tokens, rows)
                    calls = cpu.CallList(threads=options.threads, isa=isa)
                    for each in used:
                        calls.linear(x, each, None, out)
                    seconds = best_seconds(lambda calls=calls, tokens=tokens: calls.run(tokens, 0, 0)) / len(used)
                    rate, flops = weight.nbytes / seconds, 2 * tokens * rows * columns / seconds
                    shares = f"{rate / ceilings.read:6.0%} {flops / 1e9:8.1f} {flops / ceilings.flops:6.0%}"
                    print(f"{form:>9} {name:>8} {tokens:5d} {seconds * 1e6:9.1f} {rate / 1e9:7.1f} {shares}")


if __name__ == "__main__":
    main()
