"""Tiny GGUF files: what llama.cpp's converter makes of a tiny Hugging Face checkpoint, written with `gguf`'s writer.

Tensor names come from the gguf package's own table, the row order of q and k from the converter's `permute`; neither is
the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`: rows i and i + head_dim/2 of a head become neighbours."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_gguf(
    checkpoint: Path,
    path: Path,
    *,
    kind: str = "F32",
    pre: str = "gpt-2",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Convert a single-file tiny checkpoint to GGUF.

    Args:
        checkpoint: folder made by `tests.tiny.make_checkpoint`.
        path: file to write.
        kind: how matrices are stored ("F32", "F16", "BF16", "Q8_0", "Q4_1", ...); vectors stay F32.
        pre: `tokenizer.ggml.pre`.
        metadata: further or overriding keys under the architecture's prefix.
        tensors: further tensors, by GGUF name.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny " + config["model_type"])
    for key, value in (_keys(config) | dict(metadata or {})).items():
        _add(writer, f"{architecture}.{key}", value)
    _tokenizer(writer, checkpoint, pre)
    _tensors(writer, checkpoint, config, architecture, gguf.GGMLQuantizationType[kind])
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _keys(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": head_dim,
    }
    if config["model_type"] == "gemma3_text":
        keys["rope.freq_base"] = float(rope["full_attention"]["rope_theta"])
        keys["attention.sliding_window"] = config["sliding_window"]
        return keys
    keys["rope.freq_base"] = float(rope["rope_theta"])
    if config["model_type"] == "phi3":
        keys["rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
        keys["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        keys["attention.sliding_window"] = config["sliding_window"] or 0
    if rope["rope_type"] in ("linear", "yarn"):
        keys["rope.scaling.type"] = rope["rope_type"]
        keys["rope.scaling.factor"] = float(rope["factor"])
        if rope["rope_type"] == "yarn":
            keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return keys


def _tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, pre: str) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    stated = json.loads((checkpoint / "tokenizer_config.json").read_text())
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    merges = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    )
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokens.index(stated["eos_token"]))
    if stated.get("bos_token"):
        writer.add_bos_token_id(tokens.index(stated["bos_token"]))
    writer.add_add_bos_token(len(tokenizer.encode("a").ids) > len(tokenizer.encode("a", add_special_tokens=False).ids))
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())


def _tensors(
    writer: gguf.GGUFWriter,
    checkpoint: Path,
    config: Mapping[str, Any],
    architecture: str,
    kind: gguf.GGMLQuantizationType,
) -> None:
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        stem, suffix = name.rsplit(".", 1)
        stored = names.get_name(stem)
        array = tensor.to(torch.float32).numpy()
        part = stored.rsplit(".", 1)[-1]
        if architecture == "llama" and part in heads:
            array = permute(array, heads[part])
        if architecture == "gemma3" and stored.endswith("norm"):
            array = array + 1
        if array.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(f"{stored}.{suffix}", np.ascontiguousarray(array))
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(array), kind)
            writer.add_tensor(f"{stored}.{suffix}", packed, raw_dtype=kind)
