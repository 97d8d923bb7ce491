"""The front's limits: less memory, which the engine it starts lifts again, and as many connections as there may be."""

from __future__ import annotations

import resource


def limit_memory(size: int) -> None:
    """Let this process map `size` bytes at most: what asks for more gets a MemoryError. A stricter limit stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or soft > size:
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def allow_connections() -> None:
    """As many open files as the system allows: the usual 1024 is fewer than a queue may hold."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def lift_memory_limit() -> None:
    """As much as the system allows, whatever was inherited."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
