"""SamplingParams and Sampler: what is refused, and what is drawn."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import RequestError
from quantkit.runtime.request import Request
from quantkit.runtime.sampler import Sampler
from quantkit.runtime.sampling import SamplingParams
from quantkit_kernels.ops.sample import uniform

V = 1000


def request(params, *, prompt=(1,), output=(), seed=0, stop_ids=()):
    tokens = np.asarray([*prompt, *output], np.int32)
    return Request("r", params, tokens, len(prompt), 10_000, seed, frozenset(stop_ids), (0, 0.0, 0), 0.0,
                   greedy=params.plain_greedy, num_tokens=len(tokens))  # fmt: skip


def rows(count=1, seed=0, scale=3.0, vocab=V):
    return (np.random.default_rng(seed).standard_normal((count, vocab)) * scale).astype(np.float32)


def draw(row, params, **kwargs):
    return Sampler(len(row)).sample(row[None], [request(params, **kwargs)])[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"),
        ("temperature", True), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("top_k", 1.5), ("min_p", 1.5),
        ("repetition_penalty", 0.0), ("presence_penalty", 3.0), ("frequency_penalty", -2.5), ("max_tokens", 0),
        ("min_tokens", -1), ("seed", 1.0), ("logprobs", 21), ("logprobs", -1), ("stop", ("",)), ("stop", (3,)),
        ("stop_token_ids", (-1,)), ("logit_bias", {-1: 0.0}), ("logit_bias", {1: 101.0}), ("logit_bias", [1]),
        ("top_k", 2**31), ("min_tokens", 2**31), ("stop_token_ids", (2**31,)), ("stop_token_ids", 5), ("stop", 5),
    ],
)  # fmt: skip
def test_a_bad_parameter_is_a_request_error_naming_it(field, value):
    with pytest.raises(RequestError, match="stop" if field == "stop" else field):
        SamplingParams(**{field: value})


def test_min_tokens_beyond_max_tokens_is_refused():
    with pytest.raises(RequestError, match="min_tokens 5 exceeds max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_token_ids_outside_the_vocabulary_are_refused():
    for params in (SamplingParams(logit_bias={V: 1.0}), SamplingParams(stop_token_ids=(V,))):
        with pytest.raises(RequestError, match=f"token id {V} is outside the vocabulary of {V}"):
            params.check_vocabulary(V)


def test_one_stop_string_may_come_bare():
    assert SamplingParams(stop="END").stop == ("END",)


def test_greedy_takes_the_lowest_id_among_equals():
    row = np.zeros(V, np.float32)
    row[[700, 30, 400]] = 5.0
    assert draw(row, SamplingParams(temperature=0)).token == 30
    assert draw(row, SamplingParams(temperature=0, logprobs=1)).token == 30
    assert draw(row, SamplingParams(temperature=1e-300)).token == 30


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_token(bad, temperature):
    row = rows()[0]
    row[77] = bad
    assert draw(row, SamplingParams(temperature=temperature)).token is None


def test_a_row_of_nothing_but_minus_infinity_gives_no_token():
    assert draw(np.full(V, -np.inf, np.float32), SamplingParams(temperature=1.0)).token is None


def test_draws_follow_the_distribution():
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    for params in (
        SamplingParams(),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.999999),
        SamplingParams(min_p=0.01),
    ):
        counts = Counter(draw(row, params, seed=seed).token for seed in range(4000))
        for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
            assert abs(counts[token] / 4000 - share) < 0.03


def test_temperature_sharpens_and_flattens():
    row = np.log(np.array([0.6, 0.4], np.float32))
    first = [sum(draw(row, SamplingParams(temperature=t), seed=s).token == 0 for s in range(1000)) for t in (0.2, 1, 5)]
    assert first[0] > 850 > 700 > first[1] > 560 > first[2] > 450


def reference_kept(row, params):
    """The tokens the filters leave, the plain way: sort everything, top_k, then top_p, then min_p."""
    order = np.lexsort((np.arange(len(row)), -row))
    weights = np.exp((row[order] - row[order[0]]).astype(np.float64) / params.temperature)
    kept = params.top_k or len(order)
    order, weights = order[:kept], weights[:kept]
    if params.top_p < 1:
        kept = int(np.searchsorted(np.cumsum(weights), params.top_p * weights.sum())) + 1
        order, weights = order[:kept], weights[:kept]
    return set(order[weights >= params.min_p].tolist())


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, V]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    scale=st.sampled_from([0.1, 1.0, 5.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_filters_keep_exactly_what_sorting_everything_would(temperature, top_k, top_p, min_p, scale, seed):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = rows(seed=seed, scale=scale)[0]
    kept = reference_kept(row, params)
    drawn = {draw(row, params, seed=s).token for s in range(40)}
    assert drawn <= kept
    if len(kept) == 1:
        assert drawn == kept


def test_same_seed_same_draws_other_seed_other_draws():
    logits = rows(64)

    def run(seed):
        return [draw(row, SamplingParams(), output=[0] * i, seed=seed).token for i, row in enumerate(logits)]

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_batch_mates_never_change_a_draw():
    logits = rows(6)
    params = [SamplingParams(), SamplingParams(top_k=5), SamplingParams(temperature=0), SamplingParams(top_p=0.8),
              SamplingParams(temperature=0, repetition_penalty=1.5), SamplingParams(min_p=0.1, logprobs=2)]  # fmt: skip
    asked = [request(p, prompt=(3, 4), output=(5,), seed=i) for i, p in enumerate(params)]
    together = Sampler(V).sample(logits, asked)
    assert together == [Sampler(V).sample(logits[i : i + 1], [asked[i]])[0] for i in range(6)]


def test_without_the_native_library_the_plain_form_draws_the_same_tokens():
    code = """
