"""Linear with 8-bit codes on both sides, int8 and FP8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit_kernels.ops import linear as op
from quantkit_kernels.ops import quantize
from quantkit_kernels.triton import Fact, kernels
from quantkit_kernels.triton.layout import CodeRows, pad_rows
from quantkit_kernels.triton.linear import linear_codes
from quantkit_kernels.triton.quantize import quantize_per_token
from tests.ops.native import GUARD, between, poisoned

TYPES = [torch.int8, torch.float8_e4m3fn]
SCALES = [torch.float16, torch.bfloat16, torch.float32]
ROWS = [(1, 1), (2, 15), (16, 16), (17, 17), (18, 300), (300, 300)]


def matrix(n: int, k: int, dtype: torch.dtype, scale: torch.dtype = torch.bfloat16) -> CodeRows:
    """Random weights that hold the type's outermost codes."""
    if dtype == torch.int8:
        codes = torch.randint(-128, 128, (n, k)).to(torch.int8)
        codes[0, 0], codes[-1, -1] = -128, 127
    else:
        codes = (torch.randn(n, k) * 60).clamp(-448, 448).to(dtype)
        codes[-1, -1] = -448.0
    return pad_rows(codes, (torch.rand(n) * 0.02 + 0.001).to(scale))


def expected(x: Tensor, x_scale: Tensor, weights: CodeRows, bias: Tensor | None) -> Tensor:
    codes = weights.codes.view(torch.int8)[:, : weights.columns].view(weights.codes.dtype)
    return op.of_token_codes(x, x_scale, codes, weights.scale, bias)


def check(t: int, weights: CodeRows, *, bias: bool = False, rows: str | None = None) -> None:
    """The kernel equals the reference (int8: bit by bit), and writes no row but its own."""
    n, k = weights.codes.shape[0], weights.columns
    x, x_scale = quantize.reference(torch.randn(t, k) * torch.rand(t, 1) * 9, weights.codes.dtype)
    b = torch.randn(n).half() if bias else None
    buffer = poisoned(t + GUARD, n).half()
    linear_codes(x, x_scale, weights, b, buffer[:t], rows=rows)
    wanted = expected(x, x_scale, weights, b)
    if weights.codes.dtype == torch.int8:
        assert torch.equal(buffer[:t], wanted.half())
    else:
        torch.testing.assert_close(buffer[:t].float(), wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))
    assert buffer[t:].isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_codes_times_codes_equal_the_reference(rows: tuple[int, int], dtype: torch.dtype) -> None:
    t = between(*rows)
    check(t, matrix(between(1, 150), between(1, 600), dtype, SCALES[t % 3]), bias=bool(t % 2))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("k", [128, 576, 1280])
@pytest.mark.parametrize("rows", ["few", "many"])
def test_both_kernels_serve_few_rows(rows: str, k: int, dtype: torch.dtype) -> None:
    check(3, matrix(97, k, dtype), bias=True, rows=rows)


def test_a_wide_matrix_takes_the_wider_tile() -> None:
    check(2, matrix(4100, 64, torch.int8))


def test_a_row_has_the_same_bits_alone_and_among_many() -> None:
    weights = matrix(70, 384, torch.int8)
    x, x_scale = quantize.reference(torch.randn(83, 384), torch.int8)
    whole = linear_codes(x, x_scale, weights)
    for t in (1, 4, 16, 40):
        assert torch.equal(linear_codes(x[-t:], x_scale[-t:], weights), whole[-t:])


def test_the_largest_sums_do_not_overflow() -> None:
    k = 4096
    weights = pad_rows(torch.full((2, k), -128, dtype=torch.int8), torch.full((2,), 2.0**-20))
    out = linear_codes(torch.full((1, k), 127, dtype=torch.int8), torch.ones(1), weights)
    assert out.tolist() == [[-127.0 * 128 * k / 2**20] * 2]
    longer: dict[str, Fact] = {**FACTS, "quant": "int8", "sm": 90, "k": 131200}
    assert "int32 cannot hold their sums" in str(kernels()["linear_w8a8_few"].refusal(longer))


