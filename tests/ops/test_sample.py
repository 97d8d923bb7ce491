"""Sampling: the native draw equals the plain one on every instruction set, and follows the distribution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from quantkit_kernels import cpu
from quantkit_kernels.ops import sample
from quantkit_kernels.ops.sample import SampleRow

CLOSE = 3e-5
"""Of the whole: weights are float32 in one and float64 in the other."""


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def drawn(logits, rows, isa=None, threads=2):
    return cpu.Sampler(logits.shape[1], threads, isa).sample(logits, rows)


def assert_agrees(values, row, got):
    """`got` is a draw the plain form allows."""
    wanted = sample.reference(values[None], [row])[0]
    if wanted.token is None:
        assert got == wanted
        return
    if row.temperature < sample.COLDEST:
        assert got.token == wanted.token
    else:
        # a rounding may move what top_p and min_p keep, not more
        bounds = itertools.product((1.0, 1 - CLOSE, 1 + CLOSE), repeat=2)
        edges = (row._replace(top_p=min(1.0, row.top_p * p), min_p=min(1.0, row.min_p * m)) for p, m in bounds)
        changed = sample.adjusted(values, row)
        assert any(allows(changed, edge, got.token) for edge in edges), (row, got, wanted)
    if row.logprobs is None:
        assert got.logprob is None
        return
    below = values.astype(np.float64) - values.max()
    assert got.top_ids == wanted.top_ids
    np.testing.assert_allclose(got.top_logprobs, wanted.top_logprobs, atol=1e-5, rtol=1e-6)
    assert got.logprob == pytest.approx(below[got.token] - np.log(np.exp(below).sum()), abs=1e-5, rel=1e-6)


def allows(changed, row, token):
    """Whether the uniform number lies within the token's share of the running sum."""
    share = sample.probabilities(changed, row)
    after, u = np.cumsum(share)[token], sample.uniform(row.seed, row.position)
    return share[token] > 0 and after - share[token] - CLOSE <= u <= after + CLOSE


def random_row(rng, vocab):
    one = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    length = int(rng.integers(0, 40))
    tokens = rng.integers(0, vocab, length).astype(np.int32)
    return SampleRow(
        bias={int(t): float(rng.uniform(-100, 100)) for t in rng.integers(0, vocab, one(0, 0, 3))},
        tokens=tokens,
        prompt=int(rng.integers(0, length + 1)),
        repetition=one(1.0, 1.0, 1.3, 0.7, 1e300, 1e-300),
        presence=one(0.0, 0.0, 1.5, -2.0),
        frequency=one(0.0, 0.0, 0.3, -0.3),
        banned=frozenset(rng.integers(0, vocab, one(0, 0, 2)).tolist()),
        temperature=one(0.0, 1e-300, 1.1e-5, 1e-3, 0.3, 0.7, 1.0, 1.5, 20.0, 1e30, 1e300),
        top_k=one(0, 0, 1, 2, 5, 40, max(1, vocab // 2), vocab, vocab + 1, 2**31 - 1),
        top_p=one(1.0, 1.0, 0.999999, 0.95, 0.5, 0.1, 1e-9, 5e-324),
        min_p=one(0.0, 0.0, 1e-9, 0.05, 0.5, 1.0),
        seed=int(rng.integers(0, 2**63)),
        position=int(rng.integers(0, 1000)),
        logprobs=one(None, 0, 1, 20),
    )


def random_logits(rng, rows, vocab):
    kind = rng.integers(6)
    x = rng.standard_normal((rows, vocab)) * rng.choice([0.0, 0.01, 1.0, 3.0, 30.0])
    if kind == 0:
        x = np.round(x)  # ties
    if kind == 1:
        x[rng.random(x.shape) < 0.6] = -np.inf
    if kind == 2:
        x[rng.integers(rows), rng.integers(vocab)] = rng.choice([np.nan, np.inf, -np.inf, 3e38])
    if kind == 3:
        x[rng.integers(rows)] = rng.choice([-np.inf, 0.0, -3.4e38, 3.4e38])
    return x.astype(np.float32)


def test_random_rows_are_drawn_as_the_plain_form_draws_them(isa, rng):
    for vocab in (1, 2, 15, 16, 17, 127, 128, 129, 1000, 4099, 20_011):
        for count in (1, 2, 7, 64) if vocab < 2000 else (3,):
            logits = random_logits(rng, count, vocab)
            rows = [random_row(rng, vocab) for _ in range(count)]
            for values, row, got in zip(logits, rows, drawn(logits, rows, isa), strict=True):
                assert_agrees(values, row, got)


def test_bits_do_not_depend_on_the_instruction_set_the_batch_or_the_threads(rng):
    for vocab in (33, 1000, 30_001):
        logits = random_logits(rng, 8, vocab)
        rows = [random_row(rng, vocab) for _ in range(8)]
        alone = [drawn(logits[i : i + 1], rows[i : i + 1], "portable", 1)[0] for i in range(8)]
        for isa in cpu.supported_isas():
            for threads in (1, 2, 5):
                assert drawn(logits, rows, isa, threads) == alone


def test_the_same_sampler_draws_the_same_again_whatever_it_drew_between(rng):
    sampler = cpu.Sampler(3000)
    logits = random_logits(rng, 16, 3000)
    rows = [random_row(rng, 3000) for _ in range(16)]
    first = sampler.sample(logits, rows)
    sampler.sample(random_logits(rng, 5, 3000), [random_row(rng, 3000) for _ in range(5)])
    assert sampler.sample(logits, rows) == first


def test_logits_are_left_as_they_were_and_rows_beyond_are_not_read(rng):
    held = np.full((5, 400), np.nan, np.float32)
    held[:3] = rng.standard_normal((3, 400))
    before = held.copy()
    rows = [SampleRow(temperature=1.0, tokens=np.arange(9, dtype=np.int32), repetition=1.5, logprobs=3)] * 3
    assert all(got.token is not None for got in drawn(held[:3], rows))
    np.testing.assert_array_equal(held, before)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_p": 0.5}, 2), ({"top_p": 0.5000001}, 3), ({"top_p": 0.25}, 1), ({"top_p": 1e-12}, 1),
        ({"top_p": 0.75}, 3), ({"top_p": 0.7500001}, 4), ({"top_k": 3}, 3), ({"top_k": 3, "top_p": 0.5}, 2),
        ({"top_k": 2, "top_p": 0.5}, 1), ({"min_p": 1.0}, 4), ({}, 4), ({"top_k": 4, "min_p": 1.0, "top_p": 0.75}, 3),
    ],
)  # fmt: skip
def test_filters_cut_equals_exactly_at_their_bound_by_id(filters, kept, isa):
    # 700 ids in six blocks: the four equals lie in three of them; others have a weight of exactly zero
    values = np.full(700, -1000.0, np.float32)
    ids = [5, 140, 141, 600]
    values[ids] = 2.5
    rows = [SampleRow(temperature=1.0, seed=seed, **filters) for seed in range(64)]
    tokens = {got.token for got in drawn(np.tile(values, (64, 1)), rows, isa)}
    assert tokens == set(ids[:kept])
    assert {got.token for got in sample.reference(np.tile(values, (64, 1)), rows)} == tokens


