"""What the machine can do at best, measured by the threads and instruction set that run the kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from quantkit_kernels.cpu.library import ISA_BITS, library


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second read from memory, FP32 operations a second (a fused multiply-add is two)."""

    read: float
    flops: float

    def line(self, isa: str, threads: int) -> str:
        return f"{isa}, {threads} threads: read {self.read / 1e9:.1f} GB/s, FP32 FMA {self.flops / 1e9:.0f} GFLOP/s"


def measure(isa: str, threads: int, megabytes: int = 256, rounds: int = 10) -> Ceilings:
    bit = ISA_BITS[isa]
    return Ceilings(
        library().qk_bench_read(bit, threads, megabytes << 20, rounds), library().qk_bench_fma(bit, threads, rounds)
    )


def best_seconds(call: Callable[[], None], at_least: float = 0.3) -> float:
    """The fastest of repeated calls, over `at_least` seconds: other processes only ever make a call slower."""
    call()
    best, start = float("inf"), time.perf_counter()
    while (now := time.perf_counter()) - start < at_least:
        call()
        best = min(best, time.perf_counter() - now)
    return best
