from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit_kernels.ops import add_rms_norm as add_op
from quantkit_kernels.ops import rms_norm as norm_op
from quantkit_kernels.triton.add_rms_norm import add_rms_norm, rms_norm
from tests.ops.native import GUARD, poisoned

SIZES = [(1, 576), (3, 80), (7, 1027), (2, 64)]
HALF = {"rtol": 1e-3, "atol": 1e-3}


def guarded(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A poisoned output of `tokens` rows, and the whole buffer, which holds rows that nobody may touch behind it."""
    buffer = poisoned(tokens + GUARD, width).to(dtype)
    return buffer[:tokens], buffer


@pytest.mark.parametrize(("tokens", "width"), SIZES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rms_norm_equals_its_reference(tokens: int, width: int, offset: float, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(tokens, width) * 30).to(dtype), torch.randn(width)
    y, buffer = guarded(tokens, width, dtype)
    rms_norm(x, weight, 1e-5, offset, y)
    torch.testing.assert_close(y.float(), norm_op.reference(x, weight, 1e-5, offset), **HALF)
    assert buffer[tokens:].isnan().all()


@pytest.mark.parametrize(("tokens", "width"), SIZES)
@pytest.mark.parametrize("residual_dtype", [torch.float16, torch.float32])
def test_add_rms_norm_equals_its_reference(tokens: int, width: int, residual_dtype: torch.dtype) -> None:
    x, weight = torch.randn(tokens, width).half(), torch.randn(width)
    residual = (torch.randn(tokens, width) * 50).to(residual_dtype)
    y, y_buffer = guarded(tokens, width, torch.float16)
    total, total_buffer = guarded(tokens, width, residual_dtype)
    add_rms_norm(x, residual, weight, 1e-6, 1.0, y, total)
    expected, expected_total = add_op.reference(x.float(), residual.float(), weight, 1e-6, 1.0)
    assert torch.equal(total, expected_total.to(residual_dtype))
    torch.testing.assert_close(y.float(), expected, rtol=2e-3, atol=2e-3)
    assert y_buffer[tokens:].isnan().all()
    assert total_buffer[tokens:].isnan().all()


def test_the_norm_after_an_add_has_the_bits_of_the_norm_alone() -> None:
    x, residual, weight = torch.randn(5, 576).half(), torch.randn(5, 576).half() * 9, torch.randn(576)
    y, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(y, rms_norm(total, weight, 1e-5))


def test_outputs_may_be_the_inputs() -> None:
    x, residual, weight = torch.randn(4, 96).half(), torch.randn(4, 96), torch.randn(96)
    y, total = add_rms_norm(x, residual, weight, 1e-5)
    add_rms_norm(x, residual, weight, 1e-5, 0.0, x, residual)
    assert torch.equal(x, y)
    assert torch.equal(residual, total)


def test_no_rows_launch_nothing() -> None:
    assert rms_norm(torch.empty(0, 64), torch.ones(64), 1e-5).shape == (0, 64)


def test_a_nan_stays_in_its_row_and_is_not_hidden() -> None:
    x = torch.randn(3, 80).half()
    x[1, 7] = float("nan")
    y = rms_norm(x, torch.ones(80), 1e-5)
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(2, 64), torch.zeros(32), r"weight is float32 \[32\]"),
        (torch.zeros(64, 2).t(), torch.zeros(64), "not contiguous"),
        (torch.zeros(2, 64, dtype=torch.int8), torch.zeros(64), "x is int8"),
        (torch.zeros(1, 16400), torch.zeros(16400), "wider"),
    ],
)
def test_a_tensor_the_kernel_would_misread_is_refused(x: Tensor, weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, 1e-5)
