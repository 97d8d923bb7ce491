"""The kernels of an artifact as a table: kernel × target × bucket class, and what each takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantkit.artifact.kernels import KernelEntry, TargetKernels

_COLUMNS = ("target", "kernel", "buckets", "registers", "spills", "shared", "warps", "cubin")


def as_data(targets: Sequence[TargetKernels], buckets: dict[str, Any] | None) -> dict[str, Any]:
    """The same as JSON data; sizes in bytes."""
    return {
        "buckets": buckets,
        "targets": {
            each.target: {"kernels": [_entry(kernel) for kernel in each.kernels], "missing": dict(each.missing)}
            for each in targets
        },
    }


def as_text(targets: Sequence[TargetKernels], buckets: dict[str, Any] | None) -> str:
    """One line a kernel and target, then what no kernel serves and the buckets."""
    rows = [_COLUMNS, *(_row(kernel) for each in targets for kernel in each.kernels)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if not targets:
        lines = ["no kernels: the recipe's compile.targets is empty"]
    lines += [f"{each.target}: {line}" for each in targets for line in _missing(each)]
    if buckets is not None:
        sizes = (f"{phase} {', '.join(map(str, buckets[phase]))}" for phase in ("decode", "prefill"))
        lines.append(f"buckets: {' · '.join(sizes)} (from the {buckets.get('planned_from')})")
    return "\n".join(lines)


def _entry(kernel: KernelEntry) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "kernel": kernel.kernel,
        "bucket_classes": list(kernel.classes),
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
        "num_warps": kernel.num_warps,
        "cubin_bytes": kernel.size,
        "versions": dict(kernel.versions),
    }


def _row(kernel: KernelEntry) -> tuple[str, ...]:
    return (
        kernel.target,
        kernel.name,
        "+".join(kernel.classes) or "-",
        str(kernel.registers),
        str(kernel.spill_bytes),
        f"{kernel.shared_bytes:,}",
        str(kernel.num_warps),
        f"{kernel.size:,}",
    )


def _missing(each: TargetKernels) -> list[str]:
    """One line a reason: how many nodes it holds for in which bucket classes."""
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for bucket_class, nodes in each.missing.items():
        for node, reason in nodes.items():
            kind = node.rpartition(".")[2]
            by_class = counts.setdefault((kind, str(reason)), {})
            by_class[bucket_class] = by_class.get(bucket_class, 0) + 1
    return [
        f"{kind} × {max(by_class.values())} ({', '.join(by_class)}): {reason}"
        for (kind, reason), by_class in counts.items()
    ]
