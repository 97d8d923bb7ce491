"""GGUF metadata -> the tokenizer files a Hugging Face checkpoint carries.

Two kinds of vocabulary are built: `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE). llama.cpp keeps the way a
byte-level vocabulary splits text as a name (`tokenizer.ggml.pre`), not as a pattern; `_SPLITS` gives each name its
model's own pattern (the "original regex" comments of llama.cpp's `llama-vocab.cpp`). An unknown name is refused: a
wrong split still gives tokens, only worse ones, and nothing downstream would notice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quantkit.errors import CheckpointError, RecipeError
from quantkit.models.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = "gpt2"
"""GPT-2's own pattern, built into the ByteLevel pre-tokenizer."""
_DIGITS = "digits"
"""The same after every digit is split off."""
_SPLITS: dict[str, str] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), _DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "dbrx", "smaug-bpe"), _LLAMA3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "kanana2"), _GPT4O),
}
_IGNORES_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken")
_ADDS_BOS = _IGNORES_MERGES
_NORMALIZED = ("qwen2", "deepseek-r1-qwen", "megrez")
_END_OF_TURN = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<|end_of_text|>",
    "<eos>",
)  # fmt: skip
"""Control tokens that end an answer whatever the file's eos says (llama.cpp's `special_eog_ids`)."""


