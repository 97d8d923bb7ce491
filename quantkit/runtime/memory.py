"""How much memory the KV cache gets: what the limits ask for, within what the machine has left beside the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import PreflightError
from quantkit.formats.schemes import SCHEMES
from quantkit.program.ir import Program

DEFAULT_CAP = 1 << 30
"""Bytes of cache beyond which nothing is taken unasked."""
_GIB = float(1 << 30)


@dataclass(frozen=True)
class MemoryPlan:
    """What loading will take, in bytes, of `available`. `num_blocks` counts the null block."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    weight_bytes: int
    available: int
    wanted_tokens: int
    """Tokens that max_num_seqs sequences of max_model_len would fill."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.bytes_per_block

    @property
    def kv_tokens(self) -> int:
        """Tokens the cache holds."""
        return (self.num_blocks - 1) * self.block_size

    def table(self) -> str:
        """A few lines for the start of a server."""
        share = self.kv_tokens / self.wanted_tokens
        rows = (
            ("memory available", f"{self.available / _GIB:8.2f} GiB"),
            ("weights", f"{self.weight_bytes / _GIB:8.2f} GiB"),
            (
                "KV cache",
                f"{self.kv_bytes / _GIB:8.2f} GiB   {self.kv_tokens} tokens, {share:.0%} of every sequence full",
            ),
        )
        return "\n".join(f"{name:18s}{value}" for name, value in rows)


def plan_memory(
    program: Program,
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    kv_cache_bytes: int | None = None,
    utilization: float = 0.9,
    available: int | None = None,
) -> MemoryPlan:
    """Sizes the cache: never more than every sequence full needs, nor than `utilization` of memory leaves, nor (unless
    `kv_cache_bytes` asks for it) than DEFAULT_CAP.

    Raises:
        PreflightError: one sequence of max_model_len would not fit; with the numbers.
    """
    available = available_memory() if available is None else available
    weights = weight_bytes(program)
    a_block = block_size * sum(kv.token_bytes for kv in program.kv)
    one = -(-max_model_len // block_size)
    left = int(available * utilization) - weights
    asked = max(DEFAULT_CAP, (one + 1) * a_block) if kv_cache_bytes is None else kv_cache_bytes
    blocks = min(max_num_seqs * one + 1, min(asked, left) // a_block)
    if blocks < one + 1:
        limit = "the machine leaves" if left < asked else "kv_cache_gib allows"
        raise PreflightError(
            f"one sequence of {max_model_len} tokens needs {(one + 1) * a_block / _GIB:.2f} GiB of KV cache, "
            f"{limit} {max(0, min(asked, left)) / _GIB:.2f} GiB (weights {weights / _GIB:.2f} GiB)",
            next="Lower max_model_len" if left < asked else "Raise kv_cache_gib or lower max_model_len",
        )
    return MemoryPlan(blocks, block_size, a_block, weights, available, max_num_seqs * one * block_size)


def weight_bytes(program: Program) -> int:
    """Bytes of a program's weights as stored: scales and zero points counted, vectors in float32."""
    total = 0.0
    for weight in program.weights.values():
        count = 1
        for dim in weight.shape:
            count *= dim
        if weight.kind == "matrix":
            total += count * SCHEMES[weight.scheme].bits_per_weight(weight.shape[1]) / 8
        else:
            total += count * (2 if weight.kind == "table" else 4)
    return int(total)


def available_memory() -> int:
    """Bytes this process may still take: what the kernel calls available, within the control group's limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, usage, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        most, used = _number(limit), _number(usage)
        if most is not None and used is not None:
            available = min(available, most - used + _reclaimable(stat))
    return max(0, available)


def _number(name: str) -> int | None:
    path = Path("/sys/fs/cgroup") / name
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not under this control group version, or "max": no limit
        return None


def _reclaimable(name: str) -> int:
    """Page cache in the control group that the kernel gives up first; it counts as used there."""
    try:
        lines = (Path("/sys/fs/cgroup") / name).read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.split()[0] == "inactive_file")
