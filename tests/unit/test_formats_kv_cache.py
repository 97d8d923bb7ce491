"""Keys and values in every format of the cache: round trips, saturation, and what must not be stored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.errors import NumericsError
from quantkit.formats.kv_cache import dequantize, quantize, scale_from_absmax
from quantkit.quantize.kv import kv_scales
from quantkit_kernels.cache_formats import CACHE_FORMATS, group_of
from quantkit_kernels.tensors import as_tensor

QUANTIZED = [kind.name for kind in CACHE_FORMATS.values() if kind.scaled]
HEADS = (8, 40, 48, 64, 80, 96, 256)
seeds = st.integers(0, 2**31 - 1)
fast = settings(max_examples=40, deadline=None)


def values(seed: int, head_dim: int, tokens: int = 9) -> Tensor:
    """float32 `[tokens, 2, D]`: channels of very different size, every token at a size of its own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return draw(tokens, 2, head_dim) * draw(2, head_dim).mul(2).exp() * draw(tokens, 1, 1).exp()


def step(x: Tensor, scale: Tensor, form: str) -> Tensor:
    """The distance between neighbouring codes around each value, in its own units."""
    y = x / scale
    if form == "INT8":
        return scale.expand_as(x)
    if form == "FP8":
        return (y.abs().clamp(min=2**-6).log2().floor() - 3).exp2() * scale
    groups = y.unflatten(-1, (-1, group_of(x.shape[-1])))
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    unit = ((most - least + least.abs() * 2**-10 + 2**-24) / 15) * (1 + 2**-10) + 2**-24  # of float16 levels
    return unit.expand_as(groups).flatten(-2) * scale


@fast
@given(seeds, st.sampled_from(QUANTIZED), st.sampled_from(HEADS))
def test_values_that_calibration_saw_come_back_within_half_a_step(seed: int, form: str, head_dim: int) -> None:
    x = values(seed, head_dim)
    scale = as_tensor(kv_scales(x.abs().amax(0), form))
    error = (dequantize(quantize(x, scale, form), scale, form, head_dim) - x).abs()
    assert bool((error <= step(x, scale, form) * 0.5001 + x.abs() * 1e-6).all())


@fast
@given(seeds, st.sampled_from([form for form in CACHE_FORMATS if form != "INT4"]), st.sampled_from(HEADS))
def test_what_a_cell_stands_for_is_stored_as_that_cell(seed: int, form: str, head_dim: int) -> None:
    """Not so in INT4, whose levels are chosen anew by what there is."""
    scale = torch.ones(2, head_dim) if CACHE_FORMATS[form].scaled else None
    cells = quantize(values(seed, head_dim), scale, form)
    assert torch.equal(quantize(dequantize(cells, scale, form, head_dim), scale, form), cells)


@pytest.mark.parametrize("form", CACHE_FORMATS)
@pytest.mark.parametrize("head_dim", HEADS)
def test_a_cell_takes_the_bytes_that_are_planned_for_it(form: str, head_dim: int) -> None:
    kind = CACHE_FORMATS[form]
    scale = torch.ones(2, head_dim) if kind.scaled else None
    cells = quantize(values(1, head_dim), scale, form)
    assert cells.shape == (9, 2, kind.cell(head_dim))
    assert cells[0, 0].nbytes == kind.cell_bytes(head_dim)
    bits = {"INT8": 8, "FP8": 8, "INT4": 4 + 32 / group_of(head_dim), "FP16": 16, "BF16": 16, "FP32": 32}[form]
    assert kind.cell_bytes(head_dim) * 8 == bits * head_dim


def test_int8_rounds_half_to_even_and_saturates() -> None:
    x = torch.tensor([[[500.0, -500.0, 0.5, 1.5, -2.5, -127.0]]])
    assert quantize(x, torch.ones(1, 6), "INT8").tolist() == [[[127, -127, 0, 2, -2, -127]]]


