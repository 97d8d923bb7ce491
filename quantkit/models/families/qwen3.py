"""Qwen3 (dense): Qwen2 without its biases, with a norm on every head of q and k, and its own head size."""

from __future__ import annotations

from quantkit.models.config import Config
from quantkit.models.families import common
from quantkit.models.spec import DecoderSpec


def spec(config: Config) -> DecoderSpec:
    """DecoderSpec of a `model_type: qwen3` config."""
    head_dim = common.head_dim(config, default=128)
    bias = config.flag("attention_bias", False)
    return common.decoder(
        config,
        "qwen3",
        layers=common.qwen_windows(config),
        ropes=common.whole_head_rope(config, head_dim),
        head_dim=head_dim,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )
