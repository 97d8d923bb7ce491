"""GGUF metadata -> the `config.json` the model had before llama.cpp's converter.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and `convert_hf_to_gguf.py` for what each architecture
writes. What the file leaves out is what llama.cpp hard-codes for the architecture (named where used).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import CheckpointError, RecipeError
from quantkit.models.config import Config
from quantkit.models.gguf_file import GGUFFile
from quantkit.models.gguf_names import ARCHITECTURES
from quantkit.models.reader import read_exactly
from quantkit.models.rope import inverse_frequencies
from quantkit.models.spec import RopeSpec

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_GEMMA3_27B_LAYERS = 62
_GEMMA3_PATTERN = 6
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that hold rope parameters, not weights; they end up in the config."""


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The model's `config.json` in Hugging Face form (`rope_parameters` as Transformers 5 writes it).

    Raises:
        RecipeError: an architecture or rope that is not supported, named.
        CheckpointError: a missing or malformed key, named.
    """
    arch = file.architecture
    if arch not in ARCHITECTURES:
        raise RecipeError(
            f"GGUF architecture {arch[:60]!r} is not supported",
            where=str(file.path),
            next=f"Supported: {', '.join(ARCHITECTURES)}",
        )
    prefix = f"{arch}."
    keys = Config(
        {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)},
        f"{file.path}: {arch}",
    )
    if keys.data.get("expert_count"):
        raise keys.unsupported(f"expert_count = {keys.data['expert_count']}: mixture-of-experts is not supported yet")
    family = _family(file)
    heads = keys.integer("attention.head_count")
    head_dim = keys.optional_integer("attention.key_length") or keys.integer("embedding_length") // heads
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [_CLASSES[family]],
        "dtype": "float16",
        "vocab_size": _vocab_size(file),
        "hidden_size": keys.integer("embedding_length"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(keys.number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
    }
    for name in ("bos", "eos", "padding"):
        token = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{'pad' if name == 'padding' else name}_token_id"] = token
    return config | _FAMILY[family](file, keys, config)


def _family(file: GGUFFile) -> str:
    """The Hugging Face family; llama.cpp stores Mistral as llama, told apart by its name alone."""
    names = [str(file.metadata.get(f"general.{key}", "")).lower() for key in ("name", "basename")]
    if file.architecture == "llama" and any("mistral" in name for name in names):
        return "mistral"
    return "gemma3_text" if file.architecture == "gemma3" else file.architecture


def _vocab_size(file: GGUFFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise CheckpointError("tensor token_embd.weight is missing", where=str(file.path))
    return table.shape[0]


def _decimal(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _vector(file: GGUFFile, name: str) -> NDArray[np.float32] | None:
    """A float32 vector of the file, or None when it has none of that name."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.kind.name != "F32" or len(tensor.shape) != 1:
        raise CheckpointError("is not a vector of F32", where=f"{file.path}: {name}")
    return read_exactly(file.path, tensor.offset, tensor.size, f"{file.path}: {name}").view(np.float32)


def _theta(keys: Config, default: float = 10_000.0) -> float:
    return _decimal(keys.number("rope.freq_base", default))


