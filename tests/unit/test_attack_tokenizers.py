"""Hostile and broken tokenizers: one line at load, the same tokens every time, and no command to a terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.cli.chat import _shown
from quantkit.errors import CheckpointError, RequestError
from quantkit.runtime.text import ChatText
from quantkit.server.records import AccessLog, Record
from tests.tiny import write_tokenizer

Change = Callable[[dict[str, Any]], None]


def changed(folder: Path, change: Change) -> Path:
    write_tokenizer(folder, "llama")
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return folder


def replacement(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


BROKEN: dict[str, Change] = {
    "unknown special": lambda d: d.update(
        post_processor={
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}],
            "pair": [], "special_tokens": {},
        }
    ),
    "chunks of nothing": lambda d: d.update(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "strips beyond the end": lambda d: d.update(
        decoder={"type": "Strip", "content": "e", "start": 99999, "stop": 99999}
    ),
    "replaces nothing": lambda d: d.update(normalizer=replacement("", "e")),
    "no unknown token": lambda d: d.update(
        model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<nope>"}, added_tokens=[], post_processor=None
    ),
    "a bomb": lambda d: d.update(
        normalizer={"type": "Sequence", "normalizers": [replacement("e", "e" * 10)] * 9}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_tokenizer_that_cannot_be_used_is_refused_in_one_line(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = changed(tmp_path, BROKEN[name])
    with pytest.raises(CheckpointError) as refused:
        ChatText(folder)
    assert "tokenizer.json" in refused.value.line()
    assert "\n" not in refused.value.line()
    assert refused.value.exit_code == 3
    assert capfd.readouterr().err == ""


def test_dropout_of_training_is_off(tmp_path: Path) -> None:
    plain = ChatText(changed(tmp_path, lambda d: None)).encode("the same words, again and again")
    dropped = ChatText(changed(tmp_path, lambda d: d["model"].update(dropout=0.9)))
    assert all(dropped.encode("the same words, again and again") == plain for _ in range(20))


def test_what_fails_after_loading_is_the_requests_trouble(tmp_path: Path) -> None:
    text = ChatText(changed(tmp_path, lambda d: None))
    with pytest.raises(RequestError, match="cannot decode"):
        text.decode([-1])


def test_a_models_text_does_not_command_the_terminal() -> None:
    assert _shown("a\tb\n\x1b[2Jc\x9b\u202e你") == "a\tb\n\\x1b[2Jc\\x9b\\u202e你"


def test_the_log_of_a_request_holds_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    log = AccessLog()
    log.request(Record("GET", "/\x9b2J\u202e\x1b[0m/你好", "127.0.0.1"))
    log.close()
    line = written.getvalue()
    assert all(c.isprintable() for c in line.rstrip("\n"))
    assert json.loads(line)["path"] == "/\x9b2J\u202e\x1b[0m/你好"
