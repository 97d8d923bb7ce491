"""Which captured graph a step replays, or why it runs without one. Pure data; nothing here touches a device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Phase = Literal["decode", "prefill"]
Reason = Literal["mixed", "too_large", "too_long", "shed", "not_captured", "disabled"]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""Why a step runs without a graph.

mixed: it decodes and prefills at once. too_large: more rows than the largest bucket. too_long: a sequence needs more
cache blocks than graphs were captured for. shed: its bucket was dropped at capture, memory having run out.
not_captured: its bucket is planned and its phase is not captured (prefill where graphs do not pay). disabled: graphs
are off.
"""


@dataclass(frozen=True, order=True)
class Bucket:
    """A size of steps. size: sequences of one token each (decode), or tokens (prefill)."""

    phase: Phase
    size: int


@dataclass(frozen=True)
class StepShape:
    """What of a step decides: its sequences, its tokens, and the most cache blocks that one of its sequences holds."""

    sequences: int
    tokens: int
    blocks: int

    @property
    def phase(self) -> Phase | None:
        """`decode` with one token a sequence, `prefill` with one sequence of several, else None."""
        if self.tokens == self.sequences:
            return "decode"
        return "prefill" if self.sequences == 1 else None


@dataclass
class Dispatcher:
    """Chooses for every step and counts what it chose.

    planned: sizes by phase, ascending. captured: buckets that have a graph. shed: those that memory did not allow.
    blocks: cache blocks of a sequence that graphs were captured for. enabled: False sends every step without.
    """

    planned: Mapping[Phase, Sequence[int]]
    captured: frozenset[Bucket]
    shed: frozenset[Bucket]
    blocks: int
    enabled: bool = True
    replays: dict[Bucket, int] = field(default_factory=dict)
    fallbacks: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    def choose(self, step: StepShape) -> Bucket | Reason:
        """The bucket whose graph the step replays, padded up to its size, or the reason why none."""
        chosen = self._choose(step)
        if isinstance(chosen, Bucket):
            self.replays[chosen] = self.replays.get(chosen, 0) + 1
        else:
            self.fallbacks[chosen] += 1
        return chosen

    def _choose(self, step: StepShape) -> Bucket | Reason:
        if not self.enabled:
            return "disabled"
        phase = step.phase
        if phase is None:
            return "mixed"
        sizes = self.planned.get(phase, ())
        at = bisect_left(sizes, step.tokens)
        if at == len(sizes):
            return "too_large"
        if step.blocks > self.blocks:
            return "too_long"
        bucket = Bucket(phase, sizes[at])
        if bucket in self.captured:
            return bucket
        return "shed" if bucket in self.shed else "not_captured"


def planned_sizes(buckets: Mapping[str, Any]) -> dict[Phase, tuple[int, ...]]:
    """Sizes by phase out of an artifact's bucket plan (`artifact.kernels.read_buckets`)."""
    return {"decode": tuple(buckets["decode"]), "prefill": tuple(buckets["prefill"])}
