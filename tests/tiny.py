"""Tiny random checkpoints of every supported family, each with a real byte-level BPE tokenizer trained in code.

`make_checkpoint(folder, "llama")` writes what a hub repository holds: config.json, safetensors, tokenizer, chat
template, generation_config.json. Weights are scaled so that logits spread like a trained model's (a default
initialisation gives near-uniform logits, on which every comparison passes). Sizes divide by 32, 64 and 128, so
that every scheme applies. The same arguments give the same bytes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3")

_CORPUS = (
    "The quick brown fox jumps over the lazy dog while the river runs slowly towards the sea.",
    "Please summarise the attached invoice and reply to the customer before Friday, thank you.",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 2 * i))\n",
    "请把附件中的发票总结一下,并在星期五之前回复客户,谢谢。模型的输出应当稳定可靠。",
    '{"name": "widget", "price": 12.50, "tags": ["blue", "small"], "stock": 42}',
)


@dataclass(frozen=True)
class ChatFlavour:
    """How one family marks turns: special tokens, the ids that stop generation, the chat template."""

    bos: str | None
    eos: str
    stops: tuple[str, ...]
    specials: tuple[str, ...]
    template: str
    adds_bos: bool


_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_PHI = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

FLAVOURS = {
    "llama": ChatFlavour(
        "<|begin_of_text|>",
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eot_id|>"),
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        _LLAMA,
        True,
    ),
    "mistral": ChatFlavour("<s>", "</s>", ("</s>",), ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), _MISTRAL, True),
    "qwen2": ChatFlavour(
        None,
        "<|im_end|>",
        ("<|im_end|>", "<|endoftext|>"),
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        _CHATML,
        False,
    ),
    "gemma3_text": ChatFlavour(
        "<bos>",
        "<eos>",
        ("<eos>", "<end_of_turn>"),
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        _GEMMA,
        True,
    ),
    "phi3": ChatFlavour(
        "<s>",
        "<|endoftext|>",
        ("<|endoftext|>", "<|end|>"),
        ("<unk>", "<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
        _PHI,
        False,
    ),
}
FLAVOURS["qwen3"] = FLAVOURS["qwen2"]
FLAVOURS["gemma3"] = FLAVOURS["gemma3_text"]

_SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "num_hidden_layers": 3,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": {"original_max_position_embeddings": 256},
}  # fmt: skip


@functools.cache
def _bpe(specials: tuple[str, ...], bos: str | None) -> str:
    """tokenizer.json of a byte-level BPE with `specials` first; it puts `bos` in front of a text when given."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=352,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer.to_str()


def write_tokenizer(folder: Path, family: str) -> dict[str, int]:
    """Writes the family's tiny tokenizer, chat template and tokenizer_config; gives special token -> id."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    flavour = FLAVOURS[family]
    tokenizer = Tokenizer.from_str(_bpe(flavour.specials, flavour.bos if flavour.adds_bos else None))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=flavour.bos, eos_token=flavour.eos, clean_up_tokenization_spaces=False
    )
    fast.chat_template = flavour.template
    fast.save_pretrained(str(folder))
    return {token: tokenizer.token_to_id(token) for token in flavour.specials}


def make_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A tiny random Transformers causal model of `family` in float32; `overrides` are config.json keys."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = _SIZES | _FAMILY_SIZES[family] | overrides
    if "layer_types" in fields and len(fields["layer_types"]) != fields["num_hidden_layers"]:
        del fields["layer_types"]
    fields |= {key: None for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key not in overrides}
    config = AutoConfig.for_model(family, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    _randomise(model.named_parameters(), seed)
    return model


def _randomise(parameters: Iterator[tuple[str, Any]], seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * 1.5 / math.sqrt(parameter.shape[1]))
            else:  # norms keep their resting value (1, or Gemma's 0), biases start at 0
                parameter.add_(noise * 0.2)


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    dtype: str = "float32",
    tied: bool | None = None,
    sharded: bool = False,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Writes a tiny random checkpoint of `family` into `folder` (made if missing) and gives it back.

    Args:
        folder: where to write.
        family: one of FAMILIES (a Hugging Face `model_type`).
        dtype: "float32", "float16" or "bfloat16" storage.
        tied: whether head and embedding are one tensor; None takes the family's usual choice here.
        sharded: several safetensors files and an index instead of one file.
        seed: of the random weights.
        overrides: any config.json key (`num_hidden_layers=4`, `rope_parameters={...}`).
    """
    import torch

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(folder, family)
    flavour = FLAVOURS[family]
    overrides.setdefault("eos_token_id", ids[flavour.eos])
    if flavour.bos is not None:
        overrides.setdefault("bos_token_id", ids[flavour.bos])
    if tied is not None:
        overrides["tie_word_embeddings"] = tied
    model = make_model(family, seed=seed, **overrides).to(getattr(torch, dtype))
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size="256KB" if sharded else "5GB")
    generation = {"eos_token_id": [ids[token] for token in flavour.stops], "do_sample": False}
    if flavour.bos is not None:
        generation["bos_token_id"] = ids[flavour.bos]
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (folder / "LICENSE").write_text("Random numbers made by quantkit's tests; do with them as you like.\n")
    return folder
