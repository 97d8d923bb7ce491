"""Tokenizers rebuilt from GGUF metadata give the ids of the tokenizer they came from, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer

from quantkit.errors import CheckpointError, RecipeError
from quantkit.models.gguf_file import read_gguf
from quantkit.models.gguf_tokenizer import write_tokenizer_files
from tests.tiny import FAMILIES, make_checkpoint
from tests.tiny_gguf import write_gguf

TEXTS = (
    "Hello, world!",
    "  two  spaces and 1234567 digits\n\n\ttabs",
    "请把附件中的发票总结一下。",
    "it's they'll WE'RE naïve café 🦙 ½",
    "<|im_start|>user\nhi<|im_end|></s><eos>",
    "",
)

Type = gguf.TokenType
PIECES = [
    ("<unk>", Type.UNKNOWN), ("<s>", Type.CONTROL), ("</s>", Type.CONTROL), ("<|user|>", Type.CONTROL),
    *((f"<0x{byte:02X}>", Type.BYTE) for byte in range(256)),
    *((piece, Type.NORMAL) for piece in ("▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "lo")),
    ("<think>", Type.USER_DEFINED),
]  # fmt: skip


def sentencepiece(path: Path, architecture: str = "llama", **metadata: Any) -> Path:
    """A GGUF holding nothing but a SentencePiece vocabulary; longer pieces score better."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _ in PIECES])
    writer.add_token_scores([float(len(piece)) for piece, _ in PIECES])
    writer.add_token_types([kind for _, kind in PIECES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for key, value in metadata.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def written(path: Path) -> Tokenizer:
    out = path.parent / "out"
    out.mkdir()
    write_tokenizer_files(read_gguf(path), out)
    return Tokenizer.from_file(str(out / "tokenizer.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_byte_level_ids_equal_the_original_tokenizers(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", family)
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = written(write_gguf(folder, tmp_path / "m.gguf"))
    for text in TEXTS:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special).ids
            assert ids == theirs.encode(text, add_special_tokens=special).ids, text
        assert ours.decode(ids) == theirs.decode(ids)


def test_chat_template_is_written_as_the_file_has_it(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "llama")
    written(write_gguf(folder, tmp_path / "m.gguf"))
    template = (tmp_path / "out" / "chat_template.jinja").read_text()
    assert template == (folder / "chat_template.jinja").read_text()


def test_each_way_to_split_is_its_models_own(tmp_path: Path) -> None:
    """GPT-2 keeps a run of digits in one piece, Llama 3 takes three, SmolLM and Qwen take each alone."""
    folder = make_checkpoint(tmp_path / "hf", "qwen2")
    pieces = {}
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o"):
        (tmp_path / pre).mkdir()
        tokenizer = written(write_gguf(folder, tmp_path / pre / "m.gguf", pre=pre))
        pieces[pre] = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a12345")]
    assert pieces == {
        "gpt-2": ["a", "12345"],
        "smollm": ["a", "1", "2", "3", "4", "5"],
        "llama-bpe": ["a", "123", "45"],
        "qwen2": ["a", "1", "2", "3", "4", "5"],
        "tekken": ["a", "1", "2", "3", "4", "5"],
        "gpt-4o": ["a", "123", "45"],
    }


def test_an_unknown_way_to_split_is_refused_not_guessed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hf", "qwen2")
    with pytest.raises(RecipeError, match=r"tokenizer\.ggml\.pre 'nouveau'"):
        written(write_gguf(folder, tmp_path / "m.gguf", pre="nouveau"))


def test_sentencepiece_merges_the_best_scored_pieces_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = written(sentencepiece(tmp_path / "m.gguf"))
    ids = {piece: index for index, (piece, _) in enumerate(PIECES)}
    byte = [ids["<0xC3>"], ids["<0xA9>"]]
    assert tokenizer.encode("hello", add_special_tokens=False).ids == [ids["▁hello"]]
    assert tokenizer.encode("helloé").ids == [ids["<s>"], ids["▁hello"], *byte]
    assert tokenizer.encode("<|user|>hello", add_special_tokens=False).ids == [ids["<|user|>"], ids["▁hello"]]
    assert tokenizer.encode("<think>", add_special_tokens=False).ids == [ids["<think>"]]
    assert tokenizer.decode([ids["▁hello"], *byte]) == "helloé"


def test_sentencepiece_honours_the_files_flags(tmp_path: Path) -> None:
    flags = {"add_bos_token": False, "add_space_prefix": False, "add_eos_token": True}
    tokenizer = written(sentencepiece(tmp_path / "m.gguf", **flags))
    ids = {piece: index for index, (piece, _) in enumerate(PIECES)}
    assert tokenizer.encode("hello").ids == [ids["hello"], ids["</s>"]]
    assert tokenizer.decode([ids["▁hello"]]) == " hello"


def test_phi3_turn_markers_swallow_the_line_break_after_them(tmp_path: Path) -> None:
    ids = {piece: index for index, (piece, _) in enumerate(PIECES)}
    for architecture, swallowed in (("phi3", True), ("llama", False)):
        (tmp_path / architecture).mkdir()
        tokenizer = written(sentencepiece(tmp_path / architecture / "m.gguf", architecture))
        encoded = tokenizer.encode("<|user|>\nhello", add_special_tokens=False).ids
        assert (encoded == [ids["<|user|>"], ids["▁hello"]]) == swallowed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.tokens": []}, "tokens: is missing"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "token_type: has"),
        ({"tokenizer.ggml.token_type": "x"}, "token_type: must be a list"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "'zz qq' does not merge"),
        ({"tokenizer.ggml.merges": ["alone"]}, "'alone' does not merge"),
        ({"tokenizer.ggml.bos_token_id": 1 << 20}, "bos_token_id"),
        ({"tokenizer.ggml.eos_token_id": "two"}, "eos_token_id"),
    ],
)
def test_a_malformed_vocabulary_names_its_key(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = read_gguf(write_gguf(make_checkpoint(tmp_path / "hf", "llama"), tmp_path / "m.gguf"))
    file.metadata.update(change)
    with pytest.raises(CheckpointError) as caught:
        write_tokenizer_files(file, tmp_path)
    assert words in caught.value.line()


def test_an_unknown_kind_of_vocabulary_is_named(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(make_checkpoint(tmp_path / "hf", "llama"), tmp_path / "m.gguf"))
    file.metadata["tokenizer.ggml.model"] = "bert"
    with pytest.raises(RecipeError, match=r"'bert' is not supported.*gpt2, llama"):
        write_tokenizer_files(file, tmp_path)


def test_every_end_of_turn_the_file_marks_stops_generation(tmp_path: Path) -> None:
    """The file names one eos only; its other control tokens that end a turn stop an answer too."""
    folder = make_checkpoint(tmp_path / "hf", "gemma3_text")
    tokenizer = written(write_gguf(folder, tmp_path / "m.gguf"))
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.token_to_id(token) for token in ("<eos>", "<end_of_turn>")]
