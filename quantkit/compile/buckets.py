"""Buckets: the sizes of steps that an artifact is prepared for. Pure data, planned from limits and traffic.

A decode step (one token a sequence) runs at the next bucket from its number of sequences up, a prefill step at the next
one from its number of tokens up; what is larger than every bucket runs as it is. Which kernels a bucket runs depends
on its class only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from quantkit.profile.model import Profile

Phase = Literal["decode", "prefill"]
FEW_ROWS = 16
"""Rows up to which the linear kernels for few rows serve a step (one matrix instruction's worth)."""
DECODE = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
PREFILL = (128, 256, 512, 1024)
"""Beyond the last a step's own time hides what launching its kernels costs."""
_RARE = 0.02
"""Share of prompts below which a prefill bucket of its own does not pay."""


@dataclass(frozen=True)
class BucketClass:
    """Buckets that run the same kernels. name: `decode` (at most 16 rows), `decode-wide` (more) or `prefill`."""

    name: str
    phase: Phase
    few: bool


CLASSES = {
    each.name: each
    for each in (
        BucketClass("decode", "decode", True),
        BucketClass("decode-wide", "decode", False),
        BucketClass("prefill", "prefill", False),
    )
}


@dataclass(frozen=True)
class BucketPlan:
    """Bucket sizes, ascending. decode: sequences. prefill: tokens. planned_from: `limits`, or `profile` too."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    planned_from: Literal["limits", "profile"]

    @property
    def classes(self) -> tuple[BucketClass, ...]:
        """The classes that occur. Prefill always does: a step larger than every bucket runs the same kernels."""
        named = ["decode"] + ["decode-wide"] * (self.decode[-1] > FEW_ROWS) + ["prefill"]
        return tuple(CLASSES[name] for name in named)

    def to_json(self) -> dict[str, Any]:
        """As `quantkit/buckets.json` holds it."""
        return {"version": 1, "few_rows": FEW_ROWS, **asdict(self)}


def plan_buckets(max_num_seqs: int, max_num_batched_tokens: int, profile: Profile | None = None) -> BucketPlan:
    """Buckets within the serving limits, thinned to the traffic where a profile is given.

    Decode buckets stop at the profile's peak of requests at once, rounded up to a bucket, but for the last, which
    always is `max_num_seqs`: a burst must find a bucket. Prefill buckets are kept where at least 2 % of prompts end in
    them; the one that holds the longest prompts stays.
    """
    decode = _up_to(DECODE, max_num_seqs)
    prefill = _up_to(PREFILL, min(max_num_batched_tokens, PREFILL[-1]))
    if profile is None:
        return BucketPlan(decode, prefill, "limits")
    if profile.concurrency is not None:
        peak = profile.concurrency.peak
        usual = next((size for size in decode if size >= peak), decode[-1])
        decode = tuple(size for size in decode if size <= usual or size == decode[-1])
    lengths = profile.prompt_tokens
    if lengths is not None:
        shares = dict.fromkeys(prefill, 0.0)
        for length, share in zip(lengths.up_to, lengths.share, strict=True):
            shares[next((size for size in prefill if size >= length), prefill[-1])] += share
        used = [size for size, share in shares.items() if share >= _RARE]
        longest = max((size for size, share in shares.items() if share > 0), default=prefill[-1])
        prefill = tuple(sorted({*used, longest}))
    return BucketPlan(decode, prefill, "profile")


def _up_to(ladder: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The ladder's sizes below the limit, and the limit."""
    return (*(size for size in ladder if size < limit), limit)
