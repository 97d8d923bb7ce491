"""Traffic profiles: read and written with the line of a mistake, counted from logs that may be damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.cli.app import run
from quantkit.errors import RecipeError
from quantkit.profile import Cell, Concurrency, Histogram, Profile, read_profile, write_profile
from quantkit.profile.language import language_of
from quantkit.profile.logs import profile_of_logs
from quantkit.profile.model import EDGES, mix
from quantkit.resources import resource
from tests.tiny import write_tokenizer

PROFILE = Profile(
    (
        Cell("sql", "en", 0.25, Histogram((64, 256), (0.75, 0.25)), Histogram((16,), (1.0,))),
        Cell("support", "zh", 0.75, Histogram((64, 1024), (0.5, 0.5))),
    ),
    Concurrency(3.5, 12),
    requests=400,
    tokenizer="folder",
)


def _written(folder: Path, text: str) -> Path:
    path = folder / "profile.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _logs(folder: Path, *lines: object) -> Path:
    path = folder / "logs.jsonl"
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(texts) + b"\n")
    return path


@pytest.mark.parametrize("name", ["profile.yaml", "profile.json"])
def test_a_written_profile_is_read_back_equal(tmp_path: Path, name: str) -> None:
    write_profile(PROFILE, tmp_path / name)
    assert read_profile(tmp_path / name) == PROFILE


def test_categories_and_languages_alone_make_every_pair(tmp_path: Path) -> None:
    made = read_profile(
        _written(
            tmp_path,
            "version: 1\ncategories: {a: 0.7, b: 0.3}\nlanguages: {en: 0.6, zh: 0.4}\n"
            "prompt_tokens: {up_to: [64, 256], share: [0.2, 0.8]}\n",
        )
    )
    assert {cell.key: pytest.approx(cell.share) for cell in made.cells} == {
        ("a", "en"): 0.42, ("a", "zh"): 0.28, ("b", "en"): 0.18, ("b", "zh"): 0.12,
    }  # fmt: skip
    assert {cell.prompt_tokens for cell in made.cells} == {Histogram((64, 256), (0.2, 0.8))}
    assert made.categories == pytest.approx({"a": 0.7, "b": 0.3})
    assert made.languages == pytest.approx({"en": 0.6, "zh": 0.4})


CELL = "version: 1\ncells:\n  - {category: a, language: en, share: 1.0%s}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 2\n", "1: version must be 1, not 2"),
        ("version: 1\nlanguages: {en: 1}\n", "1: categories is missing. State categories and languages, or cells"),
        ("version: 1\ncategories: {a: 0.5, b: 0.4}\nlanguages: {en: 1}\n", "2: the shares sum to 0.900, not 1"),
        (
            "version: 1\ncategories:\n  a: 1\n  b: x\nlanguages: {en: 1}\n",
            "4: a share is a number from 0 to 1, not 'x'",
        ),
        ("version: 1\ncategory: {a: 1}\n", "2: unknown key 'category'; known here: version"),
        (CELL % ", prompt_tokens: {up_to: [64, 64], share: [0.5, 0.5]}", "3: the bins' upper edges must ascend"),
        (CELL % ", prompt_tokens: {up_to: [64], share: [0.5, 0.5]}", "3: 1 bins in up_to, 2 in share"),
        (CELL % ", output_tokens: {up_to: [0], share: [1]}", "3: must be a whole number from 1"),
        (CELL % "" + "  - {category: a, language: en, share: 0}\n", "4: a in en is listed twice"),
        (CELL % "" + "categories: {a: 1}\n", "2: cells state every share"),
        (CELL % "" + "concurrency: {mean: 5, peak: 2}\n", "4: mean must be a number above 0, at most the peak"),
        (CELL % ", share: .nan", "3: duplicate key 'share'"),
        ("version: 1\ncells: []\n", "2: cells must be 1 to 1000 entries, not 0"),
        ("just text\n", "1: a mapping of keys is needed, not 'just text'"),
        ("{", "not valid YAML"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_profile(_written(tmp_path, text))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "profile.yaml:"))


def test_a_missing_profile_is_told_with_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no such traffic profile.*`quantkit profile` writes one"):
        read_profile(tmp_path / "profile.yaml")


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_percentile_is_an_edge_that_bounds_that_share_of_lengths(lengths: list[int], share: float) -> None:
    made = Histogram.of(lengths)
    assert made is not None
    assert sum(made.share) == pytest.approx(1)
    bound = made.percentile(share)
    within = sum(length <= bound for length in lengths) / len(lengths)
    assert within >= share - 1e-9 or bound == EDGES[-1]
    lower = [edge for edge in EDGES if edge < bound]
    assert not lower or sum(length <= lower[-1] for length in lengths) / len(lengths) < share + 1e-9


def test_a_mixture_weighs_its_parts() -> None:
    mixed = mix([(0.25, Histogram((10, 20), (0.5, 0.5))), (0.75, Histogram((20, 30), (1.0, 0.0))), (0.5, None)])
    assert mixed is not None
    assert mixed.up_to == (10, 20, 30)
    assert mixed.share == pytest.approx((0.125, 0.875, 0.0))


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Where is my order? I have been waiting for it.", "en"),
        ("ok", "en"),
        ("我的订单在哪里？order 12", "zh"),
        ("注文はどこですか", "ja"),
        ("주문이 어디에 있나요", "ko"),
        ("Где мой заказ?", "ru"),
        ("Wo ist meine Bestellung? Ich warte seit drei Wochen und bekomme keine Antwort", "de"),
        ("Bonjour, je voudrais savoir où est ma commande, le colis est en retard", "fr"),
        ("¿Dónde está mi pedido? Lo espero y no llega con el envío", "es"),
        ("1234 5678 !!!", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_language_is_told_by_script_and_common_words(text: str, language: str) -> None:
    assert language_of(text) == language


HELLO = [{"role": "user", "content": "Where is my order?"}]
ANSWER = {"role": "assistant", "content": "It is on its way."}
USAGE = {"prompt_tokens": 100, "completion_tokens": 20}


@pytest.mark.parametrize(
    "line",
    [
        {"messages": HELLO, "usage": USAGE, "category": "support"},
        {"prompt": "Where is my order?", "completion": "Soon.", "usage": USAGE, "metadata": {"category": "support"}},
        {"request": {"messages": HELLO}, "response": {"choices": [{"message": ANSWER}], "usage": USAGE},
         "category": "support"},
        {"custom_id": "1", "body": {"messages": HELLO, "metadata": {"category": "support"}},
         "response": {"status_code": 200, "body": {"choices": [{"message": ANSWER}], "usage": USAGE}}},
        {"messages": [*HELLO, ANSWER], "prompt_tokens": 100, "completion_tokens": 20, "category": "support"},
    ],
)  # fmt: skip
def test_every_usual_form_of_a_log_line_gives_category_language_and_lengths(tmp_path: Path, line: object) -> None:
    made, tally = profile_of_logs([_logs(tmp_path, line)])
    assert made.cells == (Cell("support", "en", 1.0, Histogram((128,), (1.0,)), Histogram((32,), (1.0,))),)
    assert (tally.requests, tally.bad, tally.other, tally.unmeasured) == (1, 0, 0, 0)


def test_shares_and_lengths_are_counted_by_cell(tmp_path: Path) -> None:
    def line(category: str, content: str, tokens: int) -> object:
        return {"messages": [{"role": "user", "content": content}], "category": category,
                "usage": {"prompt_tokens": tokens, "completion_tokens": 8}}  # fmt: skip

    rows = [line("sql", "Count the users", 30)] * 3 + [line("sql", "统计用户", 30), *[line("chat", "你好呀", 700)] * 4]
    made, _ = profile_of_logs([_logs(tmp_path, *rows)])
    assert {cell.key: cell.share for cell in made.cells} == {
        ("chat", "zh"): 0.5, ("sql", "en"): 0.375, ("sql", "zh"): 0.125,
    }  # fmt: skip
    assert made.prompt_tokens is not None
    assert (made.prompt_tokens.percentile(0.5), made.prompt_tokens.percentile(0.95)) == (32, 768)
    assert made.requests == 8


def test_damaged_lines_are_counted_and_the_rest_is_used(tmp_path: Path) -> None:
    good = {"messages": HELLO, "usage": USAGE}
    cut = b'{"messages": [{"role": "user", "content": "Where'
    lines = [good, cut, b"\xff\xfe", b"[1]", b"", {"event": "started"}, {**good, "error": "boom"},
             {**good, "status": 500}, b"[" * 100_000, {**good, "usage": {"prompt_tokens": -3}}]  # fmt: skip
    made, tally = profile_of_logs([_logs(tmp_path, *lines)])
    assert (tally.lines, tally.requests, tally.bad, tally.other, tally.failed, tally.unmeasured) == (9, 2, 4, 1, 2, 1)
    assert tally.first_bad.endswith("logs.jsonl:2")
    assert made.cells[0].prompt_tokens == Histogram((128,), (1.0,))


def test_a_log_without_a_request_is_refused_with_the_form_of_a_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no request among 1 lines \(1 are no JSON objects.*A line reads"):
        profile_of_logs([_logs(tmp_path, b"2026-11-29 GET /v1/models 200")])


def test_labels_that_must_be_identifiers_are_refused(tmp_path: Path) -> None:
    path = _logs(tmp_path, *({"messages": HELLO, "category": f"request {i}"} for i in range(1001)))
    with pytest.raises(RecipeError, match=r"logs\.jsonl:1001: more than 1000 pairs.*map it to a few"):
        profile_of_logs([path])


def test_requests_at_once_come_from_times_of_access_records(tmp_path: Path) -> None:
    records = [
        {"time": 10.0, "event": "request", "prompt_tokens": 5, "completion_tokens": 5, "duration_ms": 10_000},
        {"time": 10.0, "event": "request", "prompt_tokens": 5, "completion_tokens": 5, "duration_ms": 5_000},
        {"time": 30.0, "event": "request", "prompt_tokens": 5, "completion_tokens": 5, "duration_ms": 5_000},
    ]
    made, _ = profile_of_logs([_logs(tmp_path, *records)])
    assert made.concurrency == Concurrency(round((10 + 5 + 5) / 15, 3), 2)
    assert [cell.key for cell in made.cells] == [("any", "any")]


def test_the_command_counts_with_a_tokenizer_keeps_no_text_and_tells_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path / "model", "llama")
    log = _logs(tmp_path, {"messages": [*HELLO, ANSWER]}, {"prompt": "half \ud83d pair"}, b"{cut")
    out = tmp_path / "profile.yaml"
    assert run(["profile", str(log), "-o", str(out)]) == 0
    shown = capsys.readouterr()
    assert "1 lines are no whole JSON objects" in shown.err
    assert "2 requests tell no prompt length; --tokenizer MODEL would count them" in shown.err
    assert run(["profile", str(log), "-o", str(out)]) == 2, "it does not overwrite"
    assert run(["profile", str(log), "-o", str(out), "--force", "--tokenizer", str(tmp_path / "model")]) == 0
    text = out.read_text()
    assert "order" not in text
    assert "way" not in text
    made = read_profile(out)
    assert made.tokenizer == str(tmp_path / "model")
    assert made.prompt_tokens is not None
    assert made.output_tokens is not None


def test_the_shipped_profile_is_that_of_the_shipped_conversations() -> None:
    shipped = read_profile(resource("calib/profile.yaml"))
    counted, tally = profile_of_logs([resource("calib/conversations.jsonl")])
    assert shipped.requests == tally.requests
    assert {cell.key: cell.share for cell in shipped.cells} == pytest.approx(
        {cell.key: cell.share for cell in counted.cells}, abs=1e-5
    )
    assert all(cell.prompt_tokens is not None and cell.output_tokens is not None for cell in shipped.cells)