def test_fp8_rounds_half_to_even_keeps_signs_and_saturates() -> None:
    x = torch.tensor([0.0, -0.0, 2**-9, 2**-10, 3 * 2**-10, 17.0, 19.0, 448.0, 464.0, 1e30, -1e30, -17.0])
    cells = quantize(x.view(1, 1, 12), torch.ones(1, 12), "FP8")
    assert cells[0, 0].tolist() == [0, 0x80, 1, 0, 2, 0x58, 0x5A, 0x7E, 0x7E, 0x7E, 0xFE, 0xD8]
    assert dequantize(cells, torch.ones(1, 12), "FP8", 12)[0, 0, 5:8].tolist() == [16.0, 20.0, 448.0]


def test_no_finite_value_is_stored_as_the_code_that_is_no_number() -> None:
    x = torch.cat([torch.linspace(-500, 500, 4001), torch.tensor([3e38, -3e38, 1e-45])]).view(1, 1, -1)
    cells = quantize(x, torch.ones(1, x.shape[-1]), "FP8")
    assert not ((cells & 0x7F) == 0x7F).any()


@pytest.mark.parametrize("constant", [0.0, -0.0, 1.0, -3.3, 1e-6, -1e-9, 100.01])
def test_a_group_of_one_value_comes_back_as_that_value_within_float16(constant: float) -> None:
    x = torch.full((1, 1, 64), constant)
    back = dequantize(quantize(x, torch.ones(1, 64), "INT4"), torch.ones(1, 64), "INT4", 64)
    assert torch.equal(back, back[..., :1].expand_as(back))
    assert abs(float(back[0, 0, 0]) - constant) <= abs(constant) * 2**-14 + 2**-24
    if constant == 0.0:
        assert not quantize(x, torch.ones(1, 64), "INT4").any()


def test_int4_saturates_where_float16_ends_and_spoils_no_other_group() -> None:
    x = torch.zeros(1, 1, 64)
    x[..., 3], x[..., 4], x[..., 40] = 1e30, -1e30, 2.5
    back = dequantize(quantize(x, torch.ones(1, 64), "INT4"), torch.ones(1, 64), "INT4", 64)
    assert back[0, 0, 3:5].tolist() == [pytest.approx(65504.0, rel=1e-3), -65504.0]
    assert float(back[0, 0, 40]) == pytest.approx(2.5, abs=2**-9)


@pytest.mark.parametrize("form", CACHE_FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(form: str, bad: float) -> None:
    x = torch.zeros(2, 1, 32)
    x[1, 0, 7] = bad
    with pytest.raises(NumericsError, match=r"index \[1, 0, 7\]"):
        quantize(x, torch.ones(1, 32), form)


@pytest.mark.parametrize("head_dim", [1, 20, 63, 100])
def test_heads_that_no_group_divides_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"a multiple of 8 channels, not {head_dim}"):
        quantize(torch.zeros(1, 1, head_dim), torch.ones(1, head_dim), "INT4")


def test_groups_are_as_large_as_divide_the_head() -> None:
    assert [group_of(size) for size in (64, 80, 72, 96, 128)] == [32, 16, 8, 32, 32]


def test_a_scale_maps_the_largest_value_seen_to_the_end_of_the_range() -> None:
    absmax = torch.tensor([[2.0, 8.0], [1.0, 0.0]])
    assert torch.equal(scale_from_absmax(absmax, "INT8"), absmax / 127)
    assert torch.equal(scale_from_absmax(absmax, "FP8"), torch.tensor([[8.0, 8.0], [1.0, 1.0]]) / 448)
    with pytest.raises(ValueError, match="FP16 has no scales"):
        scale_from_absmax(absmax, "FP16")


@pytest.mark.parametrize(("form", "refused"), [("INT8", True), ("INT4", True), ("FP8", False)])
def test_a_channel_that_was_never_seen_is_refused_where_it_has_a_scale_of_its_own(form: str, refused: bool) -> None:
    absmax = torch.tensor([[2.0, 0.0]])
    if not refused:
        assert bool((kv_scales(absmax, form) > 0).all())
        absmax = absmax * 0
    with pytest.raises(NumericsError, match=r"layers\.3\.k: no usable KV scale: head 0, channel"):
        kv_scales(absmax, form, where="layers.3.k")