import numpy as np
from quantkit.runtime.sampler import Sampler
from quantkit.runtime.sampling import SamplingParams
from quantkit_kernels import cpu
from tests.unit.test_runtime_sampling import V, request, rows
params = SamplingParams(temperature=0.9, top_k=300, top_p=0.9, min_p=0.001, repetition_penalty=1.2, logprobs=2)
drawn = Sampler(V).sample(rows(50, scale=1.0), [request(params, seed=seed) for seed in range(50)])
print(cpu.available()[0], [(draw.token, draw.logprobs.top_ids) for draw in drawn])
"""
    outputs = []
    for library in ({}, {"QUANTKIT_CPU_LIBRARY": "/nowhere"}):
        ran = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **library}, capture_output=True, text=True, check=True
        )
        outputs.append(ran.stdout.split(maxsplit=1))
    assert [available for available, _ in outputs] == ["True", "False"]
    assert outputs[0][1] == outputs[1][1]


def test_two_requests_in_one_batch_do_not_share_random_state():
    logits = np.repeat(rows(scale=0.1), 32, axis=0)
    drawn = Sampler(V).sample(logits, [request(SamplingParams(), seed=i) for i in range(32)])
    assert len({d.token for d in drawn}) > 16


def test_uniform_numbers_depend_on_seed_and_position_alone():
    numbers = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert numbers == [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(numbers)) == 2500
    assert 0 <= min(numbers) < max(numbers) < 1
    assert abs(np.mean(numbers) - 0.5) < 0.02


def test_every_seed_of_64_bits_draws_its_own_numbers():
    seeds = [0, 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]
    assert len({uniform(seed, 0) for seed in seeds}) == len(seeds)
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_answers_to_one_prompt_count_their_seed_up_within_64_bits():
    assert [SamplingParams(seed=2**64 - 2).fork(index).seed for index in range(3)] == [2**64 - 2, 2**64 - 1, 0]
    assert SamplingParams().fork(3).seed is None


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e38, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0, 1e300])
def test_extreme_penalties_and_heat_draw_a_token_still(penalty, temperature):
    params = SamplingParams(
        temperature=temperature, repetition_penalty=penalty, presence_penalty=-2.0, frequency_penalty=2.0,
        logit_bias={5: 100.0}, min_tokens=9, logprobs=3,
    )  # fmt: skip
    with np.errstate(all="raise", under="ignore"):
        drawn = draw(rows()[0], params, prompt=(1, 2), output=(3, 3), stop_ids=frozenset([7]))
    assert 0 <= drawn.token < V
    assert np.isfinite(drawn.logprobs.logprob)


def test_sampling_leaves_the_logits_as_they_were():
    logits = rows(1)
    before = logits.copy()
    Sampler(V).sample(logits, [request(SamplingParams(repetition_penalty=2.0, logit_bias={1: 5.0}, logprobs=3))])
    assert np.array_equal(logits, before)


def test_min_tokens_suppresses_stop_ids_until_reached():
    row = rows()[0]
    row[9], row[8] = 50.0, 49.0
    params = SamplingParams(temperature=0, min_tokens=2)
    assert draw(row, params, stop_ids=(9,)).token == 8
    assert draw(row, params, output=(1,), stop_ids=(9,)).token == 8
    assert draw(row, params, output=(1, 1), stop_ids=(9,)).token == 9


def test_logit_bias_and_penalties_change_the_choice_as_defined():
    row = np.zeros(V, np.float32)
    row[[10, 11, 12]] = 4.0, 3.9, 3.0
    assert draw(row, SamplingParams(temperature=0, logit_bias={12: 2.0})).token == 12
    # repetition: over prompt and output, a positive logit divided
    assert draw(row, SamplingParams(temperature=0, repetition_penalty=1.1), prompt=(10,)).token == 11
    # presence and frequency: over the output alone
    assert draw(row, SamplingParams(temperature=0, presence_penalty=0.5), prompt=(10,)).token == 10
    assert draw(row, SamplingParams(temperature=0, presence_penalty=0.5), output=(10, 10)).token == 11
    assert draw(row, SamplingParams(temperature=0, frequency_penalty=0.06), output=(10,)).token == 10
    assert draw(row, SamplingParams(temperature=0, frequency_penalty=0.06), output=(10, 10)).token == 11


def test_negative_logits_are_multiplied_by_the_repetition_penalty():
    row = np.full(V, -100.0, np.float32)
    row[[10, 11]] = -1.0, -1.5
    assert draw(row, SamplingParams(temperature=0, repetition_penalty=2.0), prompt=(10, 10)).token == 11


def test_logprobs_are_the_models_own_and_best_first():
    row = rows()[0]
    expected = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    got = draw(row, SamplingParams(temperature=0, logprobs=5, logit_bias={3: 100.0}))
    assert got.token == 3
    assert got.logprobs.logprob == pytest.approx(expected[3], abs=1e-5)
    assert got.logprobs.top_ids == np.argsort(-row)[:5].tolist()
    assert got.logprobs.top_logprobs == pytest.approx(expected[got.logprobs.top_ids].tolist(), abs=1e-5)
    assert draw(row, SamplingParams(temperature=0, logprobs=0)).logprobs.top_ids == []
