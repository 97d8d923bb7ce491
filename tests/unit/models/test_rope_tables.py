"""Rope tables are what Transformers' ROPE_INIT_FUNCTIONS give, kind by kind, to the last bits, and better rounded."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quantkit.models import spec_from_config
from quantkit.models.rope import cos_sin, inverse_frequencies
from quantkit.models.spec import RopeSpec

SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
LONG = [1.0 + 0.2 * i for i in range(32)]
SHORT = [1.0 + 0.01 * i for i in range(32)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "original_max_position_embeddings": 512, **LLAMA3},
    "llama3-no-original": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "yarn-no-original": {"rope_type": "yarn", "factor": 2.0},
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.25,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
    },
    "yarn-untruncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "long_factor": LONG,
        "short_factor": SHORT,
    },
    "longrope-factors": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "long_factor": LONG,
        "short_factor": SHORT,
        "factor": 16.0,
        "attention_factor": 1.1,
    },
}


def rope_of(config: dict[str, Any]) -> RopeSpec:
    return spec_from_config(config).ropes["global"]


def assert_is(rope: RopeSpec, positions: int, theirs: Tensor, factor: float) -> None:
    """Frequencies within three units in the last place of Transformers', of which its float32 power is one or two;
    cosines and sines the nearest there are to those of the same float32 angles, but for the factor's own rounding."""
    inverse, ours = inverse_frequencies(rope, positions)
    assert ours == factor
    np.testing.assert_array_max_ulp(inverse, theirs.numpy(), maxulp=3)
    angles = (np.arange(positions, dtype=np.float32)[:, None] * inverse).astype(np.float64)
    for table, wanted in zip(cos_sin(rope, positions), (np.cos(angles), np.sin(angles)), strict=True):
        assert table.dtype == np.float32
        np.testing.assert_array_max_ulp(table, rounded(wanted * factor), maxulp=0 if factor == 1 else 2)


def rounded(values: NDArray[np.float64]) -> NDArray[np.float32]:
    return values.astype(np.float32)


@pytest.mark.parametrize("positions", [300, 700])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_rope_equals_transformers(name: str, positions: int) -> None:
    entry = {"rope_theta": 500000.0, **SCALED[name]}
    rope = rope_of({"model_type": "llama", **SIZES, "rope_parameters": entry})
    config = LlamaConfig(**SIZES, rope_parameters=dict(entry))
    inverse, factor = ROPE_INIT_FUNCTIONS[entry["rope_type"]](config, None, seq_len=positions)
    assert_is(rope, positions, inverse, factor)


@pytest.mark.parametrize("name", SCALED)
def test_older_rope_scaling_gives_the_same_tables(name: str) -> None:
    entry = SCALED[name]
    new = rope_of({"model_type": "llama", **SIZES, "rope_parameters": {"rope_theta": 10000.0, **entry}})
    scaling = {"type" if key == "rope_type" else key: value for key, value in entry.items()}
    old = rope_of({"model_type": "llama", **SIZES, "rope_theta": 10000.0, "rope_scaling": scaling})
    assert new == old


def test_default_rope_equals_transformers() -> None:
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    inverse, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    rope = rope_of({"model_type": "llama", **SIZES})
    assert_is(rope, 128, inverse, factor)
    assert cos_sin(rope, 128)[0].shape == (128, 32)


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6, 12345.678])
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
def test_powers_of_theta_are_rounded_once(theta: float, dim: int) -> None:
    exponents = (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)).astype(np.float64)
    powers = [rounded(np.float64(Decimal(theta) ** Decimal(exponent))) for exponent in exponents]
    inverse, _ = inverse_frequencies(RopeSpec("default", theta, dim), 1)
    assert np.array_equal(inverse, np.float32(1) / np.array(powers))


def test_longrope_takes_the_long_factors_past_the_original_context_only() -> None:
    rope = rope_of({"model_type": "llama", **SIZES, "rope_parameters": SCALED["longrope"]})
    short, edge, long = cos_sin(rope, 511), cos_sin(rope, 512), cos_sin(rope, 513)
    assert np.array_equal(short[1], edge[1][:511])
    assert not np.array_equal(edge[1], long[1][:512])


@pytest.mark.parametrize("top_level", [64, None])
def test_phi3_original_context_at_the_top_level_wins(top_level: int | None) -> None:
    """Phi-3 keeps it beside the rope, as standardize_rope_params prefers; its default there is 4096."""
    entry = {"rope_type": "longrope", "long_factor": LONG, "short_factor": SHORT}
    stated = {} if top_level is None else {"original_max_position_embeddings": top_level}
    sizes = SIZES | {"max_position_embeddings": 8192}
    rope = rope_of({"model_type": "phi3", **sizes, **stated, "rope_parameters": {"rope_theta": 1e4, **entry}})
    config = Phi3Config(**sizes, **stated, pad_token_id=0, rope_parameters={"rope_theta": 1e4, **entry})
    inverse, factor = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=100)
    assert_is(rope, 100, inverse, factor)


def test_phi3_calls_longrope_su_in_its_first_configs() -> None:
    scaling = {"type": "su", "long_factor": LONG, "short_factor": SHORT}
    assert rope_of({"model_type": "phi3", **SIZES, "rope_scaling": scaling}).kind == "longrope"
