import pytest

from quantkit.runtime.request import RequestOutput, TokenLogprobs
from quantkit.runtime.sampling import SamplingParams
from quantkit.runtime.text import ChatText
from quantkit.server.choices import Choice
from tests.tiny import write_tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_tokenizer(folder, "qwen2")
    return ChatText(folder)


def run(text, answer, step=1, logprobs=False, finish="length", **params):
    """The pieces of an answer that comes `step` tokens at a time."""
    ids = text.encode(answer)
    choice = Choice(0, [1], text, SamplingParams(**params))
    pieces = []
    for start in range(0, len(ids), step):
        part = ids[start : start + step]
        found = [TokenLogprobs(-1.0, [token], [-1.0]) for token in part] if logprobs else None
        last = start + step >= len(ids)
        pieces.append(choice.take([RequestOutput("r", part, found, finish if last else None)]))
        if choice.finished:
            break
    return choice, pieces


def shown(pieces):
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("step", [1, 2, 7, 100])
def test_pieces_join_to_the_whole_text(text, step):
    answer = "def add(a, b): 你好 😀 done"
    choice, pieces = run(text, answer, step)
    assert shown(pieces) == answer
    assert pieces[-1].finish_reason == "length"
    assert choice.completion_tokens == len(text.encode(answer))


def test_a_character_over_several_tokens_is_never_split(text):
    _, pieces = run(text, "a😀b")
    assert all("�" not in piece.text for piece in pieces)


@pytest.mark.parametrize("step", [1, 3, 100])
def test_the_text_is_cut_exactly_before_the_stop_string(text, step):
    choice, pieces = run(text, "one two three four", step, stop=("three", "o t"))
    assert shown(pieces) == "one tw"[: "one two three four".index("o t")]
    assert pieces[-1].finish_reason == "stop"
    assert choice.finished


def test_no_beginning_of_a_stop_string_is_shown(text):
    _, pieces = run(text, "keep this </answer> not this", stop=("</answer>",))
    seen = ""
    for piece in pieces:
        seen += piece.text
        assert "<" not in seen
    assert seen == "keep this "


def test_a_beginning_that_comes_to_nothing_is_shown_at_the_end(text):
    _, pieces = run(text, "keep </ans", stop=("</answer>",))
    assert shown(pieces) == "keep </ans"
    assert pieces[-1].finish_reason == "length"


def test_stop_strings_do_not_count_before_min_tokens(text):
    answer = "a b a b a b"
    ids = text.encode(answer)
    _, pieces = run(text, answer, stop=("b",), min_tokens=len(ids) - 2, max_tokens=100)
    assert shown(pieces).count("b") == 2
    assert pieces[-1].finish_reason == "stop"


def test_tokens_swallowed_by_a_stop_string_report_no_logprobs(text):
    answer = "yes STOP no"
    _, pieces = run(text, answer, stop=("STOP",), logprobs=True)
    tokens = [token.token_id for piece in pieces for token in piece.tokens]
    assert text.decode(tokens) == "yes "


def test_every_token_reports_logprobs_once(text):
    answer = "你好 and 😀"
    _, pieces = run(text, answer, 3, logprobs=True)
    assert [token.token_id for piece in pieces for token in piece.tokens] == text.encode(answer)


def test_the_token_that_stops_an_answer_counts_but_is_no_text(text):
    choice, pieces = run(text, "one two", logprobs=True, finish="stop")
    ids = text.encode("one two")
    assert shown(pieces) == text.decode(ids[:-1])
    assert choice.completion_tokens == len(ids)
    assert len([token for piece in pieces for token in piece.tokens]) == len(ids) - 1
