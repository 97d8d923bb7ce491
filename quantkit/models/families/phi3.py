"""Phi-3, Phi-3.5 and Phi-4 (text): q, k, v stored as one matrix, gate and up as another, longrope, partial rotation."""

from __future__ import annotations

from quantkit.models.config import Config, rope_entry, rope_spec
from quantkit.models.families import common
from quantkit.models.spec import DecoderSpec, LayerSpec, TensorNames

_NAMES = TensorNames(
    qkv=("model.layers.{i}.self_attn.qkv_proj.weight",),
    gate_up=("model.layers.{i}.mlp.gate_up_proj.weight",),
)


def spec(config: Config) -> DecoderSpec:
    """DecoderSpec of a `model_type: phi3` config."""
    head_dim = common.head_dim(config)
    window = config.optional_integer("sliding_window")
    original = config.integer("original_max_position_embeddings", 4096)
    rope = rope_spec(
        Config({**config.data, "original_max_position_embeddings": original}, config.where),
        rope_entry(config),
        head_dim=head_dim,
        theta=config.number("rope_theta", 10_000.0),
        partial=config.number("partial_rotary_factor", 1.0),
        su_is_longrope=True,
    )
    return common.decoder(
        config,
        "phi3",
        layers=[LayerSpec(window=window)] * common.num_layers(config),
        ropes={"global": rope},
        head_dim=head_dim,
        eps=1e-5,
        names=_NAMES,
    )
