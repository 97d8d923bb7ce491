"""A checkpoint quantized on the fly gives each weight as its kind and scheme say."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.errors import RecipeError
from quantkit.formats import QuantizedMatrix, scheme
from quantkit.formats.minmax import quantize_minmax
from quantkit.models import SourceWeights, open_source
from quantkit.program import build_program, fuse, lower_precision
from quantkit.quantize.rtn import rtn
from quantkit.quantize.weights import RtnWeights
from quantkit_kernels.arrays import BFLOAT16
from tests.tiny import make_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_source(str(make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", tied=True, dtype="bfloat16")))


@pytest.fixture
def program(source):
    return fuse(build_program(source.spec))


def test_a_group_comes_as_round_to_nearest_of_its_fused_rows(source, program):
    lowered = lower_precision(program, {"layers.0.qkv": "W4A16_G64"}, "FP32")
    made = RtnWeights(source).load(lowered.weights["layers.0.qkv"])
    plain = SourceWeights(source).tensor(program.weights["layers.0.qkv"])
    expected = rtn(plain, scheme("W4A16_G64"), scale_dtype=BFLOAT16)
    assert isinstance(made, QuantizedMatrix)
    assert np.array_equal(made.codes, expected.codes)
    assert np.array_equal(made.scale, expected.scale)


def test_what_is_not_quantized_comes_from_the_source(source, program):
    lowered = lower_precision(program, {"layers.0.qkv": "W8A16"}, "FP32")
    weights, plain = RtnWeights(source), SourceWeights(source)
    for name in ("embed", "layers.0.o", "final_norm", "lm_head"):
        assert np.array_equal(weights.load(lowered.weights[name]), plain.load(program.weights[name]))


def test_a_tied_head_follows_the_rule_its_runtime_will_follow(source, program):
    lowered = lower_precision(program, {"lm_head": "W8A16"}, "FP32")
    made = RtnWeights(source).load(lowered.weights["lm_head"])
    table = SourceWeights(source).load(program.weights["embed"])
    assert np.array_equal(made.codes, quantize_minmax(table, scheme("W8A16"), scale_dtype=BFLOAT16).codes)


def test_kv_scales_are_given_or_missed_by_name(source, program):
    lowered = lower_precision(program, {}, "INT8")
    weight = lowered.weights["layers.1.v_scale"]
    given = np.ones(weight.shape, np.float32)
    assert RtnWeights(source, kv_scales={weight.name: given}).load(weight) is given
    with pytest.raises(RecipeError, match=r"layers\.1\.v_scale"):
        RtnWeights(source).load(weight)
