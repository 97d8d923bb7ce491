"""ChatText against Transformers: rendering, encoding, decoding, stop sets; and what a hostile template cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import jinja2.ext
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from quantkit.errors import CheckpointError, RequestError
from quantkit.runtime.chat_template import ChatTemplate
from quantkit.runtime.stops import StopScanner
from quantkit.runtime.text import ChatText
from tests.tiny import FAMILIES, FLAVOURS, write_tokenizer

CHAT = [
    {"role": "user", "content": "Hello, 世界! What is  3 < 4?"},
    {"role": "assistant", "content": "True 🙂, naturally."},
    {"role": "user", "content": "And é à ü?\n\nThanks."},
]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp(request.param)
    ids = write_tokenizer(folder, request.param)
    flavour = FLAVOURS[request.param]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[t] for t in flavour.stops]}))
    return request.param, ChatText(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_chat_renders_and_encodes_as_transformers_does(pair, turns):
    _, text, theirs = pair
    messages = CHAT[:turns]
    prompt = turns != 2
    assert text.render(messages, prompt) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt
    )
    assert text.encode_chat(messages, prompt) == theirs.apply_chat_template(
        messages, add_generation_prompt=prompt, return_dict=False
    )


def test_decode_equals_transformers(pair):
    _, text, theirs = pair
    ids = text.encode_chat(CHAT)
    assert text.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert text.decode(ids, skip_special=False) == theirs.decode(ids)


def test_bos_comes_once_on_every_path(pair):
    name, text, theirs = pair
    bos = text.bos_token_id
    assert bos == theirs.bos_token_id
    if bos is None:
        return
    chat = text.encode_chat(CHAT[:1])
    rendered = text.render(CHAT[:1])
    expected = 1 if FLAVOURS[name].template.startswith("{{ bos_token }}") else 0
    assert chat.count(bos) == expected
    bare = text.encode("Hello", add_special_tokens=True)
    assert bare == theirs("Hello")["input_ids"]
    assert text.encode(rendered, add_special_tokens=True).count(bos) == max(expected, bare.count(bos))


def test_stop_set_joins_generation_config_and_tokenizer(pair):
    name, text, theirs = pair
    assert text.stop_token_ids == {theirs.convert_tokens_to_ids(t) for t in FLAVOURS[name].stops} | {
        theirs.eos_token_id
    }


def test_pieces_join_to_the_whole_and_never_split_a_character(pair):
    _, text, _ = pair
    ids = text.encode("naïve 世界 🙂🙃 ok — the quick brown fox\n\tindent")
    detokenizer = text.detokenizer()
    pieces = [detokenizer.push([token]) for token in ids]
    assert all("�" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text.decode(ids)


def test_flush_shows_an_unfinished_character_at_the_end(pair):
    _, text, _ = pair
    whole = text.encode("a世")
    cut = whole[:-1]
    detokenizer = text.detokenizer()
    shown = "".join(detokenizer.push([token]) for token in cut)
    assert shown == "a"
    assert shown + detokenizer.flush() == text.decode(cut)


def test_special_tokens_are_hidden_however_many_come(pair):
    _, text, _ = pair
    detokenizer = text.detokenizer()
    special = next(iter(text.stop_token_ids))
    ids = [*text.encode("one"), *[special] * 100, *text.encode(" two")]
    assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush() == "one two"


@pytest.fixture
def sentencepiece_like(tmp_path: Path) -> ChatText:
    """A Llama 2 style tokenizer: metaspace for spaces, byte fallback for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcdehlorw.", "▁h", "el"]
    merges = [("▁", "h"), ("e", "l")]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return ChatText(tmp_path)


def test_metaspace_and_byte_fallback_stream_like_the_whole(sentencepiece_like):
    for sample in ("hello world", " hello  world. 世界 a", "世", "a 🙂 b"):
        ids = sentencepiece_like.encode(sample)
        detokenizer = sentencepiece_like.detokenizer()
        pieces = [detokenizer.push([token]) for token in ids]
        assert "".join(pieces) + detokenizer.flush() == sentencepiece_like.decode(ids) == sample
        assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__.os }}",
        "{% for a in range(100000000) %}{% endfor %}",
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].nothing.there }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set s = 'x' * 10000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=3) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}{% set n = namespace(s='x') %}"
        "{% for i in range(60) %}{% set n.s = f(n.s) %}{% endfor %}",
    ],
)
def test_hostile_or_failing_template_is_one_request_error(template):
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(template, {}).render([{"role": "user", "content": "x"}])


def test_counting_a_templates_work_changes_nothing_it_writes():
    template = (
        "{% for m in messages if m.role != 'x' %}{{ loop.index ~ '/' ~ loop.length ~ loop.last }}{% endfor %}"
        "{% for a in 'abc' recursive %}{{ loop.depth }}{% if loop.last and loop.depth < 3 %}{{ loop('de') }}{% endif %}"
        "{% if a == 'b' %}{% continue %}{% endif %}{{ a }}{% endfor %}{{ 1 ~ none ~ true ~ (['x'] + ['y']) }}"
    )
    said = [{"role": "user", "content": "x"}] * 2
    plain = jinja2.Environment(extensions=[jinja2.ext.loopcontrols]).from_string(template)
    assert ChatTemplate(template, {}).render(said) == plain.render(messages=said)


def test_half_a_surrogate_pair_is_refused(pair):
    _, ours, _ = pair
    with pytest.raises(RequestError, match="surrogate"):
        ours.encode("x \ud800")


def test_template_that_does_not_compile_is_named():
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_template_helpers_match_transformers(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, "llama")
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}\n    {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{{ tools | tojson(indent=2) }}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
        "{{ strftime_now('%Y') }}"
    )
    tools = [{"name": "größe", "parameters": {"a": "<b>"}}]
    ours = ChatText(tmp_path).render(CHAT, tools=tools)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours == theirs.apply_chat_template(CHAT, tools=tools, tokenize=False, add_generation_prompt=True)


def test_conversation_without_template_or_message_is_refused(sentencepiece_like, pair):
    with pytest.raises(RequestError, match="no chat template"):
        sentencepiece_like.render(CHAT)
    with pytest.raises(RequestError, match="at least one message"):
        pair[1].render([])


def test_sampling_defaults_come_from_generation_config(tmp_path):
    write_tokenizer(tmp_path, "llama")
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}))
    params = ChatText(tmp_path).default_sampling(max_tokens=3)
    assert (params.temperature, params.top_p, params.repetition_penalty, params.max_tokens) == (0.6, 0.9, 1.1, 3)
    path.write_text(json.dumps({"temperature": 0.6}))
    assert ChatText(tmp_path).default_sampling().temperature == 0.0


def test_damaged_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        ChatText(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        ChatText(tmp_path)


def test_reading_text_imports_neither_torch_nor_transformers():
    import subprocess
    import sys

    code = "import sys, quantkit.runtime.text; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_string_is_cut_exactly_and_its_beginning_never_shown(size):
    text, stops = "abcENENDxyz", ("END", "XX")
    scanner = StopScanner(stops)
    shown = [scanner.feed(text[i : i + size]) for i in range(0, len(text), size)]
    assert "".join(shown) == "abcEN"
    assert scanner.stopped == "END"


def test_text_held_for_a_stop_that_never_comes_is_flushed():
    scanner = StopScanner(("STOP",))
    assert scanner.feed("go ST") == "go "
    assert scanner.flush() == "ST"
    assert scanner.stopped is None
