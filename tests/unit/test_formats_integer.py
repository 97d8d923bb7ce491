"""Affine integer codes: properties that every weight and every scheme must keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import CheckpointError, NumericsError, RecipeError
from quantkit.formats import integer
from quantkit.formats.matrix import QuantizedMatrix, concatenate
from quantkit.formats.schemes import SCHEMES, scheme
from quantkit_kernels.arrays import BFLOAT16, cast

QUANTIZED = [s for s in SCHEMES.values() if s.quantized]
seeds = st.integers(0, 2**31 - 1)
fast = settings(max_examples=30, deadline=None)
ONE = np.ones((1, 1), np.float32)


def _case(seed: int, bits: int, symmetric: bool, groups: int = 3, size: int = 32):
    """Codes in range with scales over twelve decades, and the exact weights they stand for."""
    rng = np.random.default_rng(seed)
    low, high = integer.code_range(bits, symmetric=symmetric)
    codes = rng.integers(low, high + 1, (4, groups * size), np.int8)
    scale = ((rng.random((4, groups)) + 0.5) * 10.0 ** rng.integers(-6, 6, (4, groups))).astype(np.float32)
    zero = None if symmetric else rng.integers(low, high + 1, (4, groups), np.int8)
    return codes, scale, zero


@fast
@given(seeds, st.sampled_from([4, 8]), st.booleans())
def test_codes_survive_a_round_trip_through_their_own_values(seed, bits, symmetric):
    codes, scale, zero = _case(seed, bits, symmetric)
    values = integer.dequantize(codes, scale, zero)
    assert np.array_equal(integer.quantize(values, scale, zero, bits), codes)


@fast
@given(seeds, st.sampled_from([4, 8]), st.booleans())
def test_values_in_range_come_back_within_half_a_step(seed, bits, symmetric):
    codes, scale, zero = _case(seed, bits, symmetric)
    jitter = np.random.default_rng(seed).random(codes.shape, np.float32) - np.float32(0.5)
    step = np.repeat(scale, 32, axis=1)
    values = integer.dequantize(codes, scale, zero) + jitter * step
    error = np.abs(integer.dequantize(integer.quantize(values, scale, zero, bits), scale, zero) - values)
    assert (error <= step * 0.5001).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_values_out_of_range_saturate_at_the_last_code(bits, symmetric):
    low, high = integer.code_range(bits, symmetric=symmetric)
    zero = None if symmetric else np.zeros((1, 1), np.int8)
    codes = integer.quantize(np.array([[1e6, -1e6]], np.float32), ONE, zero, bits)
    assert codes.tolist() == [[high, low]]


def test_symmetric_int8_never_uses_its_one_sided_code():
    assert integer.code_range(8, symmetric=True) == (-127, 127)
    assert integer.code_range(4, symmetric=True) == (-8, 7)


def test_negative_zero_is_the_code_of_zero():
    codes = integer.quantize(np.array([[-0.0, 0.0]], np.float32), ONE, None, 8)
    assert codes.tolist() == [[0, 0]]
    assert not np.signbit(integer.dequantize(codes, ONE, None)).any()


def test_an_all_zero_group_gets_a_positive_scale_and_zero_codes():
    for dtype in (np.dtype(np.float16), BFLOAT16):
        scale = integer.round_scale(np.zeros((2, 1), np.float32), dtype)
        assert (scale > 0).all()
        assert not integer.quantize(np.zeros((2, 32), np.float32), scale, None, 4).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_refused_with_their_place(bad):
    weight = np.zeros((3, 64), np.float32)
    weight[2, 17] = bad
    with pytest.raises(NumericsError, match=r"\[2, 17\]"):
        integer.quantize(weight, np.ones((3, 1), np.float32), None, 8)


def test_the_greatest_finite_value_is_not_mistaken_for_inf():
    integer.require_finite(np.full((4, 4), np.finfo(np.float32).max))


def test_a_group_size_that_does_not_divide_names_the_sizes_that_do():
    with pytest.raises(RecipeError, match=r"128 does not divide 576 .* 32, 64"):
        integer.group_count(576, 128)
    with pytest.raises(RecipeError, match="W8A16"):
        integer.group_count(50, 32)
    assert integer.group_count(576, 64) == 9
    assert integer.group_count(577, 0) == 1


@pytest.mark.parametrize("bits", [1, 3, 7, 16])
def test_widths_without_a_format_are_refused(bits):
    with pytest.raises(RecipeError, match=f"no {bits}-bit"):
        integer.code_range(bits, symmetric=True)


@fast
@given(st.floats(0, 1e30), st.sampled_from([np.dtype(np.float16), BFLOAT16]))
def test_rounded_scales_are_representable_finite_and_positive(value, dtype):
    scale = integer.round_scale(np.array([[value]], np.float32), dtype)
    assert np.array_equal(cast(cast(scale, dtype), np.float32), scale)
    assert np.isfinite(scale).all()
    assert (scale > 0).all()


@pytest.mark.parametrize("each", QUANTIZED, ids=lambda s: s.name)
def test_a_matrix_with_shapes_that_disagree_is_refused(each):
    groups = integer.group_count(256, each.group_size)
    codes, scale = np.zeros((4, 256), np.int8), np.ones((4, groups), np.float32)
    zero = None if each.symmetric else np.zeros((4, groups), np.int8)
    assert QuantizedMatrix(each, codes, scale, zero).shape == (4, 256)
    with pytest.raises(CheckpointError):
        QuantizedMatrix(each, codes, np.ones((4, groups + 1), np.float32), zero)
    with pytest.raises(CheckpointError):
        QuantizedMatrix(each, codes.astype(np.float32), scale, zero)
    with pytest.raises(CheckpointError, match="zero points"):
        QuantizedMatrix(each, codes, scale, None if zero is not None else np.zeros((4, groups), np.int8))


def test_rows_taken_apart_and_stacked_again_are_the_same_matrix():
    codes, scale, zero = _case(7, 4, symmetric=False)
    whole = QuantizedMatrix(scheme("W4A16_G32_ASYM"), codes, scale, zero)
    again = concatenate([whole.rows(0, 1), whole.rows(1, 4)])
    assert np.array_equal(again.dequantize(), whole.dequantize())
