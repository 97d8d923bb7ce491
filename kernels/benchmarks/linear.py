"""Products with packed weights: `python kernels/benchmarks/linear.py [--isa avx2] [--threads 2]`.

Weights of one shape, many times over so that they do not fit L2, at one row (bytes/s against memory read) and at many
(operations/s against the ceiling of their kind: FP32 FMA, or integer products of that width and group).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from arguments import count, matrix
from ceilings import Ceilings, best_seconds
from figures import Figure, text

from quantkit_kernels import cpu

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
FORMS = {"int4 g64": (4, 64), "int4 g128": (4, 128), "int8": (8, 0), "fp16": (16, 0), "fp32": (32, 0)}


def shape(text: str) -> str:
    """A name of SHAPES, or rows and columns."""
    if text not in SHAPES:
        matrix(text)
    return text


def packed(bits: int, group: int, rows: int, columns: int) -> cpu.PackedMatrix:
    rng = np.random.default_rng(0)
    if bits >= 16:
        floats = rng.standard_normal((rows, columns), np.float32)
        return cpu.pack_matrix(floats.astype(np.float16) if bits == 16 else floats, bits=bits)
    codes = rng.integers(-7, 8, (rows, columns), np.int8)
    scale = (rng.random((rows, columns // (group or columns))) * 0.01).astype(np.float16).astype(np.float32)
    return cpu.pack_matrix(codes, bits=bits, scale=scale)


def measure(
    ceilings: Ceilings, forms: Sequence[str], shapes: Sequence[str], counts: Sequence[int], megabytes: int = 48
) -> list[Figure]:
    """One figure a form, shape, number of rows and way to compute."""
    found = []
    for form in forms:
        bits, group = FORMS[form]
        for name in shapes:
            rows, columns = SHAPES[name] if name in SHAPES else matrix(name)
            if group and columns % group:
                continue
            weight = packed(bits, group, rows, columns)
            copies = max(1, (megabytes << 20) // weight.nbytes)
            weights = [packed(bits, group, rows, columns) for _ in range(copies - 1)] + [weight]
            for compute in ("int8", "exact") if bits < 16 else ("exact",):
                ceiling = ceilings.dot(bits, group or columns) if compute == "int8" else ceilings.flops
                for tokens in counts:
                    used = weights[: max(1, copies * 4 // (3 + tokens))]
                    x = np.random.default_rng(0).standard_normal((tokens, columns), np.float32)
                    out = np.empty((tokens, rows), np.float32)
                    calls = cpu.CallList(threads=ceilings.threads, isa=ceilings.isa)
                    for each in used:
                        calls.linear(x, each, None, out, compute)
                    seconds = best_seconds(lambda calls=calls, tokens=tokens: calls.run(tokens, 0, 0)) / len(used)
                    operations, case = 2.0 * tokens * rows * columns, f"{name} {tokens} rows"
                    kind = f"{form} {compute}"
                    found.append(
                        Figure("linear", kind, case, seconds, weight.nbytes, operations, ceilings.read, ceiling)
                    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", nargs="+", default=cpu.supported_isas(), choices=cpu.supported_isas())
    parser.add_argument("--threads", type=count, default=cpu.usable_threads())
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--shapes", type=shape, nargs="+", default=list(SHAPES), help="names or NxK")
    options = parser.parse_args()
    for isa in options.isa:
        ceilings = Ceilings(isa, options.threads)
        print(ceilings.line())
        print(text(measure(ceilings, options.forms, options.shapes, options.rows)))


if __name__ == "__main__":
    main()
