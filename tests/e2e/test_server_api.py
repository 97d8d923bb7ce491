"""The HTTP API over a real engine process with a tiny random model."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.e2e.serving import Server, eventually
from tests.tiny import make_checkpoint

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Please summarise the invoice, 谢谢"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", "llama", max_position_embeddings=1024)
    options = ("--max-num-seqs", "8", "--max-model-len", "600", "--accept-ungated", "--threads", "1")
    with Server(folder, *options, "--kv-cache-gib", "0.02") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_stays_behind(server):
    yield
    assert eventually(lambda: server.metric("quantkit_requests_in_flight") == 0)
    assert eventually(lambda: server.metric("quantkit_kv_blocks", state="used") == 0)


def ask(client, path=CHAT, **fields):
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "def add(a, b):"}
    response = client.post(path, json=prompt | {"max_tokens": 24, "ignore_eos": True} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client, path=CHAT, **fields):
    """All events of a streamed answer, decoded; the end mark is checked."""
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "def add(a, b):"}
    body = prompt | {"max_tokens": 24, "ignore_eos": True, "stream": True} | fields
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def joined(events, index=0):
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice.get("text", choice.get("delta", {}).get("content") or "") for choice in choices)


def content(answer, index=0):
    choice = answer["choices"][index]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7, "top_k": 50}])
def test_a_streamed_answer_equals_the_answer_at_once(client, path, sampling):
    whole = ask(client, path, **sampling)
    events = stream(client, path, stream_options={"include_usage": True}, **sampling)
    assert joined(events) == content(whole)
    assert events[-1]["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [events[-1]["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]
    assert whole["usage"]["completion_tokens"] == 24
    assert events[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"


def test_the_same_seed_draws_the_same_and_another_seed_differs(client):
    first, again, other = (content(ask(client, temperature=1.0, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_several_choices_differ_and_stream_as_they_would_come_at_once(client):
    fields = {"n": 3, "temperature": 1.0, "seed": 3}
    whole, events = ask(client, **fields), stream(client, **fields)
    texts = [content(whole, index) for index in range(3)]
    assert len(set(texts)) == 3
    assert texts == [joined(events, index) for index in range(3)]
    assert whole["usage"]["completion_tokens"] == 72


def test_a_list_of_prompts_gives_what_each_gives_alone(client):
    prompts = ["def add(a, b):", "The quick brown fox"]
    both = ask(client, TEXT, prompt=prompts)
    assert [content(both, i) for i in range(2)] == [content(ask(client, TEXT, prompt=p)) for p in prompts]


def test_token_ids_are_a_prompt_and_echo_repeats_it(client):
    text = "def add(a, b):"
    ids = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    plain = content(ask(client, TEXT, prompt=text))
    assert content(ask(client, TEXT, prompt=ids)) == plain
    assert content(ask(client, TEXT, prompt=text, echo=True)) == text + plain
    assert joined(stream(client, TEXT, prompt=text, echo=True)) == text + plain


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stop_string_cuts_exactly_and_never_leaks(client, path):
    whole = content(ask(client, path, max_tokens=48))
    stop = whole[20:24]
    expected = whole[: whole.index(stop)]
    answer = ask(client, path, max_tokens=48, stop=[stop])
    assert content(answer) == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    events = stream(client, path, max_tokens=48, stop=stop)
    assert joined(events) == expected


def test_chat_logprobs_have_the_apis_shape(client):
    whole = ask(client, logprobs=True, top_logprobs=3)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == 24
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    assert all(entry["logprob"] <= entry["top_logprobs"][0]["logprob"] <= 0 for entry in entries)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace") == content(whole)
    events = stream(client, logprobs=True, top_logprobs=3)
    streamed = [entry for e in events for c in e["choices"] if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert streamed == entries


def test_completion_logprobs_have_the_apis_shape(client):
    choice = ask(client, TEXT, logprobs=2)["choices"][0]
    found = choice["logprobs"]
    assert {len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {24}
    assert found["text_offset"][0] == 0
    assert found["text_offset"] == sorted(found["text_offset"])


def test_logit_bias_forces_a_token(client):
    answer = ask(client, TEXT, logit_bias={"70": 100}, logprobs=0, max_tokens=4)
    assert len(set(answer["choices"][0]["logprobs"]["tokens"])) == 1


def test_thirty_two_at_once_answer_as_each_does_alone(server):
    def one(number):
        with server.client() as client:
            return content(ask(client, messages=[{"role": "user", "content": f"Please count to {number}"}]))

    alone = [one(number) for number in range(4)]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(one, [number % 4 for number in range(32)]))
    assert together == [alone[number % 4] for number in range(32)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None),
        (CHAT, b'{"temperature": NaN, "messages": []}', None),
        (CHAT, b'{"messages": []}', "messages"),
        (CHAT, b'{"messages": [{"role": "wizard", "content": "x"}]}', "messages[0].role"),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 100000}', "max_tokens"),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "tools"),
        (TEXT, b'{"prompt": [352000]}', "prompt"),
        (TEXT, b'{"prompt": "x", "seed": 99999999999999999999999}', "seed"),
        ("/detokenize", b'{"tokens": [-1]}', "tokens"),
        ("/tokenize", b"{}", "prompt"),
    ],
)
def test_a_bad_request_gets_400_and_the_engine_lives(client, path, body, param):
    response = client.post(path, content=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert ask(client, max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_prompt_too_long_is_refused_with_both_numbers(client):
    response = client.post(TEXT, json={"prompt": [70] * 700})
    assert response.status_code == 400
    assert "700 tokens" in response.json()["error"]["message"]
    assert "limit of 600" in response.json()["error"]["message"]


def test_a_body_too_large_is_refused(client):
    assert client.post(TEXT, json={"prompt": "x" * (5 << 20)}).status_code == 413


def test_unknown_models_and_paths_are_404_in_the_apis_shape(client):
    for response in (client.post(CHAT, json={"model": "other", "messages": HELLO}), client.get("/v1/nothing")):
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found_error"


def test_texts_survive_tokenizing_and_back(client):
    text = "def add(a, b): 你好 😀"
    ids = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert ids["count"] == len(ids["tokens"])
    assert client.post("/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"] == text


def test_a_chat_has_its_bos_exactly_once(client):
    tokens = client.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    bos = client.post("/tokenize", json={"prompt": "x"}).json()["tokens"][0]
    assert tokens.count(bos) == 1


def test_version_tells_what_is_served(client):
    version = client.get("/version").json()
    assert version["model"] == "tiny"
    assert version["backend"]
    assert version["verdict"] == "none"


def test_a_prompt_that_is_too_long_counts_as_refused_not_as_a_failure(server, client):
    def ended(outcome: str) -> float:
        return server.metric("quantkit_requests_ended_total", outcome=outcome)

    before = {outcome: ended(outcome) for outcome in ("refused", "failed")}
    answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "word " * 5000, "max_tokens": 1})
    assert answer.status_code == 400
    assert {outcome: ended(outcome) for outcome in before} == {**before, "refused": before["refused"] + 1}


def test_counters_reconcile(server, client):
    ask(client, max_tokens=1)
    ended = sum(
        server.metric("quantkit_requests_ended_total", outcome=o) for o in ("finished", "refused", "failed", "aborted")
    )
    assert eventually(lambda: server.metric("quantkit_requests_in_flight") == 0)
    assert server.metric("quantkit_requests_accepted_total") == ended


def test_the_openai_client_works_unchanged(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer.choices[0].message.content
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    assert client.completions.create(model="tiny", prompt="def", max_tokens=4).usage.completion_tokens <= 4
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(model="tiny", messages=HELLO, top_p=7)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=HELLO)
