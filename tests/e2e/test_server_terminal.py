"""`quantkit chat` and `quantkit bench` on a tiny random model."""

import io
import json

import pytest

from quantkit.cli.app import run
from tests.tiny import make_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", "llama", max_position_embeddings=1024))


def talk(tiny, capsys, monkeypatch, *lines):
    """What a conversation of `lines` prints: answers, then what goes to stderr."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert run(["chat", tiny, "--max-tokens", "6", "--threads", "1"]) == 0
    said = capsys.readouterr()
    return said.out, said.err


def test_one_prompt_gets_one_answer_and_its_speed(tiny, capsys):
    assert run(["chat", tiny, "--prompt", "hello", "--max-tokens", "6", "--threads", "1"]) == 0
    said = capsys.readouterr()
    assert said.out.strip()
    assert "tokens/s" in said.err


def test_reset_forgets_and_a_second_turn_does_not(tiny, capsys, monkeypatch):
    once, _ = talk(tiny, capsys, monkeypatch, "hello")
    again, _ = talk(tiny, capsys, monkeypatch, "hello", "/reset", "hello", "/exit", "unread")
    on, _ = talk(tiny, capsys, monkeypatch, "hello", "hello")
    assert again == 2 * once
    assert on.startswith(once)
    assert on != again


def test_a_system_message_changes_the_answer(tiny, capsys, monkeypatch):
    plain, _ = talk(tiny, capsys, monkeypatch, "hello")
    told, _ = talk(tiny, capsys, monkeypatch, "/system be brief", "hello")
    assert plain != told


def test_an_unknown_command_shows_the_known_ones(tiny, capsys, monkeypatch):
    out, err = talk(tiny, capsys, monkeypatch, "/help")
    assert out == ""
    assert "/reset" in err


def test_a_conversation_that_grew_too_long_is_told_and_goes_on(tiny, capsys, monkeypatch):
    _, err = talk(tiny, capsys, monkeypatch, "word " * 2000, "/reset", "hello")
    assert "/reset starts over" in err
    assert "tokens/s" in err


def test_throughput_ends_with_one_json_object_of_the_five_jobs(tiny, capsys):
    assert run(["bench", "throughput", tiny, "--threads", "1", "--json"]) == 0
    results = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert list(results) == ["prefill_512", "decode_1", "serve_8", "serve_16", "serve_32"]
    assert all(speed > 0 for speed in results.values())