@pytest.mark.parametrize("dtype", TYPES)
def test_what_was_quantized_on_the_fly_is_multiplied(dtype: torch.dtype) -> None:
    x, dense = torch.randn(5, 256).half(), torch.randn(64, 256)
    weights = pad_rows(*quantize.reference(dense, dtype))
    found = linear_codes(*quantize_per_token(x, dtype), weights).float()
    exact = x.float() @ dense.T
    assert ((found - exact).norm() / exact.norm()) < (0.02 if dtype == torch.int8 else 0.06)


def test_a_row_that_is_not_finite_stays_so_and_alone() -> None:
    x = torch.randn(3, 128)
    x[1, 5] = float("inf")
    out = linear_codes(*quantize_per_token(x), matrix(40, 128, torch.int8))
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()


def test_rows_are_padded_with_zeros() -> None:
    codes = torch.randint(-128, 128, (3, 130)).to(torch.int8)
    rows = pad_rows(codes, torch.ones(3))
    assert rows.codes.shape == (3, 256)
    assert torch.equal(rows.codes[:, :130], codes)
    assert not rows.codes[:, 130:].any()


FACTS: dict[str, Fact] = {
    "op": "linear", "rows": "few", "dtype": "fp16", "n": 64, "k": 64, "bits": 8, "group_size": 0, "symmetric": True,
    "bias": False, "scale": "bf16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "sm", "served"),
    [
        ({"quant": "int8"}, 80, {"linear_w8a8_few"}),
        ({"quant": "int8", "rows": "many"}, 120, {"linear_w8a8_many"}),
        ({"quant": "fp8"}, 89, {"linear_fp8_few"}),
        ({"quant": "fp8"}, 86, set()),
        ({}, 80, {"linear_w8a16_few"}),
        ({"quant": "int8", "group_size": 32}, 80, set()),
        ({"quant": "int8", "symmetric": False}, 80, set()),
        ({"quant": "int8", "bits": 4, "group_size": 32}, 80, set()),
    ],
)
def test_each_form_is_served_by_its_own_kernel(changed: dict[str, Fact], sm: int, served: set[str]) -> None:
    facts: dict[str, Fact] = {**FACTS, "sm": sm, **changed}
    linears = [spec for spec in kernels().values() if spec.op == "linear"]
    assert {spec.name for spec in linears if spec.refusal(facts) is None} == served


def test_fp8_before_sm_89_is_refused_for_a_reason() -> None:
    said = kernels()["linear_fp8_few"].refusal({**FACTS, "quant": "fp8", "sm": 86})
    assert said == "sm_86 has no FP8 arithmetic: it begins with sm_89"


def test_what_no_kernel_can_serve_is_refused() -> None:
    weights = matrix(4, 96, torch.int8)
    codes, scale = torch.zeros(1, 96, dtype=torch.int8), torch.ones(1)
    with pytest.raises(ValueError, match="x is float8_e4m3fn"):
        linear_codes(codes.view(torch.float8_e4m3fn), scale, weights)
    with pytest.raises(ValueError, match=r"x_scale is float32 \[2\]"):
        linear_codes(codes, torch.ones(2), weights)
    with pytest.raises(ValueError, match="17 rows are more than the 16"):
        linear_codes(codes.expand(17, 96).contiguous(), torch.ones(17), weights, rows="few")
    with pytest.raises(ValueError, match="codes must be int8 or float8_e4m3fn"):
        pad_rows(torch.zeros(4, 96), torch.ones(4))
    with pytest.raises(ValueError, match=r"scales must be floats \[4\]"):
        pad_rows(codes.expand(4, 96), torch.ones(4, 1))


def test_no_rows_launch_nothing() -> None:
    assert linear_codes(torch.empty(0, 96, dtype=torch.int8), torch.empty(0), matrix(8, 96, torch.int8)).shape == (0, 8)


def test_a_scale_of_another_row_is_seen() -> None:
    weights = matrix(32, 128, torch.int8)
    x, x_scale = quantize.reference(torch.randn(2, 128), torch.int8)
    out = linear_codes(x, x_scale.flip(0), weights)
    assert not torch.equal(out, expected(x, x_scale, weights, None).half())
