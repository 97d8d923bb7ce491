"""Llama 2, 3.x and what follows their shape (SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

from quantkit.models.config import Config
from quantkit.models.families import common
from quantkit.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """DecoderSpec of a `model_type: llama` config: one rope, no windows, optional biases on every projection."""
    head_dim = common.head_dim(config)
    bias = config.flag("attention_bias", False)
    return common.decoder(
        config,
        "llama",
        layers=[LayerSpec()] * common.num_layers(config),
        ropes=common.whole_head_rope(config, head_dim),
        head_dim=head_dim,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )
