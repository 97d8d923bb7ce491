"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a window on the upper layers when switched on."""

from __future__ import annotations

from quantkit.models.config import Config
from quantkit.models.families import common
from quantkit.models.spec import DecoderSpec


def spec(config: Config) -> DecoderSpec:
    """DecoderSpec of a `model_type: qwen2` config."""
    head_dim = common.head_dim(config)
    return common.decoder(
        config,
        "qwen2",
        layers=common.qwen_windows(config),
        ropes=common.whole_head_rope(config, head_dim),
        head_dim=head_dim,
        qkv_bias=True,
    )
