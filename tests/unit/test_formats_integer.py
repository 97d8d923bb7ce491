"""Affine integer codes: properties that every weight and every scheme must keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import CheckpointError, NumericsError, RecipeError
from quantkit.formats import integer
from quantkit.formats.matrix import QuantizedMatrix, concatenate
from quantkit.formats.schemes import SCHEMES, scheme

QUANTIZED = [s for s in SCHEMES.values() if s.quantized]
seeds = st.integers(0, 2**31 - 1)
fast = settings(max_examples=30, deadline=None)


def _case(seed: int, bits: int, symmetric: bool, groups: int = 3, size: int = 32):
    """Codes in range with scales over twelve decades, and the exact weights they stand for."""
    generator = torch.Generator().manual_seed(seed)
    low, high = integer.code_range(bits, symmetric=symmetric)
    codes = torch.randint(low, high + 1, (4, groups * size), generator=generator, dtype=torch.int8)
    scale = (torch.rand(4, groups, generator=generator) + 0.5) * 10 ** torch.randint(-6, 6, (4, groups)).float()
    zero = None if symmetric else torch.randint(low, high + 1, (4, groups), generator=generator, dtype=torch.int8)
    return codes, scale, zero


@fast
@given(seeds, st.sampled_from([4, 8]), st.booleans())
def test_codes_survive_a_round_trip_through_their_own_values(seed, bits, symmetric):
    codes, scale, zero = _case(seed, bits, symmetric)
    values = integer.dequantize(codes, scale, zero)
    assert torch.equal(integer.quantize(values, scale, zero, bits), codes)


@fast
@given(seeds, st.sampled_from([4, 8]), st.booleans())
def test_values_in_range_come_back_within_half_a_step(seed, bits, symmetric):
    codes, scale, zero = _case(seed, bits, symmetric)
    jitter = torch.rand(codes.shape, generator=torch.Generator().manual_seed(seed)) - 0.5
    step = scale.repeat_interleave(32, dim=1)
    values = integer.dequantize(codes, scale, zero) + jitter * step
    error = (integer.dequantize(integer.quantize(values, scale, zero, bits), scale, zero) - values).abs()
    assert bool((error <= step * 0.5001).all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_values_out_of_range_saturate_at_the_last_code(bits, symmetric):
    low, high = integer.code_range(bits, symmetric=symmetric)
    zero = None if symmetric else torch.zeros(1, 1, dtype=torch.int8)
    codes = integer.quantize(torch.tensor([[1e6, -1e6]]), torch.ones(1, 1), zero, bits)
    assert codes.tolist() == [[high, low]]


def test_symmetric_int8_never_uses_its_one_sided_code():
    assert integer.code_range(8, symmetric=True) == (-127, 127)
    assert integer.code_range(4, symmetric=True) == (-8, 7)


def test_negative_zero_is_the_code_of_zero():
    codes = integer.quantize(torch.tensor([[-0.0, 0.0]]), torch.ones(1, 1), None, 8)
    assert codes.tolist() == [[0, 0]]
    assert torch.equal(integer.dequantize(codes, torch.ones(1, 1), None).signbit(), torch.tensor([[False, False]]))


def test_an_all_zero_group_gets_a_positive_scale_and_zero_codes():
    for dtype in (torch.float16, torch.bfloat16):
        scale = integer.round_scale(torch.zeros(2, 1), dtype)
        assert bool((scale > 0).all())
        assert not integer.quantize(torch.zeros(2, 32), scale, None, 4).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_refused_with_their_place(bad):
    weight = torch.zeros(3, 64)
    weight[2, 17] = bad
    with pytest.raises(NumericsError, match=r"\[2, 17\]"):
        integer.quantize(weight, torch.ones(3, 1), None, 8)


def test_the_greatest_finite_value_is_not_mistaken_for_inf():
    integer.require_finite(torch.full((4, 4), torch.finfo(torch.float32).max))


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
@given(st.floats(0, 1e30), st.sampled_from([torch.float16, torch.bfloat16]))
def test_rounded_scales_are_representable_finite_and_positive(value, dtype):
    scale = integer.round_scale(torch.tensor([[value]]), dtype)
    assert torch.equal(scale.to(dtype).float(), scale)
    assert bool(torch.isfinite(scale).all() and (scale > 0).all())


@pytest.mark.parametrize("each", QUANTIZED, ids=lambda s: s.name)
def test_a_matrix_with_shapes_that_disagree_is_refused(each):
    groups = integer.group_count(256, each.group_size)
    codes, scale = torch.zeros(4, 256, dtype=torch.int8), torch.ones(4, groups)
    zero = None if each.symmetric else torch.zeros(4, groups, dtype=torch.int8)
    assert QuantizedMatrix(each, codes, scale, zero).shape == (4, 256)
    with pytest.raises(CheckpointError):
        QuantizedMatrix(each, codes, torch.ones(4, groups + 1), zero)
    with pytest.raises(CheckpointError):
        QuantizedMatrix(each, codes.float(), scale, zero)
    with pytest.raises(CheckpointError, match="zero points"):
        QuantizedMatrix(each, codes, scale, None if zero is not None else torch.zeros(4, groups, dtype=torch.int8))


def test_rows_taken_apart_and_stacked_again_are_the_same_matrix():
    codes, scale, zero = _case(7, 4, symmetric=False)
    whole = QuantizedMatrix(scheme("W4A16_G32_ASYM"), codes, scale, zero)
    again = concatenate([whole.rows(0, 1), whole.rows(1, 4)])
    assert torch.equal(again.dequantize(), whole.dequantize())
