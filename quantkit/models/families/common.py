"""What every family's adapter shares: sizes, activation, windows, and the one rope most of them have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from quantkit.errors import CheckpointError
from quantkit.models.config import Config, layer_types, one_of, refuse_unsupported, rope_entry, rope_spec
from quantkit.models.spec import Activation, DecoderSpec, LayerSpec, RopeSpec

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_DTYPES: dict[str, Literal["float32", "float16", "bfloat16"]] = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
}
_MOST_LAYERS = 4096


def num_layers(config: Config) -> int:
    """`num_hidden_layers`, at most 4096."""
    return config.integer("num_hidden_layers", most=_MOST_LAYERS)


def decoder(
    config: Config,
    family: str,
    *,
    layers: Sequence[LayerSpec],
    ropes: Mapping[str, RopeSpec],
    head_dim: int,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    eps: float = 1e-6,
    tied: bool = False,
    **changes: Any,
) -> DecoderSpec:
    """A DecoderSpec from the keys all families write alike; `changes` are its further fields.

    `activation`, `eps` and `tied` are the family's defaults for keys that older configs leave out.
    """
    refuse_unsupported(config)
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} heads do not divide over {kv_heads} key-value heads", where=config.where)
    stated = config.text("dtype", config.data.get("torch_dtype") or "float16")
    return DecoderSpec(
        family=family,
        dtype=one_of(config, "dtype", stated, _DTYPES),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", eps),
        layers=tuple(layers),
        ropes=ropes,
        max_position=config.integer("max_position_embeddings"),
        activation=one_of(config, activation_key, config.text(activation_key, activation), ACTIVATIONS),
        tied=config.flag("tie_word_embeddings", tied),
        **changes,
    )


def head_dim(config: Config, default: int | None = None) -> int:
    """`head_dim`, or `default`, or hidden_size divided over the heads."""
    stated = config.optional_integer("head_dim", default)
    if stated is not None:
        return stated
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % heads:
        raise CheckpointError(f"hidden_size {hidden} does not divide over {heads} heads", where=config.where)
    return hidden // heads


def whole_head_rope(config: Config, head_dim: int) -> dict[str, RopeSpec]:
    """The one rope of Llama-like families, named "global"; it must turn the whole head."""
    entry = rope_entry(config)
    rope = rope_spec(
        config,
        entry,
        head_dim=head_dim,
        theta=config.number("rope_theta", 10_000.0),
        partial=config.number("partial_rotary_factor", 1.0),
    )
    if rope.rotary_dim != head_dim:
        raise config.unsupported(
            f"partial_rotary_factor turns {rope.rotary_dim} of {head_dim} channels: "
            "this family's Transformers model turns all of them"
        )
    return {"global": rope}


def qwen_windows(config: Config) -> tuple[LayerSpec, ...]:
    """Layers of Qwen2 and Qwen3: `layer_types`, else a window from layer `max_window_layers` on, if switched on."""
    count = num_layers(config)
    window = config.optional_integer("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    kinds = layer_types(config, count)
    if kinds is None:
        first = config.data.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise CheckpointError(f"max_window_layers must be a whole number, found {first!r}", where=config.where)
        kinds = tuple(
            "sliding_attention" if window is not None and i >= first else "full_attention" for i in range(count)
        )
    if window is None and "sliding_attention" in kinds:
        raise config.unsupported("layer_types holds sliding_attention, but use_sliding_window or sliding_window is off")
    return tuple(LayerSpec(window=window if kind == "sliding_attention" else None) for kind in kinds)
