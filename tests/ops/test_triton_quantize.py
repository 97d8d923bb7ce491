"""Per-token quantization, alone and on the way out of norms and gated activations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.compile.buckets import CLASSES
from quantkit.compile.emit import choose
from quantkit.compile.places import Place
from quantkit_kernels.ops import quantize as op
from quantkit_kernels.triton import Fact, kernels
from quantkit_kernels.triton.add_rms_norm import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant
from quantkit_kernels.triton.gated_act import gated_act, gated_act_quant
from quantkit_kernels.triton.quantize import quantize_per_token
from tests.ops.native import GUARD, between, poisoned

# The interpreter's numpy tells of the overflow that makes silu(-200) zero.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

TYPES = [torch.int8, torch.float8_e4m3fn]
POISON = 0x55
ROWS = [(1, 1), (2, 300)]
"""Ranges of the number of rows."""


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Codes and scales are equal bit by bit, NaN included; a code of zero has no sign."""
    codes, wanted = (each[0].float() for each in (found, expected))
    assert found[0].dtype == expected[0].dtype
    assert torch.equal(codes, wanted), f"{int((codes != wanted).sum())} codes differ"
    assert torch.equal(found[1].view(torch.int32), expected[1].view(torch.int32))


def guarded(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Poisoned codes and scales, with rows that nobody may touch behind those asked for."""
    codes = torch.full((tokens + GUARD, width), POISON, dtype=torch.uint8).view(dtype)
    return codes, poisoned(tokens + GUARD)


def untouched(codes: Tensor, scale: Tensor, tokens: int) -> bool:
    return bool((codes[tokens:].view(torch.uint8) == POISON).all() and scale[tokens:].isnan().all())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_get_the_references_codes_and_scales(
    rows: tuple[int, int], source: torch.dtype, dtype: torch.dtype
) -> None:
    tokens, width = between(*rows), between(1, 1100)
    x = (torch.randn(tokens, width) * torch.logspace(-4, 3, tokens)[:, None]).to(source)
    codes, scale = guarded(tokens, width, dtype)
    quantize_per_token(x, dtype, codes[:tokens], scale[:tokens])
    same((codes[:tokens], scale[:tokens]), op.reference(x, dtype))
    assert untouched(codes, scale, tokens)


@pytest.mark.parametrize("dtype", TYPES)
def test_codes_times_scale_stand_for_the_row(dtype: torch.dtype) -> None:
    x = torch.randn(9, 301).half()
    codes, scale = quantize_per_token(x, dtype)
    step = scale[:, None] * 0.5 if dtype == torch.int8 else x.float().abs() / 16 + scale[:, None] * 2**-10
    assert ((codes.float() * scale[:, None] - x.float()).abs() <= step * 1.0001).all()
    assert torch.equal(codes.float().abs().amax(1), torch.full((9,), op.TOPS[dtype]))


@pytest.mark.parametrize("dtype", TYPES)
def test_ties_round_to_even(dtype: torch.dtype) -> None:
    top = op.TOPS[dtype]
    values = torch.tensor([top, 0.5, 1.5, 2.5, -3.5] if dtype == torch.int8 else [top, 17.0, 19.0, 2**-10, 3 * 2**-10])
    wanted = [top, 0.0, 2.0, 2.0, -4.0] if dtype == torch.int8 else [top, 16.0, 20.0, 0.0, 2**-8]
    codes, scale = quantize_per_token(values[None], dtype)
    assert codes.float().tolist() == [wanted]
    assert scale.tolist() == [1.0]


def test_every_rounded_number_of_fp8_is_the_nearest() -> None:
    x = torch.cat([torch.linspace(-448, 448, 7001), torch.logspace(-5, 2.65, 5000), torch.tensor([448.0])])
    codes, _ = quantize_per_token(x[None], torch.float8_e4m3fn)
    assert torch.equal(codes.float()[0], x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_of_zeros_has_a_scale_of_zero_and_one_that_is_not_finite_a_scale_of_nan(dtype: torch.dtype) -> None:
    x = torch.randn(5, 40)
    x[1], x[2, 7], x[3, 39], x[4] = 0.0, float("nan"), float("-inf"), 1e-31
    codes, scale = quantize_per_token(x, dtype)
    same((codes, scale), op.reference(x, dtype))
    assert scale.isnan().tolist() == [False, False, True, True, False]
    assert scale[[1, 4]].tolist() == [0.0, 0.0]
    assert not codes[1:].float().any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("rows", ROWS)
def test_a_norm_that_quantizes_equals_the_norm_and_the_quantization_apart(
    rows: tuple[int, int], kept: bool, dtype: torch.dtype
) -> None:
    tokens, width = between(*rows), between(2, 700)
    x, residual = torch.randn(tokens, width).half(), torch.randn(tokens, width) * 9
    weight = torch.randn(width)
    codes, scale = guarded(tokens, width, dtype)
    y = poisoned(tokens, width).half() if kept else None
    _, _, total = add_rms_norm_quant(
        x, residual, weight, 1e-5, 1.0, y=y, codes=codes[:tokens], scale=scale[:tokens], dtype=dtype
    )
    plain, expected_total = add_rms_norm(x, residual, weight, 1e-5, 1.0)
    same((codes[:tokens], scale[:tokens]), op.reference(plain, dtype))
    assert torch.equal(total, expected_total)
    assert y is None or torch.equal(y, plain)
    assert untouched(codes, scale, tokens)
    same(rms_norm_quant(x, weight, 1e-5, dtype=dtype, y=y), op.reference(rms_norm(x, weight, 1e-5), dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", ROWS)
def test_an_activation_that_quantizes_equals_both_apart(
    rows: tuple[int, int], activation: str, dtype: torch.dtype
) -> None:
    tokens, width = between(*rows), between(1, 1100)
    gate_up = (torch.randn(tokens, 2 * width) * 5).half()
    gate_up[0, 0] = -200.0
    codes, scale = guarded(tokens, width, dtype)
    out = poisoned(tokens, width).half() if tokens % 2 else None
    gated_act_quant(gate_up, activation, dtype=dtype, out=out, codes=codes[:tokens], scale=scale[:tokens])
    plain = gated_act(gate_up, activation)
    same((codes[:tokens], scale[:tokens]), op.reference(plain, dtype))
    assert out is None or torch.equal(out, plain)
    assert untouched(codes, scale, tokens)


def test_a_rows_codes_do_not_depend_on_its_batch() -> None:
    x = torch.randn(31, 96).half()
    codes, scale = quantize_per_token(x)
    alone = quantize_per_token(x[17:18])
    assert torch.equal(alone[0], codes[17:18])
    assert torch.equal(alone[1], scale[17:18])


@pytest.mark.parametrize("launch", [quantize_per_token, lambda x: rms_norm_quant(x, torch.ones(x.shape[1]), 1e-5)])
def test_no_rows_launch_nothing(launch: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    codes, scale = launch(torch.empty(0, 64))
    assert (codes.shape, codes.dtype, scale.shape) == ((0, 64), torch.int8, (0,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_per_token(torch.zeros(1, 40000)), "wider than the quantization kernel's 32768"),
        (lambda: quantize_per_token(torch.zeros(2, 8, dtype=torch.int8)), "x is int8"),
        (lambda: quantize_per_token(torch.zeros(2, 8), torch.int16), "codes is int16"),
        (lambda: quantize_per_token(torch.zeros(2, 8), scale=torch.zeros(3)), r"scale is float32 \[3\]"),
        (lambda: gated_act_quant(torch.zeros(2, 8), "relu"), "unknown activation 'relu'"),
        (lambda: gated_act_quant(torch.zeros(2, 8), "silu", codes=torch.zeros(2, 8, dtype=torch.int8)), "codes is"),
    ],
)
def test_a_tensor_the_kernel_would_misread_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("op_name", ["rms_norm", "add_rms_norm", "gated_act", "quantize_per_token"])
def test_fp8_is_refused_before_sm_89_and_other_forms_everywhere(op_name: str) -> None:
    facts: dict[str, Fact] = {
        "op": op_name,
        "phase": "decode",
        "dtype": "fp16",
        "width": 64,
        "eps": 1e-5,
        "offset": 0.0,
    }
    facts |= {"activation": "silu"}

    def chosen(quant: str, sm: int) -> str:
        place = Place("node", CLASSES["decode"], {**facts, "quant": quant, "sm": sm})
        specs = choose(place, tuple(kernels().values()))
        return specs if isinstance(specs, str) else "+".join(spec.name for spec in specs)

    assert "sm_86 has no FP8 arithmetic: it begins with sm_89" in chosen("fp8", 86)
    assert "no kernel quantizes to int3: int8, fp8 do" in chosen("int3", 90)
    name = "gated_act_quant" if op_name == "gated_act" else op_name
    assert (chosen("fp8", 89), chosen("int8", 80)) == (name, name)
