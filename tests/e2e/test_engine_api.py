"""Engine in Python: whole, streaming and async answers, stop strings, admission, closing."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest

from quantkit import Engine, SamplingParams
from quantkit.errors import CheckpointError, PreflightError, RecipeError, RequestError
from quantkit.runtime.admission import NotAdmitted
from tests.e2e.gate_case import make_case
from tests.tiny import make_checkpoint

CHAT = [{"role": "user", "content": "Please summarise the invoice 世界."}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("source"), "llama", dtype="float16")
    with Engine.from_source(str(folder), threads=1) as engine:
        yield engine
        engine.loaded.core.check()
        stats = engine.stats()
        assert stats.blocks_used == 0
        assert stats.accepted == stats.finished + stats.failed + stats.aborted


def test_text_token_ids_and_conversations_are_prompts_one_or_many(engine):
    ids = engine.text.encode_chat(CHAT)
    [chat] = engine.generate(CHAT, GREEDY)
    [tokens] = engine.generate(ids, GREEDY)
    assert chat.token_ids == tokens.token_ids
    assert chat.prompt_tokens == len(ids)
    both = engine.generate(["Hello", CHAT], [GREEDY, GREEDY])
    assert both[1].token_ids == chat.token_ids
    assert both[0].prompt_tokens == len(engine.text.encode("Hello", add_special_tokens=True))
    assert engine.generate([], GREEDY) == []
    assert [answer.finish_reason for answer in both] == ["length", "length"]


@pytest.mark.parametrize(
    "given",
    [None, 5, [None], [1.5], [1, "a"], ["a", 1], b"abc", {"role": "user"}, {"a", "b"}, [True], "\ud800"],
    ids=repr,
)
def test_what_is_no_prompt_is_a_request_error(engine, given):
    with pytest.raises(RequestError):
        engine.generate(given, GREEDY)


def test_arrays_are_token_ids(engine):
    ids = engine.text.encode("Hello there")
    [listed], [array] = engine.generate(ids, GREEDY), engine.generate(np.array(ids), GREEDY)
    assert array.token_ids == listed.token_ids


@pytest.mark.parametrize(
    "scheduling",
    [{"cache_salt": 5}, {"fork_of": ["x"]}, {"priority": "high"}, {"n": 1.5}, {"params": {"seed": 1}}],
    ids=str,
)
def test_a_wrong_argument_fails_its_call_and_the_engine_goes_on(engine, scheduling):
    long = [70] * 64  # several blocks, so that the salt is looked at
    with pytest.raises((RequestError, TypeError)):
        engine.generate(long, **{"params": GREEDY} | scheduling)
    assert engine.generate(long, GREEDY, cache_salt="\ud800")[0].finish_reason == "length"


def test_default_parameters_are_the_models_own(engine):
    [answer] = engine.generate("Hello")
    [greedy] = engine.generate("Hello", engine.text.default_sampling())
    assert answer.token_ids == greedy.token_ids
    assert answer.finish_reason in ("stop", "length")


def test_streamed_pieces_join_to_the_whole_answer(engine):
    [whole] = engine.generate(CHAT, GREEDY)
    pieces = list(engine.stream(CHAT, GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text == engine.text.decode(whole.token_ids)
    assert len(pieces) == 40
    assert pieces[-1].completion.finish_reason == "length"


def test_stop_string_cuts_the_text_exactly_and_ends_the_request(engine):
    [whole] = engine.generate(CHAT, GREEDY)
    stop = whole.text[10:13]
    before = whole.text[: whole.text.index(stop)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=stop)
    finished = engine.stats().finished
    pieces = list(engine.stream(CHAT, params))
    assert "".join(piece.text for piece in pieces) == before
    assert pieces[-1].completion.finish_reason == "stop"
    assert len(pieces[-1].completion.token_ids) < 40
    for _ in range(1000):  # the engine learns of it between two steps
        if engine.stats().running == 0:
            break
        threading.Event().wait(0.005)
    assert engine.stats().finished == finished + 1


def test_the_stop_token_is_reported_but_is_no_text(engine):
    [whole] = engine.generate(CHAT, GREEDY)
    stop = next(t for i, t in enumerate(whole.token_ids) if i > 5 and t not in whole.token_ids[:i])
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
    [cut] = engine.generate(CHAT, params)
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert cut.text == engine.text.decode(cut.token_ids[:-1])
    assert cut.finish_reason == "stop"


def test_several_answers_to_one_prompt(engine):
    params = SamplingParams(seed=1, max_tokens=10, ignore_eos=True)
    answers = engine.generate([CHAT, "Hello"], params, n=3)
    assert [answer.index for answer in answers] == list(range(6))
    assert len({tuple(answer.token_ids) for answer in answers[:3]}) == 3
    [alone] = engine.generate(CHAT, params)
    assert answers[0].token_ids == alone.token_ids


def test_a_refused_request_refuses_its_call_alone(engine):
    before = engine.stats()
    with pytest.raises(RequestError, match="the prompt has 300 tokens"):
        engine.generate([[5] * 4, [5] * 300], GREEDY)
    with pytest.raises(RequestError, match="2 prompts but 1 sampling"):
        engine.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="n must be an integer of at least 1"):
        engine.generate("a", GREEDY, n=0)
    [answer] = engine.generate("a", GREEDY)
    assert len(answer.token_ids) == 40
    assert engine.stats().aborted == before.aborted + 1


def test_leaving_a_stream_early_aborts_it(engine):
    aborted = engine.stats().aborted
    stream = engine.stream(CHAT, SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    engine.generate("a", GREEDY)
    assert engine.stats().aborted == aborted + 1


def test_threads_share_one_engine(engine):
    alone = [engine.generate(f"prompt {i}", GREEDY)[0].token_ids for i in range(6)]
    got = {}

    def ask(i):
        got[i] = engine.generate(f"prompt {i}", GREEDY)[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(6)] == alone


def test_async_answers_and_streams_run_together(engine):
    alone = [engine.generate(f"prompt {i}", GREEDY)[0].text for i in range(3)]

    async def stream(i):
        return "".join([piece.text async for piece in engine.astream(f"prompt {i}", GREEDY)])

    async def everything():
        whole = engine.agenerate(["prompt 0", "prompt 1"], GREEDY)
        streams = [stream(i) for i in range(3)]
        answers, *texts = await asyncio.gather(whole, *streams)
        return [answer.text for answer in answers], texts

    whole, texts = asyncio.run(everything())
    assert texts == alone
    assert whole == alone[:2]


def test_cancelled_async_call_returns_its_blocks(engine):
    aborted = engine.stats().aborted

    async def cancelled():
        task = asyncio.create_task(engine.agenerate("a", SamplingParams(max_tokens=200, ignore_eos=True)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    engine.generate("a", GREEDY)
    assert engine.stats().aborted <= aborted + 1
    assert engine.stats().running == 0


def test_a_closed_engine_says_so_and_closes_again(tmp_path):
    engine = Engine.from_source(str(make_checkpoint(tmp_path, "qwen2")), threads=1)
    stream = engine.stream("a", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    engine.close()
    with pytest.raises(RuntimeError, match="engine was closed"):
        list(stream)
    with pytest.raises(RuntimeError, match="engine is closed"):
        engine.generate("a")
    engine.close()


def test_an_engine_that_died_tells_everyone_waiting(tmp_path):
    engine = Engine.from_source(str(make_checkpoint(tmp_path, "qwen2")), threads=1)

    def broken(inputs):
        raise MemoryError("no memory for the step")

    engine.loaded.executor.step = broken
    with pytest.raises(MemoryError, match="no memory for the step"):
        engine.generate("a", GREEDY)
    with pytest.raises(RuntimeError, match="engine is closed"):
        engine.generate("a", GREEDY)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "gemma3_text", "phi3"])
def test_every_family_is_served_from_its_source(tmp_path, family):
    folder = make_checkpoint(tmp_path, family, dtype="bfloat16")
    with Engine.from_source(str(folder), threads=1, max_num_batched_tokens=16, kv_format="BF16") as engine:
        answers = engine.generate([CHAT, CHAT], GREEDY)
        assert answers[0].token_ids == answers[1].token_ids
        assert len(answers[0].token_ids) == 40


def test_contradictory_options_are_named_before_anything_is_loaded(tmp_path):
    folder = str(make_checkpoint(tmp_path, "llama"))
    for options, error, message in (
        ({"max_model_len": 500}, RecipeError, "max_model_len 500 exceeds the 256 positions"),
        ({"max_num_seqs": 0}, RecipeError, "max_num_seqs must be greater than 0"),
        ({"max_num_batched_tokens": 4}, RecipeError, "max_num_batched_tokens 4 is less than max_num_seqs 16"),
        ({"kv_cache_gib": 1e-6}, PreflightError, "one sequence of 256 tokens needs"),
        ({"kv_format": "INT8"}, RecipeError, "no INT8 cache"),
    ):
        with pytest.raises(error, match=message):
            Engine.from_source(folder, **options)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("case")).artifact("artifact")


def judge(artifact, digest, verdict, **coverage):
    path = artifact / "evidence" / "gate" / "verdict.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    outcome = "fail" if verdict == "fail" else "pass"
    rule = {"name": "mean_kl", "outcome": outcome, "text": "mean KL 0.5 exceeds 0.1"}
    content = {"payload_digest": digest, "verdict": verdict, "coverage": coverage, "rules": [rule]}
    path.write_text(json.dumps(content))


def test_an_artifact_is_served_only_as_its_verdict_allows(artifact):
    with pytest.raises(NotAdmitted, match=r"no gate verdict covers .* --accept-ungated"):
        Engine(artifact, threads=1)
    with Engine(artifact, threads=1, accept_ungated=True) as engine:
        [answer] = engine.generate(CHAT, GREEDY)
        assert len(answer.token_ids) == 40
        digest, target = engine.loaded.payload_digest, engine.loaded.target
        assert engine.loaded.standing.verdict == "none"
    assert target["kv_format"] == "INT8"

    judge(artifact, digest, "pending-review", **target, threads=2)
    with Engine(artifact, threads=1) as engine:
        assert engine.loaded.standing.verdict == "pending-review"
        assert engine.generate(CHAT, GREEDY)[0].token_ids == answer.token_ids

    judge(artifact, digest, "pass", **(target | {"isa": "some-other"}))
    with pytest.raises(NotAdmitted, match="the verdict covers cpu some-other, exact compute, INT8 KV cache, not cpu"):
        Engine(artifact, threads=1)

    judge(artifact, "sha256:of-another-payload", "pass", **target)
    with pytest.raises(NotAdmitted, match="no gate verdict"):
        Engine(artifact, threads=1)

    judge(artifact, digest, "fail", **target)
    with pytest.raises(NotAdmitted, match=r"failed this artifact \(mean KL 0.5 exceeds 0.1\)"):
        Engine(artifact, threads=1, accept_ungated=True)

    (artifact / "evidence" / "gate" / "verdict.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a gate verdict"):
        Engine(artifact, threads=1)
