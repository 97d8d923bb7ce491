"""Buckets are data planned from limits and traffic; every step finds one or is larger than all."""

from __future__ import annotations

import pytest

from quantkit.compile.buckets import plan_buckets
from quantkit.profile.model import Cell, Concurrency, Histogram, Profile


def profile(*, peak: int = 1024, lengths: Histogram | None = None) -> Profile:
    return Profile((Cell("any", "any", 1.0, prompt_tokens=lengths),), Concurrency(peak / 2, peak))


@pytest.mark.parametrize(
    ("seqs", "decode"),
    [(1, (1,)), (3, (1, 2, 3)), (16, (1, 2, 4, 8, 16)), (40, (1, 2, 4, 8, 16, 24, 32, 40))],
)
def test_decode_buckets_stop_at_the_limit_and_hold_it(seqs: int, decode: tuple[int, ...]) -> None:
    assert plan_buckets(seqs, 512).decode == decode


@pytest.mark.parametrize(
    ("tokens", "prefill"),
    [(16, (16,)), (512, (128, 256, 512)), (700, (128, 256, 512, 700)), (9000, (128, 256, 512, 1024))],
)
def test_prefill_buckets_stop_at_the_step_and_where_launches_no_longer_show(
    tokens: int, prefill: tuple[int, ...]
) -> None:
    assert plan_buckets(16, tokens).prefill == prefill


def test_a_quiet_service_keeps_small_buckets_and_one_for_a_burst() -> None:
    plan = plan_buckets(128, 512, profile(peak=5))
    assert plan.decode == (1, 2, 4, 8, 128)
    assert plan.planned_from == "profile"


def test_prefill_buckets_follow_the_prompts_lengths() -> None:
    short = Histogram((64, 128, 1024), (0.5, 0.49, 0.01))
    assert plan_buckets(16, 1024, profile(lengths=short)).prefill == (128, 1024), "2 % pay, the longest still fit"
    long = Histogram((1024, 4096), (0.1, 0.9))
    assert plan_buckets(16, 1024, profile(lengths=long)).prefill == (1024,)


def test_a_profile_without_lengths_or_concurrency_changes_nothing() -> None:
    bare = Profile((Cell("any", "any", 1.0),))
    with_profile, without = plan_buckets(64, 512, bare), plan_buckets(64, 512)
    assert (with_profile.decode, with_profile.prefill) == (without.decode, without.prefill)


def test_kernels_for_many_rows_are_wanted_only_where_they_run() -> None:
    assert [each.name for each in plan_buckets(16, 512).classes] == ["decode", "prefill"]
    assert [each.name for each in plan_buckets(17, 512).classes] == ["decode", "decode-wide", "prefill"]


def test_the_plan_is_plain_data() -> None:
    assert plan_buckets(2, 128).to_json() == {
        "version": 1, "few_rows": 16, "decode": (1, 2), "prefill": (128,), "planned_from": "limits",
    }  # fmt: skip
