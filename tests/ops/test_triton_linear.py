from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.compile.buckets import CLASSES
from quantkit.compile.emit import emit
from quantkit.errors import PreflightError
from quantkit.program.ir import Program
from quantkit_kernels.ops import linear as op
from quantkit_kernels.triton.layout import GpuMatrix, pack_matrix, unpack_words
from quantkit_kernels.triton.linear import linear
from tests.ops.native import GUARD, between, poisoned

INT4 = [(group, symmetric) for group in (32, 64, 128) for symmetric in (True, False)]


def quantized(
    n: int, k: int, bits: int, group: int, *, symmetric: bool = True, scale: torch.dtype = torch.bfloat16
) -> tuple[GpuMatrix, Tensor]:
    """A random matrix as the kernels read it, and dequantized in float64."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    groups = k // group if group else 1
    codes = torch.randint(low, high + 1, (n, k)).to(torch.int8)
    codes[0, :2], codes[-1, -2:] = torch.tensor([low, high]), torch.tensor([high, low])
    scales = (torch.rand(n, groups) * 0.02 + 0.001).to(scale)
    zero = None if symmetric else torch.randint(low, high + 1, (n, groups)).to(torch.int8)
    real = codes.double() - (0 if zero is None else zero.double().repeat_interleave(k // groups, 1))
    return (
        pack_matrix(codes, scales, zero, bits=bits, group_size=group),
        real * scales.double().repeat_interleave(k // groups, 1),
    )


def check(t: int, matrix: GpuMatrix, dense: Tensor, *, bias: bool = False, rows: str | None = None) -> None:
    """The kernel equals the reference in every element, and writes no row but its own."""
    n, k = dense.shape
    x = torch.randn(t, k).half()
    b = torch.randn(n).half() if bias else None
    buffer = poisoned(t + GUARD, n).half()
    linear(x, matrix, b, buffer[:t], rows=rows)
    expected = op.reference(x, dense.float(), b)
    torch.testing.assert_close(buffer[:t].float(), expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    assert buffer[t:].isnan().all()


@pytest.mark.parametrize(("group", "symmetric"), INT4)
@pytest.mark.parametrize(("t", "n", "k"), [(1, 40, 128), (16, 33, 384), (5, 64, 576), (3, 1, 1152)])
def test_int4_few_rows_equal_the_reference(t: int, n: int, k: int, group: int, symmetric: bool) -> None:
    if k % group:
        k += group - k % group
    check(t, *quantized(n, k, 4, group, symmetric=symmetric), bias=bool(n % 2))


@pytest.mark.parametrize(("group", "symmetric"), INT4)
@pytest.mark.parametrize(("t", "n", "k"), [(17, 65, 256), (64, 40, 576), (129, 70, 128)])
def test_int4_many_rows_equal_the_reference(t: int, n: int, k: int, group: int, symmetric: bool) -> None:
    if k % group:
        k += group - k % group
    check(t, *quantized(n, k, 4, group, symmetric=symmetric), bias=bool(n % 2))


@pytest.mark.parametrize(("group", "symmetric"), INT4)
def test_int4_equals_the_reference_at_any_size(group: int, symmetric: bool) -> None:
    n, k = between(1, 150), group * between(1, 640 // group)
    check(between(1, 300), *quantized(n, k, 4, group, symmetric=symmetric), bias=bool(n % 2))


@pytest.mark.parametrize("zero", [-8, 7])
def test_the_outermost_zero_points_are_taken_off_exactly(zero: int) -> None:
    codes = torch.arange(128).remainder(16).sub(8).to(torch.int8)[None]
    table = torch.full((1, 1), zero, dtype=torch.int8)
    out = linear(torch.eye(128).half(), pack_matrix(codes, torch.ones(1, 1).half(), table, bits=4, group_size=128))
    assert torch.equal(out[:, 0], codes[0].half() - zero)


@pytest.mark.parametrize(("t", "n", "k"), [(1, 40, 128), (16, 33, 100), (5, 64, 576), (70, 65, 576), (20, 1, 33)])
def test_int8_equals_the_reference(t: int, n: int, k: int) -> None:
    check(t, *quantized(n, k, 8, 0), bias=bool(n % 2))


@pytest.mark.parametrize("bits", [4, 8])
def test_both_kernels_give_one_row_the_same_answer_and_take_float16_scales(bits: int) -> None:
    matrix, dense = quantized(96, 256, bits, 64 if bits == 4 else 0, scale=torch.float16)
    for rows in ("few", "many"):
        check(1, matrix, dense, rows=rows)


def test_a_wide_matrix_takes_the_wider_tile() -> None:
    check(2, *quantized(4100, 64, 4, 64))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k", [64, 128, 576])
def test_packing_loses_nothing_and_pads_with_zero_weights(bits: int, k: int) -> None:
    high = (1 << (bits - 1)) - 1
    codes = torch.randint(-high - 1, high + 1, (7, k)).to(torch.int8)
    groups = k // 64 if bits == 4 else 1
    scale, group = torch.rand(7, groups).half(), 64 if bits == 4 else 0
    packed = pack_matrix(codes, scale, bits=bits, group_size=group)
    padded = -(-k // 128) * 128
    whole = unpack_words(packed.words, bits, padded)
    assert torch.equal(whole[:, :k], codes)
    assert not whole[:, k:].any()
    assert torch.equal(packed.scale[:groups].T, scale)
    assert not packed.scale[groups:].any()


def test_one_mask_takes_neighbouring_columns_out_of_a_word() -> None:
    codes = torch.arange(128).remainder(16).sub(8).to(torch.int8)[None]
    word = int(pack_matrix(codes, torch.ones(1, 1).half(), bits=4, group_size=128).words[0, 3]) & 0xFFFFFFFF
    for plane in range(4):
        low, high = (word >> 4 * plane) & 0xF, (word >> (4 * plane + 16)) & 0xF
        assert (low, high) == ((32 * plane + 6) % 16, (32 * plane + 7) % 16)


def test_what_no_kernel_can_serve_is_refused() -> None:
    codes, scale = torch.zeros(4, 96, dtype=torch.int8), torch.ones(4, 1).half()
    with pytest.raises(ValueError, match="group size of 64 must divide 96 columns"):
        pack_matrix(codes, scale, bits=4, group_size=64)
    with pytest.raises(ValueError, match="group size of 16 must divide 96 columns and be 32, 64 or 128"):
        pack_matrix(codes, torch.ones(4, 6).half(), bits=4, group_size=16)
    with pytest.raises(ValueError, match="3-bit codes have no GPU layout"):
        pack_matrix(codes, scale, bits=3)
    with pytest.raises(ValueError, match=r"scales must be 16-bit floats \[4, 3\], not torch.float32"):
        pack_matrix(codes, torch.ones(4, 3), bits=4, group_size=32)
    with pytest.raises(ValueError, match="8-bit weights must be symmetric, with one scale a row"):
        linear(torch.zeros(1, 96).half(), pack_matrix(codes, torch.ones(4, 3).half(), bits=8, group_size=32))
    matrix = pack_matrix(codes, scale, bits=8)
    with pytest.raises(ValueError, match="x is float32"):
        linear(torch.zeros(1, 96), matrix)
    with pytest.raises(ValueError, match="17 rows are more than the 16"):
        linear(torch.zeros(17, 96).half(), matrix, rows="few")


def test_no_rows_launch_nothing() -> None:
    matrix, _ = quantized(8, 128, 4, 128)
    assert linear(torch.empty(0, 128).half(), matrix).shape == (0, 8)


def test_a_zero_point_one_off_is_seen() -> None:
    matrix, dense = quantized(32, 128, 4, 128, symmetric=False)
    assert matrix.zero is not None
    matrix.zero[0, 3] += 1 if matrix.zero[0, 3] < 7 else -1
    with pytest.raises(AssertionError):
        check(2, matrix, dense)


def test_nothing_is_compiled_by_a_process_that_interprets(tmp_path: Path) -> None:
    empty = Program("llama", 8, 8, 8, (), (), {}, {}, (), (), {})
    with pytest.raises(PreflightError, match="Unset TRITON_INTERPRET"):
        emit(empty, ["sm_80"], [CLASSES["decode"]], tmp_path / "k", cache=tmp_path, workers=1, step=lambda *_: None)
