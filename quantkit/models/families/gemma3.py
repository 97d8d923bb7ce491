"""Gemma 3: the text model, alone (`gemma3_text`) or inside an image-and-text checkpoint (`gemma3`).

Norms compute x · (1 + w), four a layer; heads of q and k are normed; embeddings are scaled by sqrt(hidden_size);
windowed layers turn by their own, faster rope. Transformers rounds the embedding scale to the type it computes in
(`Gemma3TextScaledWordEmbedding`); ours is float32, where nothing is rounded away.
"""

from __future__ import annotations

import math
import re
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.models.config import Config, layer_types, rope_entry, rope_spec
from quantkit.models.families import common
from quantkit.models.spec import DecoderSpec, LayerSpec, RopeSpec, TensorNames

_NAMES = TensorNames(
    post_attention_norm="model.layers.{i}.post_attention_layernorm.weight",
    mlp_norm="model.layers.{i}.pre_feedforward_layernorm.weight",
    post_mlp_norm="model.layers.{i}.post_feedforward_layernorm.weight",
)
_LAYER_ROPES = {"full_attention": "global", "sliding_attention": "local"}
_VISION = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")


def spec(config: Config) -> DecoderSpec:
    """DecoderSpec of a `model_type: gemma3_text` config."""
    if config.optional_number("attn_logit_softcapping") is not None:
        raise config.unsupported(
            "attn_logit_softcapping is set: Transformers' Gemma 3 ignores it, so its meaning is open"
        )
    head_dim = common.head_dim(config, default=256)
    kinds = _layer_types(config)
    window = config.integer("sliding_window", 4096) if "sliding_attention" in kinds else None
    return common.decoder(
        config,
        "gemma3_text",
        layers=[
            LayerSpec(rope=_LAYER_ROPES[kind], window=window if kind == "sliding_attention" else None) for kind in kinds
        ],
        ropes={_LAYER_ROPES[kind]: _rope(config, kind, head_dim) for kind in dict.fromkeys(kinds)},
        head_dim=head_dim,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
        norm_offset=1.0,
        qkv_bias=config.flag("attention_bias", False),
        o_bias=config.flag("attention_bias", False),
        qk_norm=True,
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        logits_softcap=config.optional_number("final_logit_softcapping"),
        embedding_scale=math.sqrt(config.integer("hidden_size")),
        names=_NAMES,
    )


def _layer_types(config: Config) -> tuple[str, ...]:
    """`layer_types`, else every `sliding_window_pattern`-th layer (6 by default) sees everything."""
    count = common.num_layers(config)
    kinds = layer_types(config, count)
    if kinds is not None:
        return kinds
    pattern = config.integer("sliding_window_pattern", config.data.get("_sliding_window_pattern") or 6)
    return tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count))


def _rope(config: Config, kind: str, head_dim: int) -> RopeSpec:
    """One layer type's rope: nested `rope_parameters`, or `rope_theta`/`rope_local_base_freq`/`rope_scaling`."""
    older = config.data.get("rope_scaling")
    theta = (
        config.number("rope_theta", 1_000_000.0)
        if kind == "full_attention"
        else config.number("rope_local_base_freq", 10_000.0)
    )
    stated = config.data.get("rope_parameters")
    if isinstance(stated, dict) and stated and not set(stated) <= set(_LAYER_ROPES):
        raise config.unsupported(f"rope_parameters must hold {' and '.join(_LAYER_ROPES)}, found {sorted(stated)}")
    entry: dict[str, Any] = rope_entry(Config({"rope_parameters": stated}, config.where), nested=kind)
    if older and kind == "full_attention":
        entry |= rope_entry(Config({"rope_scaling": older}, config.where))
    rope = rope_spec(config, entry, head_dim=head_dim, theta=theta)
    if rope.rotary_dim != head_dim:
        raise config.unsupported("partial_rotary_factor is set: Transformers' Gemma 3 turns the whole head")
    return rope


def text_config(config: Config) -> dict[str, Any]:
    """The `gemma3_text` config inside a `gemma3` one, complete on its own."""
    inner = config.data.get("text_config")
    if not isinstance(inner, dict):
        raise CheckpointError(
            "text_config is missing", where=config.where, next="Give the model's complete config.json"
        )
    kept = {
        key: config.data[key]
        for key in ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
        if config.data.get(key) is not None
    }
    if config.data.get("quantization_config"):
        kept["quantization_config"] = config.data["quantization_config"]
    own = {key: value for key, value in inner.items() if value is not None}
    return kept | own | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}


def text_name(name: str) -> str | None:
    """The text model's own name of a tensor in a `gemma3` checkpoint; None for the vision part.

    Published files say `language_model.model.*`, files Transformers 5 writes may say `model.language_model.*`.
    """
    if _VISION.match(name):
        return None
    for prefix, replacement in (("language_model.", ""), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
