"""Start, death, hang, drain and refusal of a server, with real processes."""

import json
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.e2e import serving
from tests.e2e.serving import Server, eventually
from tests.review_case import make_artifact
from tests.tiny import make_checkpoint

CHAT = "/v1/chat/completions"
OPTIONS = ("--accept-ungated", "--threads", "1", "--max-model-len", "4000", "--kv-cache-gib", "0.3")


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A model that takes some milliseconds a token, so that there is time to interfere."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "max_position_embeddings": 4096}
    return make_checkpoint(tmp_path_factory.mktemp("slow") / "slow", "llama", dtype="float16", **sizes)


def body(tokens=4, **fields):
    message = {"role": "user", "content": "hello"}
    return {"messages": [message], "max_tokens": tokens, "ignore_eos": True} | fields


class Stream(threading.Thread):
    """A streamed request running beside the test; `started` once its first event is there.

    `broken` when the server closed the connection instead of ending the stream.
    """

    def __init__(self, server, tokens):
        super().__init__(daemon=True)
        self.server, self.tokens = server, tokens
        self.started = threading.Event()
        self.events = []
        self.broken = False
        self.start()
        assert self.started.wait(20)

    def run(self):
        try:
            self._read()
        except httpx.TransportError:
            self.broken = True

    def _read(self):
        with self.server.client() as client, client.stream("POST", CHAT, json=body(self.tokens, stream=True)) as answer:
            for line in answer.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                    self.started.set()

    def result(self):
        self.join(30)
        assert not self.is_alive()
        assert not self.broken
        assert self.events.pop() == "[DONE]"
        return [json.loads(event) for event in self.events]


def ready(server):
    with server.client() as client:
        return client.get("/ready").status_code == 200


def told_why(line):
    """Whether a line of the log is a request's whose engine was killed."""
    return json.loads(line).get("error") == "the engine was killed by SIGKILL" if line.startswith("{") else False


@pytest.fixture(scope="module")
def mortal(slow):
    with Server(slow, *OPTIONS, "--hang-seconds", "3") as server:
        yield server


def test_a_killed_engine_fails_what_it_held_and_comes_back(mortal):
    before = mortal.metric("quantkit_engine_deaths_total")
    streaming = Stream(mortal, 3000)
    with ThreadPoolExecutor(1) as pool, mortal.client() as client:
        waiting = pool.submit(client.post, CHAT, json=body(3000))
        assert eventually(lambda: mortal.metric("quantkit_requests_in_flight") == 2)
        mortal.engine().kill()
        assert waiting.result(20).status_code == 503
        assert "was killed by SIGKILL" in streaming.result()[-1]["error"]["message"]
        assert eventually(lambda: sum(told_why(line) for line in mortal.log) == 2)
        refused = client.post(CHAT, json=body())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "unavailable"
        assert client.get("/health").status_code == 200
        assert not ready(mortal)
        assert eventually(lambda: ready(mortal), 30)
        assert client.post(CHAT, json=body()).status_code == 200
    assert mortal.metric("quantkit_engine_deaths_total") == before + 1


def test_a_hung_engine_is_not_ready_and_is_replaced(mortal):
    first = mortal.engine()
    first.suspend()
    assert eventually(lambda: not ready(mortal))
    assert eventually(lambda: not first.is_running(), 30)
    assert eventually(lambda: ready(mortal), 30)
    assert mortal.engine().pid != first.pid


def test_an_engine_that_comes_back_with_another_artifact_is_not_served(tmp_path):
    """The front would speak to it with the first one's tokenizer, limits and verdict."""
    served, other = make_artifact(tmp_path), make_artifact(tmp_path / "other", "qwen2")
    with Server(served, "--accept-ungated", "--threads", "1") as server, server.client() as client:
        before = client.get("/version").json()
        served.rename(tmp_path / "away")
        other.rename(served)
        server.engine().kill()
        why = "holds another artifact than the " + before["payload_digest"]
        assert eventually(lambda: why in str(client.get("/ready").json()["reason"]), 30)
        assert client.post(CHAT, json=body()).status_code == 503
        served.rename(other)
        (tmp_path / "away").rename(served)
        assert eventually(lambda: ready(server), 30)
        assert client.get("/version").json() == before
        assert client.post(CHAT, json=body()).status_code == 200


def test_tokenizing_for_many_callers_at_once_starts_no_more_threads(mortal):
    front = psutil.Process(mortal.process.pid)
    with ThreadPoolExecutor(16) as pool, mortal.client() as client:
        assert client.post(CHAT, json=body()).status_code == 200
        before = front.num_threads()
        message = {"role": "user", "content": "hello " * 200_000}  # long enough that several are tokenized side by side
        answers = pool.map(lambda _: client.post(CHAT, json=body(messages=[message])).status_code, range(48))
        assert set(answers) == {400}
        assert front.num_threads() <= before + 1  # of two, one may not have had anything to do before


def test_sigterm_finishes_what_runs_refuses_what_comes_and_exits_0(slow):
    with Server(slow, *OPTIONS) as server, server.client() as client:
        streaming = Stream(server, 300)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: not ready(server))
        assert client.post(CHAT, json=body()).status_code == 503
        events = streaming.result()
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        engine = server.engine()
        assert server.process.wait(20) == 0
        assert not engine.is_running()


