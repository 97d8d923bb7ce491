"""What a config.json asks for and we would compute wrongly is refused by name; what is malformed is named."""

from __future__ import annotations

from typing import Any

import pytest

from quantkit.errors import CheckpointError, QuantkitError, RecipeError
from quantkit.models import spec_from_config

GOOD: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def refusal(**changes: Any) -> QuantkitError:
    with pytest.raises(QuantkitError) as caught:
        spec_from_config(GOOD | changes)
    return caught.value


def test_a_minimal_older_config_is_enough() -> None:
    spec = spec_from_config(GOOD)
    assert (spec.head_dim, spec.num_kv_heads, spec.tied, spec.ropes["global"].theta) == (16, 2, False, 10000.0)


def test_unknown_family_names_the_supported_ones_and_what_is_missing() -> None:
    error = refusal(model_type="mamba")
    assert isinstance(error, RecipeError)
    for word in ("'mamba'", "adapter", "llama", "gemma3", "phi3", "qwen3"):
        assert word in error.line()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "relu"}, ("hidden_act", "'relu'", "silu")),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("rope_type", "'dynamic'", "yarn")),
        ({"rope_parameters": {"rope_type": "mrope"}}, ("rope_type", "'mrope'")),
        ({"num_local_experts": 8}, ("num_local_experts", "mixture-of-experts")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq", "unquantized")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
        ({"dtype": "float64"}, ("dtype", "'float64'")),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, ("layer_types", "Mistral")),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, ("use_sliding_window",)),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 2}, ("'chunked_attention'",)),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, ("attn_logit_softcapping",)),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, ("use_bidirectional_attention",)),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}}, ("full_attention",)),
    ],
)  # fmt: skip
def test_unsupported_features_are_refused_by_name(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    error = refusal(**changes)
    assert isinstance(error, RecipeError)
    assert error.exit_code == 2
    assert all(word in error.line() for word in words), error.line()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": None}, ("vocab_size is missing",)),
        ({"hidden_size": "64"}, ("hidden_size",)),
        ({"hidden_size": True}, ("hidden_size",)),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers", "4096")),
        ({"num_attention_heads": 0}, ("num_attention_heads",)),
        ({"num_attention_heads": 5}, ("5 heads",)),
        ({"num_key_value_heads": 3}, ("4 heads do not divide over 3",)),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps",)),
        ({"rope_theta": -1.0}, ("rope_theta",)),
        ({"rope_theta": 1.0}, ("rope_theta",)),
        ({"rope_parameters": [1]}, ("rope_parameters",)),
        ({"rope_scaling": {"type": "linear"}}, ("factor is missing",)),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, ("short_factor", "8")),
        ({"layer_types": ["full_attention"], "model_type": "qwen2"}, ("layer_types", "2")),
        ({"model_type": "gemma3"}, ("text_config",)),
        ({"model_type": 7}, ("model_type",)),
        ({"head_dim": 1 << 40}, ("head_dim",)),
    ],
)  # fmt: skip
def test_malformed_values_name_their_key(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    error = refusal(**changes)
    assert isinstance(error, CheckpointError)
    assert error.exit_code == 3
    assert all(word in error.line() for word in words), error.line()


def test_a_quantized_multimodal_config_is_refused_too() -> None:
    inner = {key: value for key, value in GOOD.items() if key != "model_type"}
    with pytest.raises(RecipeError, match="already quantized"):
        spec_from_config(
            {"model_type": "gemma3", "text_config": inner, "quantization_config": {"quant_method": "bitsandbytes"}}
        )


def test_qwen_windows_start_at_max_window_layers_and_only_when_switched_on() -> None:
    base = GOOD | {"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 1}
    assert [layer.window for layer in spec_from_config(base).layers] == [None, None]
    on = spec_from_config(base | {"use_sliding_window": True})
    assert [layer.window for layer in on.layers] == [None, 32]


def test_gemma_without_a_layer_list_sees_everything_on_every_sixth_layer() -> None:
    spec = spec_from_config(GOOD | {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 512})
    assert [layer.window for layer in spec.layers] == [512] * 5 + [None, 512]
    assert [layer.rope for layer in spec.layers] == ["local"] * 5 + ["global", "local"]
    assert (spec.ropes["global"].theta, spec.ropes["local"].theta) == (1e6, 1e4)
