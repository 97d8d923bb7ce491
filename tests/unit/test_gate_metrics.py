"""Token metrics against closed forms, and intervals that resample conversations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.gate.bootstrap import METRICS, Resampler, estimate
from quantkit.gate.metrics import Scores, clustered_mean, score_rows, summarize


def scores(kl: list[float], cluster: list[int], nll_gap: float = 0.0) -> Scores:
    count = len(kl)
    base = np.linspace(0.5, 2.0, count)
    return Scores(np.array(cluster, np.int32), np.array(kl), np.array(kl) < 0.5, base, base + nll_gap)


def test_kl_of_two_known_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    kl, same, nll = score_rows(p.log(), q.log() + 7.0, torch.tensor([2]))
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert kl.item() == pytest.approx(expected, rel=1e-6)
    assert not same.item()
    assert nll.item() == pytest.approx(math.log(2), rel=1e-6)


def test_kl_of_gaussian_softmax_shift_is_zero_and_of_equal_logits_exactly_zero() -> None:
    logits = torch.randn(16, 500, generator=torch.Generator().manual_seed(0)) * 4
    kl, same, _ = score_rows(torch.log_softmax(logits, -1), logits, torch.zeros(16, dtype=torch.long))
    assert torch.equal(kl, torch.zeros(16))
    assert same.all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31 - 1), st.floats(0.01, 3.0))
def test_kl_agrees_with_float64_and_is_never_negative(seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    base, candidate = (torch.randn(4, 200, generator=generator) * spread for _ in range(2))
    expected = torch.nn.functional.kl_div(
        torch.log_softmax(candidate.double(), -1),
        torch.log_softmax(base.double(), -1),
        log_target=True,
        reduction="none",
    ).sum(-1)
    kl, _, _ = score_rows(torch.log_softmax(base, -1), candidate, torch.zeros(4, dtype=torch.long))
    assert (kl >= 0).all()
    torch.testing.assert_close(kl.double(), expected, rtol=1e-4, atol=1e-6)


def test_summary_of_hand_made_scores() -> None:
    found = summarize(scores([0.0, 0.2, 0.4, 1.0], [0, 0, 1, 1], nll_gap=math.log(1.1)))
    assert found.mean_kl == pytest.approx(0.4)
    assert found.max_kl == 1.0
    assert found.same_top1 == 0.75
    assert found.ppl_ratio == pytest.approx(1.1)
    assert found.ppl_ratio_se == pytest.approx(0.0, abs=1e-12)  # paired: a constant gap has no error
    assert found.conversations == 2


def test_standard_error_grows_when_tokens_of_a_conversation_agree() -> None:
    values = np.repeat([0.0, 1.0, 0.0, 1.0], 25)
    _, clustered = clustered_mean(values, np.repeat(np.arange(4), 25).astype(np.int32))
    _, independent = clustered_mean(values, np.arange(100, dtype=np.int32))
    assert clustered > 4 * independent
    assert independent == pytest.approx(values.std(ddof=1) / 10, rel=1e-6)


def test_bootstrap_is_fixed_by_its_seed() -> None:
    many = scores(list(np.random.default_rng(1).exponential(size=200)), list(np.arange(200) // 10))
    draws = [Resampler(many.cluster, samples=200, seed=seed) for seed in (3, 3, 4)]
    for name in METRICS:
        first, again, other = (one.metric(name, many) for one in draws)
        assert np.array_equal(first, again)
        assert name == "ppl_ratio" or not np.array_equal(first[1:], other[1:])


def test_bootstrap_interval_matches_the_standard_error_on_many_conversations() -> None:
    many = scores(list(np.random.default_rng(2).exponential(size=4000)), list(np.arange(4000) // 10))
    mean, se = clustered_mean(many.kl, many.cluster)
    found = estimate(Resampler(many.cluster, samples=2000, seed=0).mean(many.kl), 0.95)
    assert found.value == pytest.approx(mean)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * se, rel=0.1)


def test_bootstrap_quantile_of_the_sample_itself_is_the_quantile() -> None:
    many = scores(list(np.arange(1000) / 1000), list(np.arange(1000) // 50))
    found = Resampler(many.cluster, samples=100, seed=0).quantile(many.kl, 0.99)
    assert found[0] == pytest.approx(0.989)
    assert found[1:].max() <= 0.999


def test_tables_and_rules_take_the_same_quantile() -> None:
    many = scores(list(np.random.default_rng(2).exponential(size=777)), list(np.arange(777) // 9))
    rule = Resampler(many.cluster, samples=1, seed=0).metric("p99_kl", many)[0]
    assert summarize(many).p99_kl == rule
    assert rule in many.kl
