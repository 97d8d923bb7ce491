"""The recipes that ship by model: each is planned from the model's published config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantkit.build.plan import Plan, plan
from quantkit.recipe.load import load_recipe
from quantkit.recipe.templates import MODELS, template_text
from quantkit.resources import resource

_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "num_hidden_layers": 28,
    "attention_dropout": 0.0, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-06,
    "use_sliding_window": False, "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
    },
    "qwen2.5-1.5b": _QWEN2 | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151936, "max_window_layers": 21, "sliding_window": 32768, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": _QWEN2 | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "max_window_layers": 28, "sliding_window": 131072, "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
        "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36,
        "attention_bias": False, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "bos_token_id": 151643, "eos_token_id": 151645,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "vocab_size": 262144, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 512,
        "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "attention_bias": False, "hidden_activation": "gelu_pytorch_tanh",
        "torch_dtype": "bfloat16", "bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32768, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
_PUBLISHED: dict[str, tuple[int, int]] = {
    "llama-3.2-1b": (1_235_814_400, 32768),
    "qwen2.5-1.5b": (1_543_714_304, 28672),
    "qwen2.5-7b": (7_615_616_512, 57344),
    "qwen3-4b": (4_022_468_096, 147456),
    "gemma-3-1b": (999_885_952, 26624),
    "mistral-7b": (7_248_023_552, 131072),
}
"""Parameters, as the hub counts them, and bytes of a token in a 16-bit cache."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    made = {}
    for name in MODELS:
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(_CONFIGS[name]))
        loaded = load_recipe(resource(f"recipes/{name}.yaml"), [f"model.source={folder}"])
        made[name] = plan(loaded, folder / "out")
    return made


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_planned_from_its_config_alone(plans: dict[str, Plan], name: str) -> None:
    made = plans[name]
    parameters, kv_bytes = _PUBLISHED[name]
    assert not made.has_weights
    assert made.parameters == pytest.approx(parameters, rel=2e-3), "norms and biases are all that is not counted"
    assert made.kv_bytes_per_token == kv_bytes // 2, "INT8 takes half of 16 bits"
    assert made.least_bits < made.budget_bits - 0.2, "the search has something to spend"
    assert any(len(schemes) > 1 for schemes in made.schemes.values())


@pytest.mark.parametrize("name", MODELS)
def test_the_payload_and_the_builds_memory_are_far_below_the_source(plans: dict[str, Plan], name: str) -> None:
    made = plans[name]
    assert made.source_bytes == pytest.approx(2 * made.parameters, rel=1e-6)
    assert 0.3 * made.source_bytes < made.payload_bytes < 0.6 * made.source_bytes
    building = {stage.name: stage.memory_bytes for stage in made.stages if stage.name != "gate"}
    assert max(building.values()) < 9e9, building
    assert made.kv_bytes < 8e9


@pytest.mark.parametrize("name", MODELS)
def test_init_writes_the_recipe_with_the_users_model(tmp_path: Path, name: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(template_text(name, "my/model's folder"))
    assert load_recipe(path).recipe.model.source == "my/model's folder"
