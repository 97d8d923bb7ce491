"""What the machine can do at best, measured by the threads and instruction set that run the kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from quantkit_kernels.cpu.library import ISA_BITS, library


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second read from memory; operations a second (a multiply-add is two) of FP32 FMA and of integer products.

    Integer products are codes of 4 or 8 bits times quantized rows, out of L1, scaled every 64 or 128 channels; on AMX
    both widths are one (weights are widened first).
    """

    isa: str
    threads: int
    megabytes: int = 256
    rounds: int = 10
    _dots: dict[tuple[int, int], float] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def read(self) -> float:
        """Bytes a second."""
        return float(library().qk_bench_read(ISA_BITS[self.isa], self.threads, self.megabytes << 20, self.rounds))

    @cached_property
    def flops(self) -> float:
        """FP32 operations a second."""
        return float(library().qk_bench_fma(ISA_BITS[self.isa], self.threads, self.rounds))

    def dot(self, bits: int, group: int) -> float:
        """Integer operations a second, for codes of `bits` scaled every `group` channels (at most 128 count)."""
        key = bits, 128 if group >= 128 else 64
        if key not in self._dots:
            bit = ISA_BITS[self.isa]
            self._dots[key] = float(library().qk_bench_dot(bit, self.threads, *key, self.rounds))
        return self._dots[key]

    def line(self) -> str:
        """One line for people."""
        kinds = [(bits, group) for bits in (4, 8) for group in (64, 128)]
        dots = ", ".join(f"u{bits}·s8 g{group} {self.dot(bits, group) / 1e9:.0f}" for bits, group in kinds)
        fma = f"FP32 FMA {self.flops / 1e9:.0f}"
        return f"{self.isa}, {self.threads} threads: read {self.read / 1e9:.1f} GB/s; in G operations/s: {fma}, {dots}"


def best_seconds(call: Callable[[], None], at_least: float = 0.3) -> float:
    """The fastest of repeated calls, over `at_least` seconds: other processes only ever make a call slower."""
    call()
    best, start = float("inf"), time.perf_counter()
    while (now := time.perf_counter()) - start < at_least:
        call()
        best = min(best, time.perf_counter() - now)
    return best
