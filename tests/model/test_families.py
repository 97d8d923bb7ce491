"""Every family computes what Transformers computes, whatever its configuration, prefilled or decoded from our cache."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from quantkit.models import ModelSource, open_source
from quantkit.program import build_program, fuse
from tests.model.parity import Runner, transformers_logits, worst
from tests.tiny import make_checkpoint

LENGTH, PROMPT = 40, 21
_FOLDERS = TemporaryDirectory(prefix="quantkit-families-")


@dataclass(frozen=True)
class Case:
    family: str
    overrides: dict[str, Any] = field(default_factory=dict)
    older: bool = False
    """Rewrite config.json as releases before Transformers 5 wrote it."""
    max_model_len: int = 256


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(16)],
    "long_factor": [1.5 + 0.4 * i for i in range(16)],
}

CASES = {
    "llama": Case("llama"),
    "llama-tied-biased": Case("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-head-80-mqa": Case(
        "llama", {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 80}
    ),
    "llama-mha": Case("llama", {"num_key_value_heads": 4, "vocab_size": 403, "intermediate_size": 200}),
    "llama-linear": Case("llama", {"rope_parameters": LINEAR}),
    "llama-llama3": Case("llama", {"rope_parameters": LLAMA3}),
    "llama-llama3-older": Case("llama", {"rope_parameters": LLAMA3}, older=True),
    "llama-yarn": Case("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": Case(
        "llama",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False}},
    ),
    "mistral": Case("mistral"),
    "mistral-window": Case("mistral", {"sliding_window": 7, "head_dim": 24}),
    "mistral-window-older": Case("mistral", {"sliding_window": 16, "num_key_value_heads": 1}, older=True),
    "qwen2": Case("qwen2"),
    "qwen2-untied": Case("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "qwen2-upper-windows": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "num_hidden_layers": 3}
    ),
    "qwen2-layer-types": Case(
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3": Case("qwen3"),
    "qwen3-head-48-biased": Case("qwen3", {"head_dim": 48, "attention_bias": True, "num_key_value_heads": 1}),
    "qwen3-yarn-tied": Case("qwen3", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "gemma3": Case("gemma3_text"),
    "gemma3-odd": Case(
        "gemma3_text",
        {
            "head_dim": 80,
            "query_pre_attn_scalar": 50,
            "num_key_value_heads": 1,
            "final_logit_softcapping": 4.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3-pattern-older": Case(
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        older=True,
    ),
    "phi3": Case("phi3"),
    "phi3-partial-window": Case(
        "phi3",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "sliding_window": 11,
            "num_key_value_heads": 1,
        },
    ),
    "phi3-longrope-short": Case(
        "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}, max_model_len=64
    ),
    "phi3-longrope-long": Case(
        "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32}, max_model_len=256
    ),
    "phi3-longrope-older": Case(
        "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32}, older=True
    ),
}  # fmt: skip


def write_older(folder: Path) -> None:
    """Rewrite config.json as before Transformers 5: `rope_theta`, `rope_scaling`, `torch_dtype`, no layer list."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    if config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        kinds = config.pop("layer_types")
        config.pop("_sliding_window_pattern")
        config["sliding_window_pattern"] = kinds.index("full_attention") + 1
    config["rope_theta"] = rope.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    if rope["rope_type"] != "default":
        rope["type"] = rope["rope_type"]
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    path.write_text(json.dumps(config))


@cache
def checkpoint(name: str) -> Path:
    case = CASES[name]
    folder = make_checkpoint(Path(_FOLDERS.name) / name, case.family, **case.overrides)
    if case.older:
        write_older(folder)
    return folder


@cache
def sequences(name: str) -> list[list[int]]:
    vocabulary = source(name).spec.vocab_size
    return torch.randint(0, vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()


@cache
def source(name: str) -> ModelSource:
    return open_source(str(checkpoint(name)))


@cache
def theirs(name: str) -> list[torch.Tensor]:
    return transformers_logits(checkpoint(name), sequences(name))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CASES)
def test_prefill_and_decode_give_the_logits_of_transformers(name: str, backend: str) -> None:
    program = fuse(build_program(source(name).spec))
    runner = Runner(program, source(name), 2, LENGTH, backend, CASES[name].max_model_len)
    assert worst(runner.prefill(sequences(name)), theirs(name)) <= 1e-4
    runner.executor.clear_cache()
    assert worst(runner.decode(sequences(name), PROMPT), theirs(name)) <= 1e-4


@pytest.mark.parametrize("name", CASES)
def test_fused_and_unfused_programs_give_equal_logits(name: str) -> None:
    program = build_program(source(name).spec)
    plain = Runner(program, source(name), 2, LENGTH, "reference", CASES[name].max_model_len)
    fused = Runner(fuse(program), source(name), 2, LENGTH, "reference", CASES[name].max_model_len)
    assert worst(plain.prefill(sequences(name)), fused.prefill(sequences(name))) <= 1e-5


def test_logits_of_the_cases_spread_enough_to_tell_a_wrong_model() -> None:
    """Near-uniform logits would pass any comparison; a model with another seed must differ by far more than 1e-4."""
    for name in CASES:
        assert theirs(name)[0].std() > 0.5, name
