"""Mistral 7B and what follows its shape: Llama with one sliding window on every layer, and no biases."""

from __future__ import annotations

from quantkit.models.config import Config, layer_types
from quantkit.models.families import common
from quantkit.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """DecoderSpec of a `model_type: mistral` config; `sliding_window: null` is full attention."""
    count = common.num_layers(config)
    window = config.optional_integer("sliding_window", 4096)
    wanted = "full_attention" if window is None else "sliding_attention"
    if any(kind != wanted for kind in layer_types(config, count) or ()):
        raise config.unsupported(
            "layer_types differs from sliding_window: Transformers' Mistral gives every layer the same window"
        )
    head_dim = common.head_dim(config)
    return common.decoder(
        config,
        "mistral",
        layers=[LayerSpec(window=window)] * count,
        ropes=common.whole_head_rope(config, head_dim),
        head_dim=head_dim,
    )
