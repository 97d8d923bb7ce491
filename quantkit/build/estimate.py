"""What a stage will cost, about: from the program's shapes, and from how fast this machine is right now."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from quantkit.errors import PreflightError
from quantkit.formats.schemes import SCHEMES
from quantkit.program.ir import Program

IDLE_BYTES = 380_000_000
"""Anonymous memory of a build that has imported its libraries and done nothing else; planning imports few of them."""
_SPARE_DISK = 1.1


@dataclass(frozen=True)
class Cost:
    """Bytes written, anonymous bytes held beyond an idle process, multiply-adds in matrix products, other ops, and
    seconds that depend on neither."""

    disk_bytes: int = 0
    memory_bytes: int = 0
    multiply_adds: float = 0.0
    element_ops: float = 0.0
    fixed_seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        """Both, one after the other: memory is that of the larger."""
        return Cost(
            self.disk_bytes + other.disk_bytes,
            max(self.memory_bytes, other.memory_bytes),
            self.multiply_adds + other.multiply_adds,
            self.element_ops + other.element_ops,
            self.fixed_seconds + other.fixed_seconds,
        )

    def seconds(self) -> float:
        """Time at the rates measured on this machine."""
        products, elements = _rates()
        return self.multiply_adds / products + self.element_ops / elements + self.fixed_seconds


@dataclass(frozen=True)
class Sizes:
    """Counts of a program's weights: `units` over the decision units, `layer` the largest decoder layer's matrices,
    `group` the largest matrix, `table` the embedding, `head` the output matrix, all in elements; `item` bytes each."""

    units: int
    layer: int
    group: int
    table: int
    head: int
    hidden: int
    layers: int
    item: int
    tied: bool

    @staticmethod
    def of(program: Program) -> Sizes:
        """Counted from the fused program."""
        layers: dict[str, int] = {}
        units = group = 0
        for name, weight in program.groups().items():
            count = weight.shape[0] * weight.shape[1]
            if name != "lm_head":
                units, group = units + count, max(group, count)
                at = name.split(".")[1]
                layers[at] = layers.get(at, 0) + count
        table, head = program.weights["embed"], program.weights["lm_head"]
        return Sizes(
            units=units,
            layer=max(layers.values()),
            group=group,
            table=table.shape[0] * table.shape[1],
            head=head.shape[0] * head.shape[1],
            hidden=program.hidden_size,
            layers=len(layers),
            item=4 if program.source_dtype == "float32" else 2,
            tied=table.parts == head.parts,
        )

    def payload_bytes(self, bits: float, head_scheme: str) -> int:
        """Bytes of the artifact's weights with `bits` a weight over the decision units."""
        head = 0 if self.tied else int(self.head * SCHEMES[head_scheme].bits_per_weight(self.hidden) / 16 * self.item)
        return int(self.units * bits / 8) + self.table * self.item + head


def kv_bytes_per_token(program: Program, kv_format: str) -> int:
    """Cache bytes of one token over all layers with the cache in `kv_format`."""
    return sum(replace(kv, format=kv_format).token_bytes for kv in program.kv)


def require_room(costs: Sequence[Cost], folder: Path) -> None:
    """PreflightError when the stages still to run want more memory or disk than there is."""
    disk = int(sum(cost.disk_bytes for cost in costs) * _SPARE_DISK)
    free = shutil.disk_usage(folder).free
    if disk > free:
        raise PreflightError(
            f"the build will write about {disk / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free",
            where=str(folder),
            next="Make room, or give an --out on another disk",
        )
    memory, available = max((cost.memory_bytes for cost in costs), default=0), available_memory()
    if memory > available:
        raise PreflightError(
            f"the build will hold about {memory / 1e6:,.0f} MB in memory, {available / 1e6:,.0f} MB are available",
            next="Lower calibration.max_samples or max_tokens, or use a machine with more memory",
        )


def available_memory() -> int:
    """Bytes that can be allocated without swapping: MemAvailable, or less where a control group sets a limit."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(int(limit) - used, 0))


@cache
def _rates() -> tuple[float, float]:
    """(multiply-adds a second in a float32 product, elementwise ops a second), each measured for some milliseconds."""
    import torch

    x, w = torch.ones(256, 1024), torch.ones(1024, 1024)
    products = 256 * 1024 * 1024 / _fastest(lambda: x @ w)
    values = torch.ones(1 << 18)
    elements = values.numel() * 4 / _fastest(lambda: values.mul(2.0).sub_(1.0).abs_().round_())
    return products, elements


def _fastest(run: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times)
