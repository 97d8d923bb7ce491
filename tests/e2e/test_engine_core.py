"""EngineCore over the real executor: what RUNTIME.md says must hold, on a tiny quantized model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quantkit.errors import RequestError
from quantkit.runtime.request import EngineRequest
from quantkit.runtime.sampling import SamplingParams
from tests.e2e.engine_case import GREEDY, VOCAB, drain, make_core, make_executor, prompts, run


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    return make_executor(tmp_path_factory.mktemp("model"))


def greedy(tokens, **kwargs):
    return replace(GREEDY, max_tokens=tokens, **kwargs)


def reconciles(core):
    core.check()
    stats = core.stats()
    assert stats.blocks_used == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert stats.accepted == stats.finished + stats.failed + stats.aborted


def test_two_prompts_of_800_tokens_share_step_one_and_both_are_right(executor):
    asked = prompts(2, low=800, high=801)
    alone = [run(make_core(executor), [prompt], greedy(4))[0] for prompt in asked]
    core = make_core(executor)
    for i, prompt in enumerate(asked):
        core.add_request(EngineRequest(f"r{i}", prompt, greedy(4)))
    first = core.step()
    assert [output.request_id for output in first] == ["r0"]
    assert [request.num_computed for request in core.scheduler.running] == [800, 224]
    rest = drain(core)
    assert [t for o in [*first, *rest["r0"]] for t in o.token_ids] == alone[0]
    assert [t for o in rest["r1"] for t in o.token_ids] == alone[1]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 41, "enable_prefix_caching": False},
        {"num_blocks": 10},
        {"num_blocks": 10, "admission": "max-utilization"},
        {"num_blocks": 10, "admission": "max-utilization", "enable_prefix_caching": False},
        {"optimism": 0.3, "num_blocks": 16},
    ],
    ids=str,
)
def test_greedy_output_never_depends_on_how_it_was_scheduled(executor, config):
    asked = [p + p[:20] for p in prompts(12, seed=3)]
    asked[5] = asked[2][:32] + asked[5][:10]  # a prefix to hit
    expected = [run(make_core(executor, enable_prefix_caching=False), [prompt], greedy(40))[0] for prompt in asked]
    core = make_core(executor, **config)
    assert run(core, asked, greedy(40)) == expected
    if config.get("admission") == "max-utilization":
        assert core.stats().preemptions > 0
    reconciles(core)


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running", "preempted"])
def test_abort_in_every_state_returns_all_blocks_and_disturbs_nobody(executor, state):
    asked = prompts(4, seed=5, low=50, high=60)
    other = run(make_core(executor), asked[:1], greedy(40))[0]
    config = {"num_blocks": 12, "admission": "max-utilization"} if state == "preempted" else {}
    limit = {"waiting": {"max_num_seqs": 1}, "prefilling": {"max_num_batched_tokens": 17}}.get(state, {})
    core = make_core(executor, **config, **limit, enable_prefix_caching=False)
    core.add_request(EngineRequest("other", asked[0], greedy(40)))
    core.add_request(EngineRequest("victim", asked[1], greedy(60)))
    victim = core._requests["victim"]
    outputs = []
    while (
        core.has_work()
        and not {
            "waiting": victim.ticket and core.stats().steps > 2,
            "prefilling": 0 < victim.num_computed < victim.prompt_len,
            "running": victim.num_output > 2,
            "preempted": victim.preemptions and victim.ticket,
        }[state]
    ):
        outputs += core.step()
    assert core.abort("victim")
    assert not core.abort("victim")
    core.check()
    outputs += drain(core)["other"]
    assert [t for o in outputs if o.request_id == "other" for t in o.token_ids] == other
    assert core.stats().aborted == 1
    reconciles(core)


def test_a_refused_request_leaves_the_engine_as_it_was(executor):
    core = make_core(executor, num_blocks=20)
    core.add_request(EngineRequest("good", [1, 2, 3], greedy(5)))
    for bad, message in (
        (EngineRequest("good", [1], greedy(1)), "already in use"),
        (EngineRequest("a", [], greedy(1)), "prompt is empty"),
        (EngineRequest("a", [VOCAB], greedy(1)), f"token id {VOCAB} is outside the vocabulary"),
        (EngineRequest("a", [-1], greedy(1)), "token id -1 is outside"),
        (EngineRequest("a", ["x"], greedy(1)), "list of token ids"),
        (EngineRequest("a", [[1], [2, 3]], greedy(1)), "list of token ids"),
        (EngineRequest("a", [1] * 1024, greedy(1)), "has 1024 tokens; .* limit of 1024"),
        (EngineRequest("a", [1] * 1000, greedy(25)), "max_tokens 25 with a prompt of 1000 tokens .* limit of 1024"),
        (EngineRequest("a", [1] * 300, greedy(10)), "need 20 cache blocks, there are 19"),
        (EngineRequest("a", [1], replace(GREEDY, logit_bias={VOCAB: 1.0})), "outside the vocabulary"),
        (EngineRequest("a", [1], GREEDY, deadline_ms=-1), "deadline_ms must be greater than 0"),
        (EngineRequest("a", [1], GREEDY, priority="high"), "priority must be an integer"),
    ):
        with pytest.raises(RequestError, match=message):
            core.add_request(bad)
        core.check()
    assert len([t for o in drain(core)["good"] for t in o.token_ids]) == 5
    assert (core.stats().accepted, core.stats().refused) == (1, 12)
    reconciles(core)


def test_nan_logits_fail_their_requests_and_the_engine_serves_on(executor):
    real = executor.step

    class Poisoned:
        """The real executor, whose next logits row 1 is spoilt as a broken kernel would."""

        poison = True

        def step(self, inputs):
            logits = real(inputs)
            if self.poison:
                logits[1, 7] = np.nan
            return logits

    poisoned = Poisoned()
    core = make_core(executor)
    core.executor = poisoned
    for i in range(3):
        core.add_request(EngineRequest(f"r{i}", [5 + i, 6, 7], greedy(3)))
    first = {output.request_id: output for output in core.step()}
    assert first["r1"].finish_reason == "error"
    assert "NaN" in first["r1"].error
    assert first["r0"].token_ids
    poisoned.poison = False
    rest = drain(core)
    assert {name: rest[name][-1].finish_reason for name in ("r0", "r2")} == {"r0": "length", "r2": "length"}
    assert core.stats().failed == 1
    reconciles(core)


def test_stop_ids_end_a_request_and_ignore_eos_goes_on(executor):
    [tokens] = run(make_core(executor), [[3, 4, 5]], greedy(20))
    stop = tokens[5]
    first = tokens.index(stop)
    for config, params in (
        ({"stop_token_ids": frozenset([stop])}, replace(greedy(20), ignore_eos=False)),
        ({}, greedy(20, stop_token_ids=(stop,))),
    ):
        core = make_core(executor, **config)
        core.add_request(EngineRequest("r", [3, 4, 5], params))
        outputs = drain(core)["r"]
        assert [t for o in outputs for t in o.token_ids] == tokens[: first + 1]
        assert outputs[-1].finish_reason == "stop"
    core = make_core(executor, stop_token_ids=frozenset([stop]))
    assert run(core, [[3, 4, 5]], greedy(20)) == [tokens]


def test_min_tokens_keeps_stop_ids_away_until_reached(executor):
    [tokens] = run(make_core(executor), [[3, 4, 5]], greedy(20))
    params = greedy(20, stop_token_ids=(tokens[2],), min_tokens=10)
    [got] = run(make_core(executor), [[3, 4, 5]], params)
    assert tokens[2] not in got[:10]
    assert got[:2] == tokens[:2]


def test_prefix_hit_while_the_owner_lives_and_after_it_is_gone(executor):
    core = make_core(executor)
    prompt = prompts(1, low=50, high=51)[0]
    core.add_request(EngineRequest("owner", prompt, greedy(30)))
    core.step()
    core.add_request(EngineRequest("guest", prompt, greedy(10)))
    core.step()
    owner, guest = core.scheduler.running
    assert guest.blocks[:3] == owner.blocks[:3]
    assert [block.ref_count for block in owner.blocks[:3]] == [2, 2, 2]
    outputs = drain(core)
    assert outputs["guest"][0].cached_tokens == 48
    core.add_request(EngineRequest("late", prompt, greedy(2)))
    assert drain(core)["late"][0].cached_tokens == 48
    assert (core.stats().prefix_queries, core.stats().prefix_hits) == (150, 96)
    reconciles(core)


def test_tenants_with_other_salts_share_nothing(executor):
    core = make_core(executor)
    prompt = prompts(1, low=50, high=51)[0]
    outputs = {}
    for salt in ("a", "b", "a"):
        core.add_request(EngineRequest(f"r{len(outputs)}", prompt, greedy(2), cache_salt=salt))
        outputs |= drain(core)
    assert [outputs[f"r{i}"][0].cached_tokens for i in range(3)] == [0, 0, 48]


def test_preempted_request_keeps_what_it_has_sent_and_doubles_nothing(executor):
    asked = prompts(4, seed=9, low=40, high=50)
    params = [SamplingParams(seed=i, max_tokens=60, ignore_eos=True, logprobs=1) for i in range(4)]
    alone = [run(make_core(executor), [p], s)[0] for p, s in zip(asked, params, strict=True)]
    core = make_core(executor, num_blocks=14, admission="max-utilization", enable_prefix_caching=False)
    for i, (prompt, sampling) in enumerate(zip(asked, params, strict=True)):
        core.add_request(EngineRequest(f"r{i}", prompt, sampling))
    outputs = drain(core)
    assert core.stats().preemptions > 0
    for i in range(4):
        assert [t for o in outputs[f"r{i}"] for t in o.token_ids] == alone[i]
        assert all(len(o.logprobs) == len(o.token_ids) == 1 for o in outputs[f"r{i}"])
    assert core.stats().generated_tokens == 240
    assert core.stats().first_tokens == 4


def test_engine_serves_on_after_the_pool_was_exhausted(executor):
    core = make_core(executor, num_blocks=6, enable_prefix_caching=False)
    asked = prompts(10, seed=1, low=30, high=40)
    run(core, asked, greedy(40))
    assert core.pool.counts().free == 5
    [again] = run(core, asked[:1], greedy(40))
    assert again == run(make_core(executor), asked[:1], greedy(40))[0]


def test_logprobs_have_one_entry_a_token_also_when_a_prompt_was_chunked(executor):
    core = make_core(executor, max_num_batched_tokens=16)
    core.add_request(EngineRequest("r", prompts(1, low=50, high=51)[0], greedy(6, logprobs=3)))
    outputs = drain(core)["r"]
    entries = [entry for output in outputs for entry in output.logprobs]
    assert len(entries) == 6
    for output, entry in zip(outputs, entries, strict=True):
        assert entry.top_ids[0] == output.token_ids[0]
        assert entry.logprob == entry.top_logprobs[0] >= entry.top_logprobs[1] >= entry.top_logprobs[2]


def test_answers_to_one_prompt_share_its_blocks_and_differ(executor):
    core = make_core(executor)
    asked = EngineRequest("r", prompts(1, low=50, high=51)[0], SamplingParams(seed=3, max_tokens=12, ignore_eos=True))
    for request in asked.forks(4):
        core.add_request(request)
    core.step()
    core.step()
    assert [block.ref_count for block in core.scheduler.running[0].blocks[:3]] == [4, 4, 4]
    outputs = drain(core)
    answers = {tuple(t for o in outputs[f"r-{i}"] for t in o.token_ids) for i in range(4)}
    assert len(answers) == 4
    reconciles(core)


def test_seed_decides_the_output_whatever_the_batch(executor):
    asked = prompts(6, seed=2)
    params = [SamplingParams(seed=i, max_tokens=20, ignore_eos=True) for i in range(6)]
    together = run(make_core(executor), asked, params)
    assert together == [run(make_core(executor), [p], s)[0] for p, s in zip(asked, params, strict=True)]
    assert together != run(make_core(executor), asked, [replace(p, seed=p.seed + 100) for p in params])


def test_requests_without_a_seed_draw_apart_but_the_engine_seed_repeats_them(executor):
    same = [[5, 6, 7]] * 4
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first = run(make_core(executor), same, params)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert run(make_core(executor), same, params) == first
    assert run(make_core(executor, seed=1), same, params) != first


def test_a_request_past_its_deadline_in_the_queue_is_answered(executor):
    now = [0.0]
    core = make_core(executor, max_num_seqs=1, clock=lambda: now[0])
    core.add_request(EngineRequest("long", [1, 2], greedy(30)))
    core.step()
    core.add_request(EngineRequest("late", [1, 2], greedy(5), deadline_ms=500))
    core.add_request(EngineRequest("patient", [1, 2], greedy(5), deadline_ms=60_000))
    now[0] = 1.0
    [late] = [output for output in core.step() if output.request_id == "late"]
    assert (late.finish_reason, late.token_ids) == ("deadline", [])
    assert "1000 ms" in late.error
    assert drain(core)["patient"][-1].finish_reason == "length"
    assert core.stats().failed == 1
    reconciles(core)


def test_counters_and_times_reconcile(executor):
    core = make_core(executor, num_blocks=10, admission="max-utilization")
    for i, prompt in enumerate(prompts(12, seed=7, low=20, high=40)):
        core.add_request(EngineRequest(f"r{i}", prompt, greedy(20 + i)))
    for i in (11, 3):
        core.abort(f"r{i}")
    for _ in range(30):
        core.step()
    core.abort("r4", finished=True)
    outputs = drain(core)
    stats = core.stats()
    assert (stats.accepted, stats.aborted, stats.finished, stats.failed) == (12, 2, 10, 0)
    assert stats.first_tokens == 10
    for parcel in outputs.values():
        if parcel[-1].finish_reason is not None:
            times = parcel[-1].times
            assert times.arrived <= times.admitted <= times.first_token <= times.finished
    reconciles(core)


def test_a_spilled_model_generates_the_same(executor, tmp_path):
    (tmp_path / "spill").mkdir()
    spilled = make_executor(tmp_path / "model", spill=tmp_path / "spill")
    asked = prompts(6, seed=9)
    assert run(make_core(spilled), asked, greedy(24)) == run(make_core(executor), asked, greedy(24))
    assert spilled.weight_bytes == executor.weight_bytes
