"""GPTQ against its own objective and against rounding to nearest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.errors import NumericsError, RecipeError
from quantkit.formats.schemes import SCHEMES
from quantkit.quantize import gptq as module
from quantkit.quantize.gptq import gptq, layer_loss
from quantkit.quantize.rtn import rtn
from quantkit_kernels.arrays import BFLOAT16
from quantkit_kernels.tensors import as_tensor

FLOAT16 = np.dtype(np.float16)


def _case(rows: int = 48, columns: int = 256, tokens: int = 600, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and inputs `[T, K]` that are correlated, some channels large."""
    source = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns // 4, columns, generator=source) / (columns // 4) ** 0.5
    inputs = torch.randn(tokens, columns // 4, generator=source) @ mix
    inputs += 0.3 * torch.randn(tokens, columns, generator=source)
    inputs *= torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=source)]
    return torch.randn(rows, columns, generator=source), inputs


@pytest.mark.parametrize("name", ["W4A16_G32", "W4A16_G128", "W4A16_G64_ASYM", "W8A16"])
@pytest.mark.parametrize("act_order", [False, True])
def test_its_output_error_is_far_below_that_of_rounding(name, act_order):
    weight, inputs = _case()
    hessian = inputs.t() @ inputs
    made, found = gptq(weight, hessian, SCHEMES[name], scale_dtype=FLOAT16, act_order=act_order)
    nearest = rtn(weight, SCHEMES[name], scale_dtype=FLOAT16)

    def error(quantized) -> float:
        return float((inputs @ (as_tensor(quantized.dequantize()) - weight).t()).square().sum())

    assert error(made) < 0.8 * error(nearest)
    assert found.loss == pytest.approx(error(made), rel=1e-3)
    assert found.rtn_loss == pytest.approx(error(nearest), rel=1e-3)
    assert found.damping == 0.01


def test_uncorrelated_inputs_leave_nothing_to_make_up_for():
    weight, _ = _case()
    made, _ = gptq(weight, torch.eye(256), SCHEMES["W4A16_G64"], scale_dtype=FLOAT16)
    assert np.array_equal(made.codes, rtn(weight, SCHEMES["W4A16_G64"], scale_dtype=FLOAT16).codes)


def test_the_block_size_changes_nothing_but_the_order_of_sums():
    weight, inputs = _case()
    hessian = inputs.t() @ inputs
    losses = [
        gptq(weight, hessian, SCHEMES["W4A16_G64"], scale_dtype=FLOAT16, block=block)[1].loss
        for block in (1, 7, 128, 4096)
    ]
    assert max(losses) < 1.02 * min(losses)


def test_scales_and_zero_points_are_those_of_rounding_to_nearest():
    weight, inputs = _case()
    made, _ = gptq(weight, inputs.t() @ inputs, SCHEMES["W4A16_G64_ASYM"], scale_dtype=BFLOAT16)
    nearest = rtn(weight, SCHEMES["W4A16_G64_ASYM"], scale_dtype=BFLOAT16)
    assert np.array_equal(made.scale, nearest.scale)
    assert np.array_equal(made.zero, nearest.zero)
    assert made.codes.min() >= -8
    assert made.codes.max() <= 7


def test_channels_without_any_input_keep_their_nearest_codes():
    weight, inputs = _case()
    inputs[:, 40:50] = 0
    made, found = gptq(weight, inputs.t() @ inputs, SCHEMES["W4A16_G64"], scale_dtype=FLOAT16)
    nearest = rtn(weight, SCHEMES["W4A16_G64"], scale_dtype=FLOAT16)
    assert np.array_equal(made.codes[:, 40:50], nearest.codes[:, 40:50])
    assert found.damping == 0.01


def test_fewer_tokens_than_channels_are_enough():
    weight, inputs = _case(tokens=20)
    made, found = gptq(weight, inputs.t() @ inputs, SCHEMES["W4A16_G64"], scale_dtype=FLOAT16)
    assert found.damping is not None
    assert found.loss < 0.5 * found.rtn_loss
    assert made.shape == weight.shape


def test_damping_rises_until_a_factor_is_found():
    weight, _ = _case()
    hessian = torch.eye(256)
    hessian[0, 1] = hessian[1, 0] = 1.5  # indefinite: needs half the mean diagonal
    made, found = gptq(weight, hessian, SCHEMES["W4A16_G64"], scale_dtype=FLOAT16, damping=0.01)
    assert found.damping == pytest.approx(1.0)
    assert made.shape == weight.shape


def test_a_hessian_without_a_factor_falls_back_to_rounding_and_says_so():
    weight, _ = _case()
    hessian = torch.eye(256)
    hessian[0, 1] = hessian[1, 0] = 1e4
    made, found = gptq(weight, hessian, SCHEMES["W4A16_G64"], scale_dtype=FLOAT16)
    assert found.damping is None
    assert np.array_equal(made.codes, rtn(weight, SCHEMES["W4A16_G64"], scale_dtype=FLOAT16).codes)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_moments_and_weights_are_refused_by_name(value):
    weight, inputs = _case()
    hessian = inputs.t() @ inputs
    bad = hessian.clone()
    bad[3, 4] = value
    with pytest.raises(NumericsError, match=r"layers\.3\.down"):
        gptq(weight, bad, SCHEMES["W4A16_G64"], scale_dtype=FLOAT16, where="layers.3.down")
    weight[2, 9] = value
    with pytest.raises(NumericsError, match=r"layers\.3\.down"):
        gptq(weight, hessian, SCHEMES["W4A16_G64"], scale_dtype=FLOAT16, where="layers.3.down")


def test_a_group_size_that_does_not_divide_is_refused_with_those_that_do():
    weight, inputs = _case(columns=96)
    with pytest.raises(RecipeError, match="Sizes that do: 32"):
        gptq(weight, inputs.t() @ inputs, SCHEMES["W4A16_G64"], scale_dtype=FLOAT16)


def test_one_row_and_widths_that_no_block_divides_work():
    weight, inputs = _case(rows=1, columns=160)
    made, found = gptq(weight, inputs.t() @ inputs, SCHEMES["W4A16_G32"], scale_dtype=FLOAT16, block=48)
    assert made.shape == (1, 160)
    assert found.loss <= found.rtn_loss


def test_the_loss_is_the_trace_it_claims_to_be():
    weight, inputs = _case(rows=5, columns=64)
    hessian = inputs.t() @ inputs
    nearest = rtn(weight, SCHEMES["W4A16_G64"], scale_dtype=FLOAT16)
    delta = as_tensor(nearest.dequantize()) - weight
    expected = float(torch.trace(delta @ hessian @ delta.t()))
    assert layer_loss(weight, nearest, hessian) == pytest.approx(expected, rel=1e-4)
    assert module.ATTEMPTS == 4
