"""Hostile and careless clients against one real server: each gets its own trouble, and nothing stays behind."""

import contextlib
import json
import random
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.serving import Server, eventually
from tests.tiny import make_checkpoint

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REQUEST_SECONDS = 2
TEMPLATE = """
{%- macro tree(n) %}{% if n %}{{ tree(n - 1) }}{{ tree(n - 1) }}{% endif %}{% endmacro -%}
{%- set asked = messages[-1].content -%}
{%- if asked == 'loop' %}{% set s = 'x' * 100000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}
{%- elif asked == 'tree' %}{{ tree(60) }}
{%- elif asked == 'grow' %}{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}
{%- elif asked == 'wide' %}{{ 'x'.ljust(10 ** 11) }}
{%- elif asked == 'half' %}{{ '\\ud800' }}
{%- elif asked == 'escape' %}{{ ''.__class__.__mro__ }}
{%- elif asked == 'fail' %}{{ 1 / 0 }}
{%- else %}{{ asked }}{% endif -%}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", "llama", max_position_embeddings=1024)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    options = ("--max-num-seqs", "8", "--max-model-len", "600", "--accept-ungated", "--threads", "1")
    limits = ("--kv-cache-gib", "0.02", "--queue-limit", "56", "--request-seconds", str(REQUEST_SECONDS))
    with Server(folder, *options, *limits) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def _the_server_is_as_before(server, client):
    yield
    assert client.post(TEXT, json={"prompt": "def", "max_tokens": 1}).status_code == 200
    assert eventually(lambda: server.metric("quantkit_requests_in_flight") == 0)
    assert eventually(lambda: server.metric("quantkit_kv_blocks", state="used") == 0)
    assert server.metric("quantkit_engine_deaths_total") == 0
    assert not [line for line in server.log if "Traceback" in line]


def say(content, **fields):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "ignore_eos": True} | fields


@pytest.mark.parametrize(
    "extremes",
    [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1.7e308, "temperature": 1},
        {"repetition_penalty": 1e-38, "presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {"70": 100}},
        {"temperature": 1e300, "min_tokens": 3, "ignore_eos": False},
        {"temperature": 1e-300, "top_p": 1e-300},
        {"temperature": 1, "min_p": 1, "top_k": 2**31 - 1},
        {"temperature": 1, "seed": 2**64 - 1, "n": 3},
        {"stop": ["\u0000", "😀" * 50_000]},
        {"logit_bias": {str(token): -100 for token in range(352)}},
    ],
    ids=lambda extremes: " ".join(extremes),
)
def test_extreme_parameters_within_their_ranges_are_served(client, extremes):
    answer = client.post(CHAT, json=say("hello", **extremes))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4 * extremes.get("n", 1)


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, say("x", top_k=10**30), "top_k must be"),
        (CHAT, say("x", min_tokens=2, stop_token_ids=list(range(384))), "leave no token to draw"),
        (TEXT, {"prompt": ["x"] * 100, "n": 2}, "200 sequences, more than the 64"),
        (CHAT, {"x" * 1_000_000: 1}, "unknown field"),
        (CHAT, say("x", model="m" * 1_000_000), "is not served here"),
        (TEXT, {"prompt": "7" * 4_000_000}, "limit of 600"),
        (CHAT, say(" word" * 700_000), "limit of 600"),
    ],
    ids=["top_k", "stops", "sequences", "name", "model", "digits", "words"],
)
def test_what_can_never_be_served_is_refused_at_once_in_few_words(client, path, fields, words):
    began = time.monotonic()
    answer = client.post(path, json=fields)
    assert answer.status_code in (400, 404)
    assert words in answer.json()["error"]["message"]
    assert len(answer.content) < 2000
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("trick", ["loop", "tree", "grow", "wide", "half", "escape", "fail"])
def test_what_a_template_does_to_one_conversation_no_other_feels(client, trick):
    beside = threading.Thread(target=lambda: said.append(client.post(CHAT, json=say("hello")).status_code))
    said = []
    beside.start()
    answer = client.post(CHAT, json=say(trick))
    beside.join(20)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert said == [200]


def connect(server):
    place = urlsplit(server.url)
    return socket.create_connection((place.hostname, place.port), timeout=10)


def head(length, path=CHAT):
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


def test_a_head_that_never_ends_is_not_waited_for(server):
    with connect(server) as slow:
        slow.sendall(head(10)[:30])
        assert slow.recv(100) == b""


def test_a_body_that_never_comes_gets_408_and_the_connection_closed(server):
    with connect(server) as slow:
        slow.sendall(head(1000) + b"{")
        said = b""
        while part := slow.recv(4096):
            said += part
    assert said.startswith(b"HTTP/1.1 408 ")


def test_a_body_nobody_wants_is_not_read_for_ever(server):
    end = time.monotonic() + 4 * REQUEST_SECONDS
    with connect(server) as dribbling:
        dribbling.sendall(head(100_000, "/nowhere"))
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end:
                dribbling.sendall(b"x")
                time.sleep(0.05)
    assert time.monotonic() < end


def test_a_client_that_leaves_within_its_body_is_no_error_of_ours(server):
    with connect(server) as leaving:
        leaving.sendall(head(1000) + b'{"messages"')
    assert eventually(lambda: any('"status":499' in line for line in server.log))


def test_no_redirect_takes_a_client_to_the_host_it_named(client):
    assert client.get("/health/", headers={"Host": "elsewhere"}).status_code == 404


def test_the_books_balance_after_clients_that_leave_at_every_moment(server):
    end = time.monotonic() + 4

    def careless(number):
        dice = random.Random(number)
        while time.monotonic() < end:
            path = dice.choice([CHAT, TEXT])
            fields = {"max_tokens": dice.choice([1, 20, 300]), "n": dice.choice([1, 1, 2]), "ignore_eos": True}
            fields |= {"stream": dice.random() < 0.6, "stop": dice.choice([None, "e"]), "seed": number}
            fields |= dice.choice([{}, {}, {"temperature": -1}, {"deadline_ms": 20}, {"cache_salt": "a"}])
            words = "alpha 你好 " * dice.choice([1, 5, 20, 2000])  # the last does not fit
            fields |= say(words, max_tokens=fields["max_tokens"]) if path == CHAT else {"prompt": words}
            leave = dice.choice([0, 1, 8, 10**6])
            patience = dice.choice([0.02, 0.2, 20])
            with (
                contextlib.suppress(httpx.TransportError),
                server.client(timeout=patience) as client,
                client.stream("POST", path, json=fields) as answer,
            ):
                lines = answer.iter_lines()
                while leave and next(lines, None) is not None:
                    leave -= 1

    crowd = [threading.Thread(target=careless, args=(number,)) for number in range(24)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join(60)
    assert eventually(lambda: server.metric("quantkit_requests_in_flight") == 0)
    outcomes = {
        o: server.metric("quantkit_requests_ended_total", outcome=o)
        for o in ("finished", "refused", "failed", "aborted")
    }
    assert min(outcomes[o] for o in ("finished", "refused", "aborted")) > 0
    assert server.metric("quantkit_requests_accepted_total") == sum(outcomes.values())
    blocks = [server.metric("quantkit_kv_blocks", state=state) for state in ("free", "cached", "used")]
    assert eventually(lambda: server.metric("quantkit_kv_blocks", state="used") == 0)
    assert sum(blocks) == server.metric("quantkit_kv_blocks")


def test_metrics_and_log_lines_are_what_their_readers_expect(server, client):
    client.get("/" + "a" * 30_000)
    assert eventually(lambda: any("aaaa" in line for line in server.log))
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    assert max(len(line["path"]) for line in lines if "path" in line) < 1000
