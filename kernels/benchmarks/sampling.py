"""Microseconds a row that sampling takes, by what is asked: python kernels/benchmarks/sampling.py [--logits ROWS.npy]

Rows are random, normal with a deviation of 3, or float32 [n, V] of a file.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from arguments import count

from quantkit_kernels import cpu
from quantkit_kernels.ops.sample import GREEDY, SampleRow

ASKED = {
    "greedy": GREEDY,
    "temperature 0.7": SampleRow(temperature=0.7),
    "temperature 0.8, top_p 0.95": SampleRow(temperature=0.8, top_p=0.95),
    "top_k 50": SampleRow(temperature=1.0, top_k=50),
    "min_p 0.05": SampleRow(temperature=1.0, min_p=0.05),
    "greedy, 5 logprobs": SampleRow(logprobs=5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logits", help="a .npy file of float32 [n, V]")
    parser.add_argument("--vocab", type=count, default=49_152)
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=count)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    known = np.load(options.logits) if options.logits else rng.standard_normal((32, options.vocab), np.float32) * 3
    sampler = cpu.Sampler(known.shape[1], options.threads)
    for name, row in ASKED.items():
        found = []
        for rows in options.rows:
            logits = known[rng.integers(0, len(known), rows)]
            asked = [row if row is GREEDY else row._replace(seed=seed) for seed in range(rows)]
            found.append(f"{1e6 * seconds(lambda x=logits, a=asked: sampler.sample(x, a)) / rows:8.1f}")
        print(f"{name:28}", *found)


def seconds(call) -> float:
    """The median of many calls."""
    call()
    times = []
    for _ in range(30):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