FILTERED = [
    {}, {"temperature": 0.5}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
]  # fmt: skip


@pytest.mark.parametrize("filters", FILTERED)
def test_draws_over_many_seeds_follow_the_distribution(filters):
    from scipy.stats import chisquare

    values = (np.random.default_rng(7).standard_normal(300) * 1.5).astype(np.float32)
    row = SampleRow(**{"temperature": 1.0, **filters})
    share = sample.probabilities(values, row)
    count = 40_000
    tokens = np.array(
        [got.token for got in drawn(np.tile(values, (count, 1)), [row._replace(seed=s) for s in range(count)])]
    )
    seen = np.bincount(tokens, minlength=300)
    assert not seen[share == 0].any()
    common = share * count >= 10
    rest = [seen[~common].sum()], [count * share[~common].sum()]
    wanted = np.append(count * share[common], rest[1] if rest[1][0] else [])
    found = np.append(seen[common], rest[0] if rest[1][0] else [])
    assert chisquare(found, wanted * found.sum() / wanted.sum()).pvalue > 1e-3


def test_uniform_numbers_are_numpys_philox():
    # a flat row makes the token tell the number: 2^14 ids, so 14 bits of it
    size = 1 << 14
    rows = [
        SampleRow(temperature=1.0, seed=seed, position=position)
        for seed in (0, 1, 2**53 + 1, 2**63, 2**64 - 1)
        for position in (0, 1, 77, 2**40)
    ]
    got = drawn(np.zeros((len(rows), size), np.float32), rows)
    assert [g.token for g in got] == [int(sample.uniform(row.seed, row.position) * size) for row in rows]


def test_frequency_penalties_round_once_for_each_time(isa):
    values = np.array([[2.0**24, 2.0**24 - 10]], np.float32)
    row = SampleRow(tokens=np.zeros(40, np.int32), frequency=0.5)  # half of what a number of this size can lose
    assert drawn(values, [row], isa)[0].token == sample.reference(values, [row])[0].token == 0


def test_an_id_outside_the_vocabulary_is_an_index_error_and_draws_nothing():
    logits = np.zeros((2, 10), np.float32)
    for row in (
        SampleRow(bias={10: 1.0}), SampleRow(banned=[-1]), SampleRow(tokens=np.array([3, 10], np.int32), presence=1.0),
    ):  # fmt: skip
        with pytest.raises(IndexError, match="outside the vocabulary of 10"):
            drawn(logits, [SampleRow(), row])


def test_logits_of_another_kind_are_refused():
    for logits in (np.zeros((1, 9), np.float32), np.zeros((1, 10)), np.zeros((2, 20), np.float32)[:, ::2]):
        with pytest.raises(ValueError, match="logits must be contiguous float32"):
            cpu.Sampler(10).sample(logits, [SampleRow()] * len(logits))
