"""K in parts: the same answer as in one, in an order that neither chance nor the batch changes."""

from __future__ import annotations

import pytest
import torch

from quantkit.compile.buckets import CLASSES
from quantkit.compile.emit import choose
from quantkit.compile.places import Place
from quantkit_kernels.ops import linear as op
from quantkit_kernels.ops import quantize
from quantkit_kernels.triton import Fact, kernels
from quantkit_kernels.triton.layout import pack_matrix, pad_rows
from quantkit_kernels.triton.linear import linear, linear_codes
from quantkit_kernels.triton.split_k import split_k_reduce_kernel, splits
from tests.ops.native import GUARD, between, poisoned

FACTS: dict[str, Fact] = {
    "op": "linear", "phase": "decode", "rows": "few", "dtype": "fp16", "sm": 120, "bits": 4, "group_size": 128,
    "symmetric": True, "bias": False, "scale": "bf16",
}  # fmt: skip


def parts(n: int, k: int, sm: int = 120, rows: str = "few") -> int:
    return splits({**FACTS, "n": n, "k": k, "sm": sm, "rows": rows})


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("k", [1152, 4224])
def test_int4_in_parts_equals_the_reference(k: int, symmetric: bool, group: int) -> None:
    n, t = between(1, 40), between(1, 16)
    assert parts(n, k) > 1
    codes = torch.randint(-8, 8, (n, k)).to(torch.int8)
    scale = (torch.rand(n, k // group) * 0.02 + 0.001).bfloat16()
    zero = None if symmetric else torch.randint(-8, 8, scale.shape).to(torch.int8)
    x, bias = torch.randn(t, k).half(), torch.randn(n).half() if t % 2 else None
    buffer = poisoned(t + GUARD, n).half()
    linear(x, pack_matrix(codes, scale, zero, bits=4, group_size=group), bias, buffer[:t])
    shifted = codes.float() - (0 if zero is None else zero.float().repeat_interleave(group, 1))
    wanted = op.reference(x, shifted * scale.float().repeat_interleave(group, 1), bias)
    torch.testing.assert_close(buffer[:t].float(), wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))
    assert buffer[t:].isnan().all()


def test_int8_in_parts_equals_the_reference() -> None:
    n, k = 77, 1100
    codes, scale = torch.randint(-128, 128, (n, k)).to(torch.int8), (torch.rand(n, 1) * 0.02).half()
    x, bias = torch.randn(5, k).half(), torch.randn(n).half()
    assert parts(n, k) == 2
    wanted = op.reference(x, codes.float() * scale.float(), bias)
    found = linear(x, pack_matrix(codes, scale, bits=8), bias).float()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("k", [1030, 4224])
def test_codes_in_parts_equal_the_reference(k: int, dtype: torch.dtype) -> None:
    n, t = between(1, 40), between(1, 16)
    codes, scale = quantize.reference(torch.randn(n, k), dtype)
    x, x_scale = quantize.reference(torch.randn(t, k), dtype)
    bias = torch.randn(n).half()
    assert parts(n, k) > 1
    found = linear_codes(x, x_scale, pad_rows(codes, scale), bias)
    wanted = op.of_token_codes(x, x_scale, codes, scale, bias)
    if dtype == torch.int8:
        assert torch.equal(found, wanted.half())
    else:
        torch.testing.assert_close(found.float(), wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    codes, scale = torch.randint(-8, 8, (48, 2048)).to(torch.int8), torch.rand(48, 16).bfloat16()
    matrix, x = pack_matrix(codes, scale, bits=4, group_size=128), torch.randn(16, 2048).half()
    whole = linear(x, matrix)
    for t in (1, 2, 7):
        assert torch.equal(linear(x[-t:], matrix), whole[-t:])


def test_parts_are_added_in_their_order() -> None:
    partial = torch.zeros(3, 16, 512)
    partial[:, 0, 0] = torch.tensor([1e8, -1e8, 1.0])
    partial[:, 0, 1] = torch.tensor([1.0, 1e8, -1e8])
    out = torch.full((1, 512), float("nan")).half()
    split_k_reduce_kernel[(1, 1)](partial, None, None, None, out, 512, SPLITS=3, BLOCK=512)
    assert out[0, :2].tolist() == [1.0, 0.0]


def test_k_is_cut_where_rows_alone_leave_a_gpu_idle_and_for_few_rows_only() -> None:
    assert parts(4096, 4096, 90) == 4
    assert parts(2048, 8192, 90) == 4
    assert parts(4096, 4096, 89) == 2
    assert parts(28672, 4096, 90) == 1, "448 tiles keep any GPU busy"
    assert parts(32, 16384, 90) == 16
    assert parts(2048, 896, 90) == 1, "a part has at least four blocks"
    assert parts(64, 8192, 90, rows="many") == 1
    assert splits({**FACTS, "n": 64, "k": 8192, "group_size": 32}) == 1, "its loop has no registers left"


@pytest.mark.parametrize(("k", "behind"), [(4096, ["split_k_reduce"]), (256, [])])
def test_the_second_launch_is_there_only_where_k_is_cut(k: int, behind: list[str]) -> None:
    place = Place("node", CLASSES["decode"], {**FACTS, "n": 64, "k": k})
    chosen = choose(place, tuple(kernels().values()))
    assert not isinstance(chosen, str)
    assert [spec.name for spec in chosen] == ["linear_w4a16_few", *behind]


def test_a_linear_that_nobody_serves_has_a_reason_and_no_second_launch() -> None:
    place = Place("node", CLASSES["decode"], {**FACTS, "n": 64, "k": 4096, "bits": 16})
    assert choose(place, tuple(kernels().values())) == "no kernel for 16-bit weights and fp16 activations"
