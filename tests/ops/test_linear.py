from __future__ import annotations

import pytest
import torch

from quantkit_kernels.ops import linear, logits
from tests.ops.native import GUARD, TensorCalls, assert_rows, int32, pack, poisoned, run, weight

FORMS = [
    "f32",
    "f16",
    "bf16",
    "int8",
    "int8:g64:asym",
    "int4:g64",
    "int4:g64:half",
    "int4:g128:asym",
    "int4:g32:asym:half",
]
SHAPES = [(1, 576, 64), (5, 640, 961), (33, 384, 97), (200, 256, 32)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "columns", "rows"), SHAPES)
def test_linear_equals_its_reference(isa: str, form: str, tokens: int, columns: int, rows: int) -> None:
    columns = 640 if "g128" in form and columns % 128 else columns
    w = weight(form, rows, columns)
    x = torch.randn(tokens + GUARD, columns)
    bias = torch.randn(rows) if tokens % 2 else None
    out = poisoned(tokens + GUARD, rows)
    run(isa, lambda calls: calls.linear(x, w.packed, bias, out), tokens)
    expected = linear.reference(x[:tokens].double().float(), w.dense, bias)
    assert_rows(out, expected, rtol=1e-4, atol=2e-5 * columns**0.5 * w.dense.abs().max().item())


@pytest.mark.parametrize(
    ("form", "columns"), [("f16", 577), ("int8", 129), ("int4", 75), ("int4:g12:asym", 60), ("int8:g300", 600)]
)
@pytest.mark.parametrize("tokens", [1, 19])
def test_channels_need_not_fill_a_block(isa: str, form: str, columns: int, tokens: int) -> None:
    w = weight(form, 45, columns)
    x, out = torch.randn(tokens, columns), poisoned(tokens, 45)
    # What follows the last row of x must not reach the result.
    guarded = torch.cat((x.flatten(), torch.full((64,), float("nan"))))
    x = guarded[: tokens * columns].view(tokens, columns)
    run(isa, lambda calls: calls.linear(x, w.packed, None, out), tokens)
    assert_rows(out, linear.reference(x, w.dense), rtol=1e-4, atol=2e-5 * columns**0.5 * w.dense.abs().max().item())


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_alone_and_among_many_and_on_any_number_of_threads(isa: str, form: str) -> None:
    w = weight(form, 449, 384)
    x = torch.randn(231, 384)
    whole = poisoned(231, 449)
    run(isa, lambda calls: calls.linear(x, w.packed, None, whole), 231, threads=2)
    for tokens in (1, 2, 3, 4, 7, 8, 13, 64, 193):
        for threads in (1, 2, 3):
            out = poisoned(tokens, 449)
            part = x[-tokens:].contiguous()
            run(isa, lambda calls, part=part, out=out: calls.linear(part, w.packed, None, out), tokens, threads=threads)
            assert torch.equal(out, whole[-tokens:]), f"{tokens} rows, {threads} threads"


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("picked", [[], [4], [0, 7, 7, 19, 3], list(range(20)) * 2])
def test_logits_reads_only_the_rows_asked_for(isa: str, picked: list[int], softcap: float | None) -> None:
    w = weight("int8", 1025, 192)
    hidden = torch.randn(20, 192) * 3
    out = poisoned(len(picked) + GUARD, 1025)
    index = int32([*picked, *[-1] * GUARD])
    run(isa, lambda calls: calls.logits(hidden, index, w.packed, out, softcap), 20, 1, len(picked))
    assert_rows(out, logits.reference(hidden, int32(picked), w.dense, softcap), rtol=1e-4, atol=1e-3)


def test_an_empty_step_writes_nothing(isa: str) -> None:
    w = weight("int4:g64", 64, 128)
    out = poisoned(4, 64)
    run(isa, lambda calls: calls.linear(torch.randn(4, 128), w.packed, None, out), 0, 0, 0)
    assert out.isnan().all()


def test_a_row_index_outside_the_step_is_refused(isa: str) -> None:
    w = weight("f32", 8, 8)
    calls = TensorCalls(threads=1, isa=isa)
    calls.logits(torch.randn(4, 8), int32([2, 3]), w.packed, poisoned(2, 8))
    calls.run(4, 1, 2)
    with pytest.raises(IndexError, match=r"logits_rows\[1\] = 3"):
        calls.run(3, 1, 2)
    with pytest.raises(IndexError, match="hold 2"):
        calls.run(4, 1, 3)


def test_packing_refuses_what_it_cannot_represent() -> None:
    codes = torch.zeros(4, 10, dtype=torch.int8)
    with pytest.raises(ValueError, match="int8 codes"):
        pack(torch.zeros(4, 10), bits=4, scale=torch.ones(4, 1))
    with pytest.raises(ValueError, match="into groups"):
        pack(codes, bits=4, scale=torch.ones(4, 3))
    with pytest.raises(ValueError, match="3 bits"):
        pack(codes, bits=3, scale=torch.ones(4, 1))
    with pytest.raises(ValueError, match="without scales"):
        pack(codes, bits=16)


def test_an_int4_weight_takes_half_a_byte_and_its_scale() -> None:
    packed = weight("int4:g64:half", 96, 640).packed
    assert packed.nbytes == 96 * 640 // 2 + 96 * 10 * 2