def test_a_second_signal_ends_a_drain_at_once(slow):
    with Server(slow, *OPTIONS) as server:
        streaming = Stream(server, 3900)
        engine = server.engine()
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: not ready(server))
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 130
        assert time.monotonic() - began < 3
        assert eventually(lambda: not engine.is_running())
        assert eventually(lambda: streaming.broken)


def test_a_drain_past_its_deadline_fails_what_is_left_and_exits_0(slow):
    with Server(slow, *OPTIONS, "--drain-seconds", "0.2") as server:
        streaming = Stream(server, 3900)
        server.process.send_signal(signal.SIGTERM)
        assert "shutting down" in streaming.result()[-1]["error"]["message"]
        assert server.process.wait(20) == 0


def test_the_engine_dies_with_a_killed_front(slow):
    with Server(slow, *OPTIONS) as server:
        Stream(server, 3900)
        engine = server.engine()
        server.process.kill()
        server.process.wait(10)
        assert eventually(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


@pytest.fixture(scope="module")
def guarded(slow):
    options = ("--max-num-seqs", "1", "--queue-limit", "1")
    with Server(slow, *OPTIONS, *options, QUANTKIT_API_KEY="secret") as server:
        yield server


@pytest.mark.parametrize("key", [None, "Bearer wrong", "Bearer", "Basic secret", "secret"])
def test_who_brings_no_valid_key_is_refused(guarded, key):
    with guarded.client(headers={"Authorization": key} if key else {}) as stranger:
        refused = stranger.post(CHAT, json=body())
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        assert stranger.get("/metrics").status_code == 401
        assert stranger.get("/health").status_code == stranger.get("/ready").status_code == 200


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(guarded):
    with guarded.client() as client, ThreadPoolExecutor(1) as pool:
        with client.stream("POST", CHAT, json=body(3900, stream=True)) as first:
            lines = first.iter_lines()  # kept: httpx closes the connection with its iterator
            next(lines)
            second = pool.submit(client.post, CHAT, json=body())
            assert eventually(lambda: guarded.metric("quantkit_requests_in_flight") == 2)
            full = client.post(CHAT, json=body())
        assert full.status_code == 429
        assert full.json()["error"]["type"] == "rate_limit_error"
        assert int(full.headers["Retry-After"]) >= 1
        assert second.result(30).status_code == 200
        assert guarded.metric("quantkit_requests_refused_total", status="429") == 1


def ended(server, outcome):
    return server.metric("quantkit_requests_ended_total", outcome=outcome)


def test_a_client_that_leaves_its_stream_frees_its_blocks(guarded):
    before = ended(guarded, "aborted")
    with guarded.client() as client, client.stream("POST", CHAT, json=body(3900, stream=True)) as answer:
        lines = answer.iter_lines()  # kept: httpx closes the connection with its iterator
        next(lines)
        assert eventually(lambda: guarded.metric("quantkit_kv_blocks", state="used") > 0)
    assert eventually(lambda: guarded.metric("quantkit_kv_blocks", state="used") == 0)
    assert ended(guarded, "aborted") == before + 1


def test_a_client_that_does_not_wait_for_its_answer_frees_its_blocks(guarded):
    before = ended(guarded, "aborted")
    with guarded.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=body(3900), timeout=0.5)
    assert eventually(lambda: ended(guarded, "aborted") == before + 1)
    assert eventually(lambda: guarded.metric("quantkit_kv_blocks", state="used") == 0)


def test_a_deadline_that_passes_in_the_queue_is_answered(guarded):
    with guarded.client() as client, client.stream("POST", CHAT, json=body(3900, stream=True)) as first:
        lines = first.iter_lines()  # kept: httpx closes the connection with its iterator
        next(lines)
        late = client.post(CHAT, json=body(deadline_ms=50))
    assert late.status_code == 504
    assert late.json()["error"]["code"] == "deadline_exceeded"


def run(*arguments):
    return subprocess.run([*serving.COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_a_taken_port_ends_the_start_before_anything_is_loaded(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run(str(tmp_path / "nothing here"), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 3
    assert "is taken by process" in done.stderr


def test_an_artifact_that_cannot_be_loaded_ends_the_start_with_the_engines_words(tmp_path):
    done = run(str(tmp_path), "--port", "0")
    assert done.returncode == 3
    [line] = [line for line in done.stderr.splitlines() if line.startswith("quantkit:")]
    assert str(tmp_path) in line


def test_only_the_front_is_short_of_memory_and_neither_of_connections(guarded):
    front, engine = psutil.Process(guarded.process.pid), guarded.engine()
    assert front.rlimit(psutil.RLIMIT_AS)[0] == 4 << 30
    assert engine.rlimit(psutil.RLIMIT_AS)[0] == engine.rlimit(psutil.RLIMIT_AS)[1]
    assert front.rlimit(psutil.RLIMIT_NOFILE)[0] == front.rlimit(psutil.RLIMIT_NOFILE)[1]
