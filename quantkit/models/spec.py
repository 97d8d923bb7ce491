"""DecoderSpec: a decoder-only architecture described as data.

One adapter per Hugging Face family (`quantkit/models/families/`) turns a `config.json` into this; the program
builder turns this into ops. Nothing here knows a tensor's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of `rotary_dim` leading channels of each head (rotate-half pairing).

    `params` holds the kind's own numbers under their Hugging Face names (`factor`, `low_freq_factor`,
    `original_max_position_embeddings`, `long_factor`, ...).
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerSpec:
    """What differs between layers: `window` is the number of positions seen, itself included (None: all)."""

    rope: str = "global"
    window: int | None = None


@dataclass(frozen=True)
class Part:
    """Rows `[start, stop)` of one source tensor `[N, K]` (or elements of a vector), under its checkpoint name."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True)
class TensorNames:
    """Checkpoint names by role, `{i}` standing for the layer.

    `qkv` lists the tensors whose rows hold q, then k, then v (one name when the checkpoint stores them fused, as
    Phi-3 does), `gate_up` likewise gate, then up.
    """

    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    input_norm: str = "model.layers.{i}.input_layernorm.weight"
    qkv: tuple[str, ...] = (
        "model.layers.{i}.self_attn.q_proj.weight",
        "model.layers.{i}.self_attn.k_proj.weight",
        "model.layers.{i}.self_attn.v_proj.weight",
    )
    o: str = "model.layers.{i}.self_attn.o_proj.weight"
    q_norm: str = "model.layers.{i}.self_attn.q_norm.weight"
    k_norm: str = "model.layers.{i}.self_attn.k_norm.weight"
    post_attention_norm: str = ""
    """Norm on the attention block's output before the residual add (Gemma); empty: none."""
    mlp_norm: str = "model.layers.{i}.post_attention_layernorm.weight"
    gate_up: tuple[str, ...] = (
        "model.layers.{i}.mlp.gate_proj.weight",
        "model.layers.{i}.mlp.up_proj.weight",
    )
    down: str = "model.layers.{i}.mlp.down_proj.weight"
    post_mlp_norm: str = ""
    """Norm on the MLP's output before the residual add (Gemma); empty: none."""


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer. Sizes in elements; `dtype` is the source's own storage type."""

    family: str
    dtype: Literal["float32", "float16", "bfloat16"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: Mapping[str, RopeSpec]
    max_position: int
    activation: Activation = "silu"
    norm_offset: float = 0.0
    """Added to every norm weight: 1.0 for Gemma, whose norms compute x · (1 + w)."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_scale: float = 0.0
    """Multiplies q·k; 0 stands for head_dim ** -0.5."""
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    tied: bool = False
    names: TensorNames = field(default_factory=TensorNames)

    @property
    def scale(self) -> float:
        """The factor on q·k."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)
