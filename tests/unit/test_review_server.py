"""The page's server: for this machine and this page only, blind, and never told anything it does not check."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact.people import FOLDER
from quantkit.errors import PreflightError, RequestError
from quantkit.review.record import CHOICES, REASONS, SEVERITIES, Said, read_record
from quantkit.review.sample import Sample
from quantkit.review.server import ReviewServer
from quantkit.review.session import Session
from quantkit.review.status import open_sample
from tests.review_case import QUICK, T0, answers, copy_of, make_artifact, write_answers, write_run

PAGE = Path(__file__).parents[2] / "quantkit" / "review"


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    artifact = make_artifact(tmp_path_factory.mktemp("served"))
    write_answers(artifact, answers(40, identical=4, critical=2))
    write_run(artifact, QUICK)
    return artifact


class Client:
    """Talks to one server as its page does, unless told otherwise."""

    def __init__(self, server: ReviewServer, sample: Sample, folder: Path) -> None:
        self.server, self.sample, self.folder = server, sample, folder
        self.port = server.server_address[1]

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Status, content (JSON parsed) and headers; `path` is below the token unless it starts with a slash."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        sent = {"Content-Type": "application/json", "Origin": f"http://127.0.0.1:{self.port}"} | (headers or {})
        whole = path if path.startswith("/") else f"/{self.server.token}/{path}"
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, whole, data, {name: value for name, value in sent.items() if value})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(text) if is_json else text.decode(), answer.headers

    def state(self, **more: Any) -> dict[str, Any]:
        status, found, _ = self.ask("POST", "api/state", {"reviewer": "Ann", **more})
        assert status == 200, found
        return dict(found)

    def judge(self, id: str, choice: str, severity: str = "none", **more: Any) -> tuple[int, Any]:
        said = {"reviewer": "Ann", "id": id, "choice": choice, "severity": severity, **more}
        status, found, _ = self.ask("POST", "api/judge", said)
        return status, found


@pytest.fixture
def client(packaged: Path, tmp_path: Path) -> Iterator[Client]:
    artifact = copy_of(packaged, tmp_path / "artifact")
    sample = open_sample(artifact)
    with ReviewServer(Session(artifact, sample)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield Client(server, sample, artifact / FOLDER)
        server.shutdown()


def test_the_link_is_needed_whole(client: Client) -> None:
    token = client.server.token
    assert len(token) >= 32
    for path in ("/", "/page.js", f"/{token[:-1]}/", f"/{token}x/", f"/{token}", "/api/state"):
        assert client.ask("GET", path)[0] == 404, path
    assert client.ask("GET", "")[0] == 200
    assert client.ask("POST", "/wrong/api/state", {})[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:80", "[::1", ""])
def test_another_host_name_gets_nothing(client: Client, host: str) -> None:
    status, found, _ = client.ask("GET", "", headers={"Host": host or " "})
    assert status in (400, 421)
    assert "quantkit review</title>" not in str(found)


@pytest.mark.parametrize("origin", ["", "null", "http://evil.example", "http://127.0.0.1:1", "https://127.0.0.1"])
def test_another_page_cannot_write(client: Client, origin: str) -> None:
    status, found, _ = client.ask("POST", "api/undo", {"reviewer": "Ann"}, {"Origin": origin})
    assert (status, found) == (403, {"error": "this request comes from another page"})


def test_only_json_of_some_size_is_read(client: Client) -> None:
    assert client.ask("POST", "api/state", {}, {"Content-Type": "text/plain"})[0] == 415
    assert client.ask("POST", "api/state", b"{" * 70_000)[0] == 413
    assert client.ask("POST", "api/state", b"", {"Content-Length": "-1"})[0] == 413
    assert client.ask("POST", "api/state", b"", {"Content-Length": "9" * 5000})[0] == 413
    for body in (b"{", b"[]", b"[" * 60_000, b"\xff"):
        assert client.ask("POST", "api/state", body)[0] == 400
    for body in ({"reviewer": 7}, {"reviewer": "Ann", "id": []}, {"reviewer": "Ann", "reasons": "facts"}):
        assert client.ask("POST", "api/judge", body)[0] == 400


def test_only_the_pages_three_files_are_served(client: Client) -> None:
    for path in ("server.py", "../review/server.py", "%2e%2e/status.py", "page.html", "favicon.ico", "api/state"):
        assert client.ask("GET", path)[0] == 404, path
    assert client.ask("POST", "api/else", {})[0] == 404
    assert client.ask("PUT", "api/state", {})[0] == 501


def test_the_policy_allows_only_the_pages_own_files_and_nothing_inline(client: Client) -> None:
    for path in ("", "page.js", "page.css", "absent"):
        _, _, headers = client.ask("GET", path)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
    html, script = (PAGE / "page.html").read_text(), (PAGE / "page.js").read_text()
    assert re.findall(r"<script[^>]*>(.*?)</script>", html) == [""]
    assert not re.search(r"\son[a-z]+=|style=|<style", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?:", script)


def test_every_key_of_the_page_does_one_thing_and_its_reasons_are_the_records() -> None:
    html, script = (PAGE / "page.html").read_text(), (PAGE / "page.js").read_text()
    reasons = re.findall(r'^  (\w+): \["(\w)", ', script, re.M)
    assert tuple(name for name, _ in reasons) == REASONS
    panel = html[html.index("<footer") : html.index("</footer>")]
    keys = [*re.findall(r'data-key="([^"]+)"', panel), *(key for _, key in reasons), "k"]
    assert len(set(keys)) == len(keys)
    assert set(re.findall(r'data-choice="([\w-]+)"', html)) == set(CHOICES)
    assert set(re.findall(r'data-severity="(\w+)"', html)) == set(SEVERITIES)


def test_nothing_tells_which_answer_is_whose_before_the_judgement(client: Client) -> None:
    pair = client.state()["pair"]
    assert set(pair) == {"id", "language", "turns", "criteria", "answers", "cut"}
    assert re.fullmatch(r"s\d{3}", pair["id"])
    words = json.dumps(client.state())
    for telling in ("baseline", "candidate", "quantized", "original", "catch", "repeat", "worst", "seed"):
        assert telling not in words
    status, found = client.judge(pair["id"], "tie")
    assert status == 200
    assert found["told"] == "Kept."


def judged_as_shown(client: Client) -> tuple[dict[str, Any], str]:
    """Judge what is shown; the pair, and what the page was told."""
    pair = client.state()["pair"]
    status, found = client.judge(pair["id"], "tie")
    assert status == 200
    return pair, found["told"]


def test_names_come_one_vote_late_and_are_the_records(client: Client) -> None:
    """Or else undoing would bring a pair back whose sides are known."""
    pairs, told = zip(*(judged_as_shown(client) for _ in range(client.state()["progress"]["total"])), strict=True)
    lines = [json.loads(line) for line in (client.folder / "record.jsonl").read_bytes().splitlines()]
    showings = {one.id: one for one in client.sample.showings}
    repeated = {one.item: one.id for one in client.sample.showings if one.kind == "repeat"}
    assert told[0] == "Kept."
    named = 0
    for number, (line, words) in enumerate(zip(lines, told[1:], strict=False)):
        done = {one["id"] for one in pairs[: number + 1]}
        if line["shows"] == "catch":
            assert "a check, both answers were the same" in words
        elif line["item"] in repeated and repeated[line["item"]] not in done:
            assert words == "Kept."
        else:
            names = {"baseline": "the original model", "candidate": "the quantized model"}
            assert f"answer 1 was {names[line['first']]}'s" in words
            asked = client.sample.answer(line["item"]).messages[-1][1]
            assert asked[:20] in words
            named += 1
    assert named >= 3
    assert {showings[one["id"]].kind for one in pairs} == {"pair", "catch", "repeat"}


def test_after_an_undo_nothing_is_told_of_the_pair_that_came_back(client: Client) -> None:
    judged_as_shown(client)
    judged_as_shown(client)
    assert client.ask("POST", "api/undo", {"reviewer": "Ann"})[0] == 200
    assert client.state()["undo"] is False
    status, found, _ = client.ask("POST", "api/undo", {"reviewer": "Ann"})
    assert (status, found["error"].split(".")[0]) == (400, "there is nothing to undo")
    assert judged_as_shown(client)[1] == "Kept."


def test_what_the_page_shows_first_is_what_the_record_says(client: Client) -> None:
    for _ in range(4):
        pair = client.state()["pair"]
        client.judge(pair["id"], "first", "minor", reasons=["facts"], comment="好")
        line = json.loads((client.folder / "record.jsonl").read_bytes().splitlines()[-1])
        shown = ["".join(text for text, _ in answer) for answer in pair["answers"]]
        answer = client.sample.answer(line["item"])
        both = (
            [answer.baseline, answer.candidate] if line["first"] == "baseline" else [answer.candidate, answer.baseline]
        )
        assert shown == (both if line["shows"] != "catch" else both[:1] * 2)
        assert line["outcome"] == ("better" if line["first"] == "candidate" else "worse")
        assert (line["reasons"], line["comment"], line["reviewer"]) == (["facts"], "好", "Ann")
        assert line["shown"] <= line["judged"]


def test_a_pair_must_have_been_shown_and_is_judged_once(client: Client) -> None:
    assert client.judge("s001", "tie") == (400, {"error": "this pair was not shown to you yet. Reload the page"})
    pair = client.state()["pair"]
    assert client.judge(pair["id"], "tie")[0] == 200
    status, found = client.judge(pair["id"], "tie")
    assert (status, "already" in found["error"]) == (400, True)
    assert client.judge(client.state()["pair"]["id"], "left")[0] == 400
    assert len(read_record(client.folder, client.sample).judgements) == 1


def test_undo_brings_the_same_pair_back(client: Client) -> None:
    first = client.state()["pair"]["id"]
    assert client.state()["undo"] is False
    client.judge(first, "tie")
    assert client.state()["pair"]["id"] != first
    assert client.ask("POST", "api/undo", {"reviewer": "Ann"})[0] == 200
    assert client.state()["pair"]["id"] == first
    assert client.state()["progress"]["done"] == 0


def test_an_answer_cut_at_the_limit_says_so(packaged: Path, tmp_path: Path) -> None:
    artifact = copy_of(packaged, tmp_path / "artifact")
    lines = [
        line | {"candidate": {**line["candidate"], "text": f"{line['candidate']['text']} and", "finish": "length"}}
        for line in answers(40)
    ]
    write_answers(artifact, lines)
    sample = open_sample(artifact)
    session = Session(artifact, sample)
    cut = []
    for _ in range(6):
        pair = session.state("Ann")["pair"]
        texts = ["".join(text for text, _ in answer) for answer in pair["answers"]]
        assert pair["cut"] == [text.endswith(" and") for text in texts]
        cut += pair["cut"]
        session.judge("Ann", Said(pair["id"], "tie"))
    assert any(cut)


def test_hidden_characters_are_shown_by_name_and_markup_stays_text(packaged: Path, tmp_path: Path) -> None:
    artifact = copy_of(packaged, tmp_path / "artifact")
    lines = [line | {"candidate": {"text": f"<b>{i}</b>\u202e\x1b"}, "criteria": "\u200b!"} for i, line in
             enumerate(answers(40))]  # fmt: skip
    write_answers(artifact, lines)
    session = Session(artifact, open_sample(artifact))
    seen = []
    for _ in range(6):
        pair = session.state("Ann")["pair"]
        assert pair["criteria"] == "[U+200B]!"
        seen += ["".join(text for text, _ in answer) for answer in pair["answers"]]
        session.judge("Ann", Said(pair["id"], "tie"))
    assert any(re.fullmatch(r"<b>\d+</b>\[U\+202E\]␛", text) for text in seen)


def test_the_last_page_decides_and_signs(client: Client) -> None:
    while (found := client.state())["pair"]:
        assert client.judge(found["pair"]["id"], "tie")[0] == 200
    assert (found["done"]["decision"], found["done"]["signed"]) == ("accept", "")
    assert "0 of 6 answers" in found["done"]["rate"]
    assert found["progress"]["done"] == found["progress"]["total"]
    assert not client.server.signed.is_set()
    assert client.ask("POST", "api/sign", {"reviewer": "Ann"})[0] == 200
    assert client.server.signed.is_set()
    assert client.state()["done"]["signed"] == "Signed by Ann: accept."


def test_another_reviewer_may_go_on_after_the_decision(client: Client) -> None:
    while (found := client.state())["pair"]:
        client.judge(found["pair"]["id"], "tie")
    second = client.state(reviewer="Bo")
    assert (second["pair"], second["done"]["more"]) == (None, True)
    assert client.state(reviewer="Bo", more=True)["pair"]["id"] == "s001"


def test_signing_too_early_is_refused_in_words(client: Client) -> None:
    client.state()
    status, found, _ = client.ask("POST", "api/sign", {"reviewer": "Ann"})
    assert status == 409
    assert "not decided yet" in found["error"]


def test_a_fixed_reviewer_stays_whatever_the_page_says(packaged: Path, tmp_path: Path) -> None:
    session = Session(copy_of(packaged, tmp_path / "artifact"), open_sample(tmp_path / "artifact"), "Ann")
    assert session.state("Bo")["reviewer"] == "Ann"
    with pytest.raises(RequestError):
        Session(tmp_path / "artifact", open_sample(tmp_path / "artifact"), " ")


def test_missing_prompts_are_told_from_the_first_page_on(packaged: Path, tmp_path: Path) -> None:
    artifact = copy_of(packaged, tmp_path / "artifact")
    write_answers(artifact, answers(4))
    notice = Session(artifact, open_sample(artifact)).state("")["progress"]["notice"]
    assert notice.startswith("The plan needs 6 prompts and the gate answered 4: 2 are missing.")
    write_answers(artifact, answers(9))
    session = Session(artifact, open_sample(artifact))
    found = session.state("Ann")
    assert "Better run quantkit gate with --max-prompts 12 first" in found["progress"]["notice"]
    session.judge("Ann", Said(found["pair"]["id"], "tie"))
    assert session.state("Ann")["progress"]["notice"] == ""


def test_a_taken_port_is_a_clear_error(client: Client) -> None:
    with pytest.raises(PreflightError, match=f"cannot listen on port {client.port}"):
        ReviewServer(client.server.session, client.port)


def test_a_pair_judged_after_its_repeat_is_not_told_of(client: Client) -> None:
    """Two tabs can judge in that order; the repeat's names are the pair's, swapped."""
    repeat = next(one for one in client.sample.showings if one.kind == "repeat" and one.stage == 0)
    pair = next(one for one in client.sample.showings if one.kind == "pair" and one.item == repeat.item)
    session = Session(client.folder.parents[1], client.sample)
    said = {}
    for showing in (*(one for one in client.sample.showings if one.stage == 0 and one not in (pair, repeat)), repeat):
        session._since["Ann", showing.id] = T0
        said[showing.id] = session.judge("Ann", Said(showing.id, "tie"))["told"]
    session._since["Ann", pair.id] = T0
    assert session.judge("Ann", Said(pair.id, "tie"))["told"] == "Kept."