def _scaling(file: GGUFFile, keys: Config, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` of a Llama-like architecture: default, linear, yarn, or Llama 3's factors recognised."""
    theta = _theta(keys)
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise keys.unsupported(f"rope.dimension_count differs from the head's {head_dim} channels")
    factors = _vector(file, "rope_freqs.weight")
    if factors is not None:
        return _llama3(file, factors, theta, head_dim)
    kind = keys.text("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": _decimal(keys.number("rope.scaling.factor"))}
    if kind == "yarn":
        entry: dict[str, Any] = {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": _decimal(keys.number("rope.scaling.factor")),
            "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        }
        for key in ("beta_fast", "beta_slow"):
            if keys.data.get(f"rope.scaling.yarn_{key}") is not None:
                entry[key] = _decimal(keys.number(f"rope.scaling.yarn_{key}"))
        return entry
    raise keys.unsupported(f"rope.scaling.type {kind!r} is not supported", next="Supported: none, linear, yarn")


def _llama3(file: GGUFFile, factors: NDArray[np.float32], theta: float, head_dim: int) -> dict[str, Any]:
    """The llama3 parameters behind `rope_freqs.weight`, which holds one divisor a frequency.

    The converter keeps the divisors only. All published models blend between factors 1 and 4; the largest divisor is
    the factor, and the original context is the power of two that reproduces the tensor.
    """
    factor = _decimal(float(factors.max()))
    plain, _ = inverse_frequencies(RopeSpec("default", theta, head_dim), 1)
    for exponent in range(10, 21):
        params = {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1 << exponent,
        }
        scaled, _ = inverse_frequencies(RopeSpec("llama3", theta, head_dim, params), 1)
        if plain.shape == factors.shape and np.allclose(plain / scaled, factors, rtol=1e-3, atol=0):
            return {"rope_type": "llama3", "rope_theta": theta, **params}
    raise RecipeError(
        "holds frequency factors that no llama3 rope with factors 1 and 4 gives",
        where=f"{file.path}: rope_freqs.weight",
    )


def _window(keys: Config) -> int | None:
    """`attention.sliding_window`; converters write 0 for none."""
    return keys.integer("attention.sliding_window") if keys.data.get("attention.sliding_window") else None


def _llama(file: GGUFFile, keys: Config, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_parameters": _scaling(file, keys, config["head_dim"]),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _mistral(file: GGUFFile, keys: Config, config: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": _scaling(file, keys, config["head_dim"]), "sliding_window": _window(keys)}


def _qwen(file: GGUFFile, keys: Config, config: dict[str, Any]) -> dict[str, Any]:
    if keys.data.get("attention.sliding_window"):
        raise keys.unsupported("attention.sliding_window is set: which layers it covers is not in the file")
    biased = {"attention_bias": "blk.0.attn_q.bias" in file.tensors} if config["model_type"] == "qwen3" else {}
    return {"rope_parameters": _scaling(file, keys, config["head_dim"]), "use_sliding_window": False, **biased}


def _gemma3(file: GGUFFile, keys: Config, config: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp hard-codes the window pattern (every 6th layer sees all) and the 27B model's query scale."""
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    pattern = keys.integer("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    whole = {"rope_type": "default", "rope_theta": _theta(keys, 1_000_000.0)}
    kind = keys.text("rope.scaling.type", "none")
    if kind == "linear":
        whole |= {"rope_type": "linear", "factor": _decimal(keys.number("rope.scaling.factor"))}
    elif kind != "none":
        raise keys.unsupported(f"rope.scaling.type {kind!r} is not supported", next="Supported: none, linear")
    scalar = config["hidden_size"] // config["num_attention_heads"] if layers == _GEMMA3_27B_LAYERS else head_dim
    local = _decimal(keys.number("rope.freq_base_swa", 10_000.0))
    changes: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.integer("attention.sliding_window", 1024),
        "layer_types": ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)],
        "rope_parameters": {
            "full_attention": whole,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "attention_bias": False,
    }
    softcap = keys.optional_number("final_logit_softcapping")
    return changes | ({} if softcap is None else {"final_logit_softcapping": _decimal(softcap)})


def _phi3(file: GGUFFile, keys: Config, config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config["head_dim"]
    rotary = keys.integer("rope.dimension_count", head_dim)
    original = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": _theta(keys),
        "partial_rotary_factor": rotary / head_dim,
    }
    long, short = _vector(file, "rope_factors_long.weight"), _vector(file, "rope_factors_short.weight")
    if long is not None and short is not None:
        rope |= {
            "rope_type": "longrope",
            "long_factor": [_decimal(float(value)) for value in long],
            "short_factor": [_decimal(float(value)) for value in short],
        }
    return {
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        "sliding_window": _window(keys),
    }


_FAMILY = {"llama": _llama, "mistral": _mistral, "qwen2": _qwen, "qwen3": _qwen, "gemma3_text": _gemma3, "phi3": _phi3}
