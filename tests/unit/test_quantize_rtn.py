"""Round to nearest: the search never loses to min-max, and equals a brute-force search."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.errors import NumericsError, RecipeError
from quantkit.formats import SCHEMES, integer, scheme
from quantkit.formats.minmax import minmax_scale, quantize_minmax
from quantkit.quantize.kv import kv_scales
from quantkit.quantize.rtn import rtn
from quantkit.quantize.sensitivity import weight_sensitivity
from quantkit_kernels.arrays import BFLOAT16, cast
from quantkit_kernels.tensors import as_array, as_tensor

QUANTIZED = [s for s in SCHEMES.values() if s.quantized]
FLOAT16 = np.dtype(np.float16)
DTYPES = [FLOAT16, BFLOAT16]


def _weight(rows: int = 24, columns: int = 256, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed rows of unlike sizes, as weights are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return (x + 0.1 * x**3) * torch.logspace(-3, 0, rows).unsqueeze(1)


def _values(quantized) -> torch.Tensor:
    return as_tensor(quantized.dequantize())


def _loss(weight, quantized, each):
    groups = integer.group_count(weight.shape[1], each.group_size)
    return (_values(quantized) - weight).unflatten(-1, (groups, -1)).double().abs().pow(2.4).sum(-1)


def _rounded(scale: torch.Tensor, dtype) -> torch.Tensor:
    return as_tensor(integer.round_scale(as_array(scale.reshape(1)), dtype))[0]


def _brute_force(group: torch.Tensor, each, dtype) -> float:
    """Least Σ|e|^2.4 over the 21 shrink factors of one group, in float64, straight from the definition."""
    low, high = integer.code_range(each.bits, symmetric=each.symmetric)
    span = group.abs().max() / ((high - low) / 2)
    if not each.symmetric:
        span = (group.max().clamp_min(0) - group.min().clamp_max(0)) / (high - low)
    base = _rounded(span, dtype)
    losses = []
    for percent in range(80, 101):
        scale = _rounded(base * (percent / 100), dtype)
        zero = torch.tensor(0.0)
        if not each.symmetric:
            zero = (low - group.min().clamp_max(0) * (percent / 100) / scale).round().clamp(low, high)
        codes = ((group / scale).round() + zero).clamp(low, high)
        losses.append(float((((codes - zero) * scale - group).double().abs() ** 2.4).sum()))
    return min(losses)


@pytest.mark.parametrize("each", QUANTIZED, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_search_finds_the_least_error_of_all_shrink_factors(each, dtype):
    weight = _weight(rows=6)
    loss = _loss(weight, rtn(weight, each, scale_dtype=dtype), each)
    groups = weight.unflatten(-1, (loss.shape[1], -1))
    for n in range(weight.shape[0]):
        for g in range(loss.shape[1]):
            assert float(loss[n, g]) == pytest.approx(_brute_force(groups[n, g], each, dtype), rel=1e-4)


@pytest.mark.parametrize("each", QUANTIZED, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_search_is_never_worse_than_minmax(each, dtype):
    weight = _weight()
    searched = _loss(weight, rtn(weight, each, scale_dtype=dtype), each)
    plain = _loss(weight, rtn(weight, each, search="minmax", scale_dtype=dtype), each)
    assert bool((searched <= plain * (1 + 1e-5)).all())


@pytest.mark.parametrize("each", QUANTIZED, ids=lambda s: s.name)
@pytest.mark.parametrize("search", ["mse", "minmax"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_are_stored_in_sixteen_bits_without_loss(each, search, dtype):
    made = rtn(_weight(), each, search=search, scale_dtype=dtype)
    assert np.array_equal(cast(cast(made.scale, dtype), np.float32), made.scale)
    low, high = integer.code_range(each.bits, symmetric=each.symmetric)
    assert int(made.codes.min()) >= low
    assert int(made.codes.max()) <= high


@pytest.mark.parametrize("each", QUANTIZED, ids=lambda s: s.name)
def test_minmax_errs_by_at_most_half_a_step(each):
    weight = _weight()
    made = quantize_minmax(as_array(weight), each, scale_dtype=FLOAT16)
    step = as_tensor(made.scale).repeat_interleave(weight.shape[1] // made.scale.shape[1], dim=1)
    # A scale rounded to 16 bits moves the range's end by up to 127 · 2^-11 steps; a zero point adds its own rounding.
    bound = 0.57 if each.symmetric else 1.07
    assert bool(((_values(made) - weight).abs() <= bound * step).all())


@pytest.mark.parametrize("each", QUANTIZED, ids=lambda s: s.name)
def test_codes_do_not_depend_on_how_rows_are_chunked(each, monkeypatch):
    weight = _weight(rows=40)
    whole = rtn(weight, each, scale_dtype=FLOAT16)
    monkeypatch.setattr("quantkit.quantize.rtn.CHUNK", 3 * weight.shape[1])
    chunked = rtn(weight, each, scale_dtype=FLOAT16)
    assert np.array_equal(whole.codes, chunked.codes)
    assert np.array_equal(whole.scale, chunked.scale)


@pytest.mark.parametrize("each", QUANTIZED, ids=lambda s: s.name)
@pytest.mark.parametrize("search", ["mse", "minmax"])
def test_zero_groups_and_dead_rows_stay_exactly_zero(each, search):
    weight = _weight(rows=4)
    weight[1] = 0
    weight[2, :128] = 0
    made = rtn(weight, each, search=search, scale_dtype=FLOAT16).dequantize()
    assert not made[1].any()
    assert not made[2, :128].any()


def test_weights_far_below_half_precision_keep_their_shape():
    weight = _weight(rows=4) * 1e-4
    for each in (scheme("W8A16"), scheme("W4A16_G32")):
        made = _values(rtn(weight, each, scale_dtype=FLOAT16))
        assert float((made - weight).norm() / weight.norm()) < 0.15
        assert bool(((made - weight).abs() <= weight.abs().amax() / 6).all())


def test_an_outlier_channel_leaves_the_other_groups_alone():
    weight = _weight()
    spoiled = weight.clone()
    spoiled[:, 3] *= 1000
    clean, dirty = (rtn(w, scheme("W4A16_G64"), scale_dtype=BFLOAT16) for w in (weight, spoiled))
    assert np.array_equal(clean.codes[:, 64:], dirty.codes[:, 64:])


def test_half_precision_weights_give_the_codes_of_their_float_values():
    weight = _weight().half()
    a = rtn(weight, scheme("W8A16"), scale_dtype=FLOAT16)
    b = rtn(weight.float(), scheme("W8A16"), scale_dtype=FLOAT16)
    assert np.array_equal(a.codes, b.codes)


@pytest.mark.parametrize("search", ["mse", "minmax"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_are_refused_with_the_layer(search, bad):
    weight = _weight()
    weight[5, 5] = bad
    with pytest.raises(NumericsError, match=r"layers\.7.qkv: NaN or Inf"):
        rtn(weight, scheme("W8A16"), search=search, scale_dtype=FLOAT16, where="layers.7.qkv")


@pytest.mark.parametrize("search", ["mse", "minmax"])
def test_a_group_size_that_does_not_divide_names_the_layer_and_what_does(search):
    with pytest.raises(RecipeError, match=r"layers\.0.down: group size 128 does not divide 192 .* 32, 64"):
        rtn(torch.ones(4, 192), scheme("W4A16_G128"), search=search, scale_dtype=FLOAT16, where="layers.0.down")


def test_minmax_scales_span_the_extremes():
    weight = np.array([[-3.0, 1.0] + [0.0] * 30], np.float32)
    assert minmax_scale(weight, scheme("W8A16")).item() == pytest.approx(3 / 127)
    assert minmax_scale(weight, scheme("W4A16_G32")).item() == pytest.approx(3 / 7.5)
    assert minmax_scale(weight, scheme("W4A16_G32_ASYM")).item() == pytest.approx(4 / 15)


def test_asymmetric_codes_serve_one_sided_groups_better():
    weight = _weight().abs()
    symmetric, shifted = (rtn(weight, scheme(s), scale_dtype=FLOAT16) for s in ("W4A16_G64", "W4A16_G64_ASYM"))
    assert (_values(shifted) - weight).square().mean() < 0.5 * (_values(symmetric) - weight).square().mean()


def test_sensitivity_is_the_expected_squared_error_of_the_output():
    generator = torch.Generator().manual_seed(3)
    weight = _weight()
    made = rtn(weight, scheme("W4A16_G64"), scale_dtype=FLOAT16)
    x = torch.randn(20_000, 256, generator=generator) * torch.logspace(-1, 1, 256)
    output_error = (x @ (_values(made) - weight).T).square().sum(1).mean()
    assert weight_sensitivity(weight, made, x.square().mean(0)) == pytest.approx(float(output_error), rel=0.05)


def test_sensitivity_falls_with_bits():
    weight, input_sq = _weight(), torch.ones(256)
    price = [weight_sensitivity(weight, rtn(weight, scheme(s), scale_dtype=FLOAT16), input_sq)
             for s in ("W4A16_G128", "W4A16_G64", "W4A16_G32", "W8A16")]  # fmt: skip
    assert price == sorted(price, reverse=True)


def test_kv_scales_map_the_maximum_to_the_last_code():
    assert kv_scales(torch.full((2, 4), 12.7), "INT8").tolist() == [[pytest.approx(0.1)] * 4] * 2


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_unobserved_kv_channels_are_refused_by_name(bad):
    absmax = torch.ones(2, 4)
    absmax[1, 3] = bad
    with pytest.raises(NumericsError, match=r"layers\.3.k: .* head 1, channel 3"):
        kv_scales(absmax, "INT8", where="layers.3.k")
