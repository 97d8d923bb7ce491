"""In a two-turn chat of every family, each answer ends exactly at the first token of the stop set."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.models import open_source
from quantkit.runtime.text import ChatText
from tests.tiny import FAMILIES, FLAVOURS, make_checkpoint
from tests.tiny_gguf import write_gguf

TURNS = [
    {"role": "user", "content": "Please summarise 12.50 and 7, thank you."},
    {"role": "assistant", "content": "The customer paid 19.50 before Friday."},
    {"role": "user", "content": "请用中文回复。"},
    {"role": "assistant", "content": "客户已付款,谢谢。"},
]


def text_of(family: str, folder: Path, form: str) -> ChatText:
    """The tokenizer files a build writes from the family's checkpoint, given as a folder or as a GGUF."""
    source = make_checkpoint(folder / "hf", family)
    if form == "gguf":
        source = write_gguf(source, folder / "model.gguf")
    open_source(str(source)).write_tokenizer(folder / "written")
    return ChatText(folder / "written")


@pytest.mark.parametrize("form", ["hf", "gguf"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_answer_ends_at_the_first_stop_token(family: str, form: str, tmp_path: Path) -> None:
    text = text_of(family, tmp_path, form)
    for turn in (1, 3):
        prompt = text.encode_chat(TURNS[:turn])
        whole = text.encode_chat(TURNS[: turn + 1], add_generation_prompt=False)
        assert whole[: len(prompt)] == prompt
        answer = whole[len(prompt) :]
        end = next(i for i, token in enumerate(answer) if token in text.stop_token_ids)
        assert text.decode(answer[:end]) == TURNS[turn]["content"]


@pytest.mark.parametrize("form", ["hf", "gguf"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_stop_set_holds_every_end_of_the_family_and_nothing_else(family: str, form: str, tmp_path: Path) -> None:
    text = text_of(family, tmp_path, form)
    ends = {text.encode(token)[0] for token in FLAVOURS[family].stops}
    assert text.stop_token_ids == ends


@pytest.mark.parametrize("form", ["hf", "gguf"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bos_comes_exactly_as_often_as_the_template_says(family: str, form: str, tmp_path: Path) -> None:
    text = text_of(family, tmp_path, form)
    ids = text.encode_chat(TURNS)
    assert ids.count(text.bos_token_id) == ("bos_token" in FLAVOURS[family].template)
