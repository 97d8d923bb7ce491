"""What graphs cost in memory, foretold, so that a bucket list can be cut before anything is captured.

A captured graph holds its nodes (launches with their arguments) and, once instantiated, the driver's own copy of them;
its temporary buffers come from one pool that all graphs share. Graphs are replayed one at a time, so the pool is as
large as the largest needs, not their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.runtime.buckets import Bucket

LAUNCH_BYTES = 8 << 10
"""Device memory of one launch in an instantiated graph, rounded up; gpu-check measures it."""
FIXED_BYTES = 1 << 20
"""Of a graph beside its launches."""


@dataclass(frozen=True)
class GraphMemory:
    """What a model's graphs take.

    launches: kernels of a step. token_bytes: temporary buffers of one token, persistent inputs and outputs included.
    """

    launches: int
    token_bytes: int

    def graph(self) -> int:
        """Bytes of one graph, whatever its bucket: launches do not grow with rows."""
        return FIXED_BYTES + self.launches * LAUNCH_BYTES

    def total(self, buckets: Sequence[Bucket]) -> int:
        """Bytes of these graphs and the pool that they share."""
        return len(buckets) * self.graph() + self.pool(buckets)

    def pool(self, buckets: Sequence[Bucket]) -> int:
        """Bytes of the shared pool."""
        return self.token_bytes * max((bucket.size for bucket in buckets), default=0)

    def within(self, buckets: Sequence[Bucket], budget: int) -> tuple[Bucket, ...]:
        """The buckets, largest first, that `budget` bytes allow: the largest go first, since they cost the most."""
        kept = sorted(buckets, key=lambda bucket: (bucket.size, bucket.phase), reverse=True)
        while kept and self.total(kept) > budget:
            kept.pop(0)
        return tuple(kept)
