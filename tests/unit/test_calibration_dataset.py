"""Calibration samples: rendered once, deduplicated, spread evenly, truncation counted, fingerprinted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantkit.calibration.dataset import load_samples
from quantkit.calibration.samples import read_samples, write_samples
from quantkit.errors import RecipeError
from quantkit.runtime.text import ChatText
from tests.tiny import write_tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_tokenizer(folder, "llama")
    return ChatText(folder)


def _talk(words: str, **fields):
    return {"messages": [{"role": "user", "content": words}, {"role": "assistant", "content": "Yes."}], **fields}


def _file(folder: Path, rows, name="data.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def _load(paths, text, **options):
    settings = {"max_samples": 100, "max_tokens": 512, "seed": 0} | options
    return load_samples(paths if isinstance(paths, list) else [paths], text, **settings)


def _many():
    plan = {("support", "en"): 20, ("support", "zh"): 3, ("sql", "en"): 10, ("sql", "zh"): 1}
    return [_talk(f"{c} {lang} {i}", category=c, language=lang) for (c, lang), n in plan.items() for i in range(n)]


def test_a_conversation_has_bos_exactly_once(text, tmp_path):
    (sample,) = _load(_file(tmp_path, [_talk("hello")]), text).samples
    assert sample.ids[0] == text.bos_token_id
    assert sample.ids.count(text.bos_token_id) == 1
    assert text.decode(sample.ids, skip_special=False).endswith("Yes.<|eot_id|>")


def test_plain_text_has_bos_exactly_once(text, tmp_path):
    (sample,) = _load(_file(tmp_path, [{"text": "once upon a time"}]), text).samples
    assert sample.ids[0] == text.bos_token_id
    assert sample.ids.count(text.bos_token_id) == 1


def test_text_that_begins_with_bos_gets_no_second(text, tmp_path):
    (sample,) = _load(_file(tmp_path, [{"text": "<|begin_of_text|>once upon a time"}]), text).samples
    assert sample.ids[0] == text.bos_token_id
    assert sample.ids.count(text.bos_token_id) == 1


def test_a_conversation_without_a_template_has_bos_exactly_once(tmp_path):
    write_tokenizer(tmp_path / "bare", "llama")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    bare = ChatText(tmp_path / "bare")
    assert not bare.has_template
    (sample,) = _load(_file(tmp_path, [_talk("hello")]), bare).samples
    assert sample.ids[0] == bare.bos_token_id
    assert sample.ids.count(bare.bos_token_id) == 1
    assert bare.decode(sample.ids) == "hello\n\nYes."


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma3_text", "phi3"])
def test_bos_stands_where_the_family_has_it_and_nowhere_else(tmp_path, family):
    write_tokenizer(tmp_path / family, family)
    theirs = ChatText(tmp_path / family)
    rows = [_talk("hello there"), {"text": "once upon a time"}]
    chat, plain = _load(_file(tmp_path, rows), theirs).samples
    template_has_it = "bos_token" in (tmp_path / family / "chat_template.jinja").read_text()
    assert list(chat.ids).count(theirs.bos_token_id) == (1 if template_has_it else 0)
    assert (chat.ids[0] == theirs.bos_token_id) == template_has_it
    adds = family in ("llama", "mistral", "gemma3_text")
    assert list(plain.ids).count(theirs.bos_token_id) == (1 if adds else 0)
    assert (plain.ids[0] == theirs.bos_token_id) == adds


def test_exact_duplicates_are_dropped_and_counted(text, tmp_path):
    made = _load(_file(tmp_path, [_talk("a"), _talk("b"), _talk("a", category="other")]), text)
    assert len(made.samples) == 2
    assert made.coverage["duplicates"] == 1


def test_samples_are_spread_over_category_and_language(text, tmp_path):
    made = _load(_file(tmp_path, _many()), text, max_samples=12)
    counts = {(s["category"], s["language"]): s["samples"] for s in made.coverage["strata"]}
    assert counts == {("sql", "en"): 4, ("sql", "zh"): 1, ("support", "en"): 4, ("support", "zh"): 3}


def test_the_same_seed_gives_the_same_sample_and_another_seed_another(text, tmp_path):
    path = _file(tmp_path, _many())
    first, again, other = (_load(path, text, max_samples=9, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.samples != other.samples
    assert first.fingerprint != other.fingerprint


def test_a_file_smaller_than_the_limit_is_used_whole_and_in_order(text, tmp_path):
    made = _load(_file(tmp_path, _many()), text)
    assert [s.category for s in made.samples] == [row["category"] for row in _many()]


def test_the_fingerprint_covers_tokens_template_tokenizer_and_seed(text, tmp_path):
    path = _file(tmp_path, [_talk("a"), _talk("b")])
    prints = {_load(path, text).fingerprint, _load(path, text, seed=1).fingerprint}
    prints.add(_load(_file(tmp_path, [_talk("b"), _talk("a")], "order.jsonl"), text).fingerprint)
    other = tmp_path / "tokenizer"
    write_tokenizer(other, "llama")
    assert _load(path, ChatText(other)).fingerprint in prints
    (other / "chat_template.jinja").write_text((other / "chat_template.jinja").read_text() + "{# changed #}")
    prints.add(_load(path, ChatText(other)).fingerprint)
    assert len(prints) == 4


def test_more_than_one_percent_truncated_is_refused_with_what_to_raise(text, tmp_path):
    path = _file(tmp_path, [_talk("word " * 60), _talk("short")])
    with pytest.raises(RecipeError, match=r"max_tokens 64.*Raise calibration\.max_tokens \(the longest sample has \d+"):
        _load(path, text, max_tokens=64)


def test_tokens_cut_off_below_one_percent_are_counted(text, tmp_path):
    rows = [_talk(f"{i} {'word ' * 30}{i * i}") for i in range(200)] + [_talk("word " * 60)]
    path = _file(tmp_path, rows)
    whole = _load(path, text, max_samples=1000)
    longest = max(len(sample.ids) for sample in whole.samples)
    cut = _load(path, text, max_samples=1000, max_tokens=longest - 3)
    assert max(len(sample.ids) for sample in cut.samples) == longest - 3
    assert cut.coverage["truncated_tokens"] == whole.tokens - cut.tokens == 3


def test_samples_beyond_the_models_own_limit_are_refused_with_what_can_be_done(text, tmp_path):
    path = _file(tmp_path, [_talk("word " * 60), _talk("short")])
    with pytest.raises(RecipeError, match=r"limit of 64 positions.*Give conversations of at most 64 tokens") as caught:
        _load(path, text, max_tokens=512, max_position=64)
    assert "Raise" not in str(caught.value)


def test_coverage_counts_every_sample_once(text, tmp_path):
    made = _load(_file(tmp_path, _many()), text, max_samples=20)
    table = made.coverage
    assert table["loaded"] == 34
    assert table["samples"] == sum(s["samples"] for s in table["strata"]) == sum(table["languages"].values()) == 20
    assert table["tokens"] == sum(s["tokens"] for s in table["strata"]) == made.tokens
    assert table["lengths"]["p50"] <= table["lengths"]["p95"] <= table["lengths"]["max"]
    json.dumps(table)


def test_later_stages_read_the_very_same_samples(text, tmp_path):
    made = _load(_file(tmp_path, _many()), text, max_samples=12)
    write_samples(made, tmp_path)
    assert read_samples(tmp_path) == made


def test_rows_come_from_parquet_and_csv_too(text, tmp_path):
    from datasets import Dataset

    Dataset.from_list(_many()).to_parquet(tmp_path / "data.parquet")
    (tmp_path / "data.csv").write_text("text,language\nhello there,en\nyou too,en\n")
    assert [s.ids for s in _load(tmp_path / "data.parquet", text).samples] == [
        s.ids for s in _load(_file(tmp_path, _many()), text).samples
    ]
    assert [s.language for s in _load(tmp_path / "data.csv", text).samples] == ["en", "en"]


def test_several_files_are_read_in_the_order_given(text, tmp_path):
    a, b = _file(tmp_path, [_talk("a", id="a")], "a.jsonl"), _file(tmp_path, [_talk("b", id="b")], "b.jsonl")
    assert [s.name for s in _load([b, a], text).samples] == ["b", "a"]


def test_conversations_the_template_refuses_are_dropped_and_counted(text, tmp_path):
    folder = tmp_path / "strict"
    write_tokenizer(folder, "llama")
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(strict + template)
    system = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    made = _load(_file(tmp_path, [system, _talk("a")]), ChatText(folder))
    assert (made.coverage["refused"], len(made.samples)) == (1, 1)
    with pytest.raises(RecipeError, match=r"no calibration sample is left of 1 rows \(1 refused"):
        _load(_file(tmp_path, [system], "system.jsonl"), ChatText(folder))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": \n', r"line 2 is not valid JSON"),
        ('{"text": "a"}\n[1]\n', r"line 2 is not a JSON object"),
        ('{"words": "a"}\n', r"row 1: the row has neither `messages` nor `text`"),
        ("", r"no calibration sample is left of 0 rows"),
    ],
)
def test_a_bad_file_is_named_with_its_line(text, tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(RecipeError, match=r"bad\.jsonl.*" + message):
        _load(path, text)


def test_a_missing_or_unknown_file_is_named(text, tmp_path):
    with pytest.raises(RecipeError, match=r"gone\.jsonl: there is no such data file"):
        _load(tmp_path / "gone.jsonl", text)
    (tmp_path / "data.xlsx").write_bytes(b"")
    with pytest.raises(RecipeError, match=r"data\.xlsx: unknown kind of data file.*\.jsonl"):
        _load(tmp_path / "data.xlsx", text)


def test_reading_leaves_no_cache_behind(text, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    _load(_file(tmp_path, [_talk("a")]), text)
    assert not (tmp_path / "home").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