def write_tokenizer_files(file: GGUFFile, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja (if the file has one), generation_config.json.

    Raises:
        RecipeError: a kind of vocabulary or a way to split that is not supported, named.
        CheckpointError: a malformed vocabulary.
    """
    vocabulary = _Vocabulary(file)
    _write(folder / "tokenizer.json", json.loads(_tokenizer(vocabulary).to_str()))
    _write(folder / "tokenizer_config.json", _tokenizer_config(vocabulary))
    _write(folder / "generation_config.json", _generation_config(vocabulary))
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _Vocabulary:
    """The file's tokens with what is said about them; every list checked for type and length."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self.metadata = file.metadata
        self.architecture = file.architecture
        self.tokens: list[str] = self._list("tokens", str, None)
        if not self.tokens:
            raise self.error("tokens", "is missing")
        self.types: list[int] = self._list("token_type", int, [1] * len(self.tokens))
        self.pre = str(self._get("pre", ""))
        self.kind = str(self._get("model", ""))
        sentencepiece = self.kind == "llama"
        self.adds_bos = bool(self._get("add_bos_token", sentencepiece or self.pre in _ADDS_BOS))
        self.adds_eos = bool(self._get("add_eos_token", False))

    def error(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(what, where=f"{self.path}: tokenizer.ggml.{key}")

    def _get(self, key: str, default: Any) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def _list(self, key: str, kind: type, default: list[Any] | None, *, whole: bool = True) -> list[Any]:
        value = self._get(key, default)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.error(key, f"must be a list of {kind.__name__}")
        if whole and key != "tokens" and len(value) != len(self.tokens):
            raise self.error(key, f"has {len(value)} entries for {len(self.tokens)} tokens")
        return value

    def scores(self) -> list[float]:
        """One score a token; the best merge has the highest."""
        return self._list("scores", float, [0.0] * len(self.tokens))

    def merges(self) -> list[tuple[str, str]]:
        """The merge list of a byte-level vocabulary."""
        pairs = [tuple(merge.split(" ", 1)) for merge in self._list("merges", str, [], whole=False)]
        known = set(self.tokens)
        for pair in pairs:
            if len(pair) != 2 or pair[0] not in known or pair[1] not in known or "".join(pair) not in known:
                raise self.error("merges", f"{' '.join(pair)[:60]!r} does not merge two tokens into a third")
        return [(left, right) for left, right in pairs]

    def special(self, role: str) -> str | None:
        """The text of the bos, eos, unknown or padding token; None when the file names none."""
        index = self._get(f"{role}_token_id", None)
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise self.error(f"{role}_token_id", f"{index!r} is not one of {len(self.tokens)} tokens")
        return self.tokens[index]

    def stops(self) -> list[int]:
        """Ids that end an answer: eos, eot, eom, and control tokens known to."""
        named = [self._get(f"{role}_token_id", None) for role in ("eos", "eot", "eom")]
        found = [index for index in named if isinstance(index, int) and 0 <= index < len(self.tokens)]
        found += [i for i, token in enumerate(self.tokens) if self.types[i] == _CONTROL and token in _END_OF_TURN]
        return list(dict.fromkeys(found))


def _tokenizer(vocabulary: _Vocabulary) -> Tokenizer:
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    builder = builders.get(vocabulary.kind)
    if builder is None:
        raise RecipeError(
            f"tokenizer.ggml.model {vocabulary.kind[:40]!r} is not supported",
            where=str(vocabulary.path),
            next=f"Supported: {', '.join(builders)}",
        )
    tokenizer = builder(vocabulary)
    tokenizer.add_special_tokens(_added(vocabulary, _CONTROL))
    tokenizer.add_tokens(_added(vocabulary, _USER_DEFINED))
    return tokenizer


def _added(vocabulary: _Vocabulary, kind: int) -> list[AddedToken]:
    """Tokens matched whole in the text. Phi-3's swallow the white space after them (llama.cpp sets the same)."""
    swallows = vocabulary.architecture == "phi3" and vocabulary.kind == "llama"
    keeps = ("<unk>", "<s>", "<|endoftext|>")
    return [
        AddedToken(token, normalized=False, special=kind == _CONTROL, rstrip=swallows and token not in keeps)
        for token, its_kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if its_kind == kind
    ]


def _ids(vocabulary: _Vocabulary, tokens: list[str]) -> dict[str, int]:
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise vocabulary.error("tokens", "holds a token twice")
    return ids


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    split = _SPLITS.get(vocabulary.pre)
    if split is None:
        raise RecipeError(
            f"tokenizer.ggml.pre {vocabulary.pre[:40]!r}: how this vocabulary splits text is not known",
            where=str(vocabulary.path),
            next=f"Give the model's Hugging Face folder; known here: {', '.join(_SPLITS)}",
        )
    ids = _ids(vocabulary, vocabulary.tokens)
    bpe = models.BPE(vocab=ids, merges=vocabulary.merges(), ignore_merges=vocabulary.pre in _IGNORES_MERGES)
    tokenizer = Tokenizer(bpe)
    if vocabulary.pre in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    if split == _GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif split == _DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        steps = [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _ends(vocabulary, [processors.ByteLevel(trim_offsets=False)])
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece BPE as `tokenizers` spells it: spaces become U+2581, unknown characters fall back to bytes."""
    gemma = vocabulary.architecture.startswith("gemma")
    tokens = [_spaces(token) if gemma else token for token in vocabulary.tokens]
    ids = _ids(vocabulary, tokens)
    order = {token: float(-index) for token, index in ids.items()}
    scores = order if gemma else dict(zip(tokens, vocabulary.scores(), strict=True))
    bpe = models.BPE(
        vocab=ids,
        merges=_derived_merges(ids, scores),
        unk_token=vocabulary.special("unknown") or "<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    prefix = bool(vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    ends = _ends(vocabulary, [])
    if ends is not None:
        tokenizer.post_processor = ends
    return tokenizer


def _spaces(token: str) -> str:
    """Gemma's files store runs of U+2581 as spaces."""
    return "▁" * len(token) if token and not token.strip(" ") else token


def _derived_merges(ids: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merges in SentencePiece's order: every split of a token into two tokens, best-scored token first.

    Splits of one token follow each other in the order of their parts' ids, as in Transformers' `generate_merges`.
    """
    merges: list[tuple[float, int, list[tuple[str, str]]]] = []
    for token, index in ids.items():
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = sorted((cut for cut in cuts if cut[0] in ids and cut[1] in ids), key=lambda p: (ids[p[0]], ids[p[1]]))
        if pairs:
            merges.append((-scores[token], index, pairs))
    return [pair for _, _, pairs in sorted(merges, key=lambda entry: entry[:2]) for pair in pairs]


def _ends(vocabulary: _Vocabulary, steps: list[Any]) -> Any:
    """Post-processor that adds bos and eos where the file says so; None when there is nothing to do."""
    bos = vocabulary.special("bos") if vocabulary.adds_bos else None
    eos = vocabulary.special("eos") if vocabulary.adds_eos else None
    if bos is None and eos is None:
        return steps[0] if steps else None
    one = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    two = [*one, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    specials = [(token, vocabulary.tokens.index(token)) for token in dict.fromkeys((bos, eos)) if token]
    template = processors.TemplateProcessing(single=one, pair=two, special_tokens=specials)
    return processors.Sequence([*steps, template]) if steps else template


def _tokenizer_config(vocabulary: _Vocabulary) -> dict[str, Any]:
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{role}_token": vocabulary.special(key) for role, key in roles.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.adds_bos,
        "add_eos_token": vocabulary.adds_eos,
        **{name: token for name, token in named.items() if token is not None},
    }


def _generation_config(vocabulary: _Vocabulary) -> dict[str, Any]:
    ids = {role: vocabulary.metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in
           (("bos", "bos"), ("pad", "padding"))}  # fmt: skip
    stated = {f"{role}_token_id": value for role, value in ids.items() if isinstance(value, int)}
    return {**stated, "eos_token_id": vocabulary.stops()}
