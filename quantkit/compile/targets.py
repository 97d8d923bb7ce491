"""The GPU architectures that code is emitted for, and what each allows a kernel."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit_kernels.cache_formats import CACHE_FORMATS

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""A100 · RTX 30 and A10 · RTX 40 and L4 · H100 and H200 · B200 · RTX 50."""

SHARED_BYTES = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376}
"""Most shared memory of one block, opted in to (CUDA C++ Programming Guide, technical specifications)."""


def cache_without_kernels(kv_format: str, targets: Sequence[str]) -> str:
    """A line that names the targets for which no GPU kernel reads a cache in `kv_format`; empty where there is none."""
    lacking = [target for target in targets if not _keeps(kv_format, target)]
    if not lacking:
        return ""
    known = ", ".join(name for name in CACHE_FORMATS if all(_keeps(name, target) for target in lacking))
    return (
        f"no GPU kernel for a KV cache in {kv_format} ({known} have some): what is compiled for "
        f"{', '.join(lacking)} leaves out attention and the writing of keys and values"
    )


def _keeps(kv_format: str, target: str) -> bool:
    kind = CACHE_FORMATS[kv_format]
    return kind.triton is not None and capability(target) >= kind.least_sm


def capability(target: str) -> int:
    """`sm_90` -> 90."""
    return int(target.removeprefix("sm_"))


def ptx_target(target: str) -> str:
    """What the PTX must name: from sm_90 on Triton compiles to the architecture-specific set, `sm_90a`."""
    return f"{target}a" if capability(target) >= 90 else target
