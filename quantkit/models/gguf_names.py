"""GGUF tensor names -> Hugging Face names, for the architectures read here.

Source: llama.cpp's `gguf-py/gguf/tensor_mapping.py`. A name not listed keeps its GGUF name, so that what a model holds
beyond its family (experts, rope factors, adapters) is seen by whoever checks the tensors, never dropped.
"""

from __future__ import annotations

import re

_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)\.(weight|bias)$")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_BLOCKS: dict[str, dict[str, str]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | _QK_NORMS,
    "gemma3": _LLAMA
    | _QK_NORMS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
}
ARCHITECTURES = tuple(_BLOCKS)


def hf_name(architecture: str, name: str) -> str:
    """The Hugging Face name of GGUF tensor `name`; the same name when the architecture has no such tensor."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK.match(name)
    if match is None or match[2] not in _BLOCKS[architecture]:
        return name
    return f"model.layers.{match[1]}.{_BLOCKS[architecture][match[2]]}.{match[3]}"
