"""Products with rows quantized on the fly: every instruction set against the reference, and against each other."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quantkit_kernels import cpu
from quantkit_kernels.ops import linear, logits
from tests.ops.native import GUARD, TensorCalls, Weight, assert_rows, int32, pack, poisoned, run, weight

FORMS = [
    "int8",
    "int8:g64:asym",
    "int8:g300",
    "int4:g64",
    "int4:g64:half",
    "int4:g128",
    "int8:g256",
    "int4:g128:asym",
    "int4:g32:asym:half",
]


def columns_of(form: str, wanted: int) -> int:
    group = next((int(part[1:]) for part in form.split(":") if part[0] == "g"), 1)
    return max(1, wanted // group) * group


def expected(w: Weight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    assert w.codes is not None
    return linear.of_codes(x, *w.codes, bias)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 9, 16, 17, 47, 200])
def test_products_of_codes_equal_their_reference(isa: str, form: str, tokens: int) -> None:
    columns, rows = columns_of(form, int(torch.randint(1, 700, ()))), int(torch.randint(1, 200, ()))
    w = weight(form, rows, columns)
    x = torch.randn(tokens + GUARD, columns) * torch.rand(tokens + GUARD, 1) * 10
    bias = torch.randn(rows) if tokens % 2 else None
    out = poisoned(tokens + GUARD, rows)
    run(isa, lambda calls: calls.linear(x, w.packed, bias, out, "int8"), tokens)
    wanted = expected(w, x[:tokens], bias)
    assert_rows(out, wanted, rtol=1e-5, atol=1e-5 * max(1.0, wanted.abs().max().item()))


@pytest.mark.parametrize(("form", "columns"), [("int8", 1), ("int8", 129), ("int4", 75), ("int4:g12:asym", 60)])
@pytest.mark.parametrize("tokens", [1, 19])
def test_channels_need_not_fill_a_word_or_a_block(isa: str, form: str, columns: int, tokens: int) -> None:
    w = weight(form, 45, columns)
    x, out = torch.randn(tokens, columns), poisoned(tokens, 45)
    run(isa, lambda calls: calls.linear(x, w.packed, None, out, "int8"), tokens)
    assert_rows(out, expected(w, x), rtol=1e-5, atol=1e-5 * max(1.0, w.dense.abs().sum(1).max().item()))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_among_any_others_on_any_threads_and_instruction_set(form: str) -> None:
    columns = columns_of(form, 384)
    w = weight(form, 449, columns)
    x = torch.randn(231, columns)
    fused = [isa for isa in cpu.supported_isas() if isa != "portable"] or ["portable"]  # which rounds a·b + c twice
    whole = poisoned(231, 449)
    run(fused[0], lambda calls: calls.linear(x, w.packed, None, whole, "int8"), 231, threads=2)
    for isa in fused:
        for tokens in (1, 2, 3, 4, 6, 7, 8, 9, 13, 64, 193, 231):
            for threads in (1, 3):
                out = poisoned(tokens, 449)
                part = x[-tokens:].contiguous()
                run(
                    isa,
                    lambda calls, part=part, out=out: calls.linear(part, w.packed, None, out, "int8"),
                    tokens,
                    threads=threads,
                )
                assert torch.equal(out, whole[-tokens:]), f"{isa}, {tokens} rows, {threads} threads"


def test_the_largest_codes_neither_wrap_nor_saturate(isa: str) -> None:
    x = torch.full((17, 1024), 3.0)
    x[1::2] = -3.0
    for bits, group in ((8, 1024), (8, 64), (4, 64), (4, 128)):
        for code in (-(1 << (bits - 1)), (1 << (bits - 1)) - 1):
            codes = torch.full((33, 1024), code, dtype=torch.int8)
            scale, zero = torch.ones(33, 1024 // group), torch.full((33, 1024 // group), 7, dtype=torch.int8)
            for points in (None, zero):
                packed, out = pack(codes, bits=bits, scale=scale, zero=points), poisoned(17, 33)
                run(isa, lambda calls, p=packed, o=out: calls.linear(x, p, None, o, "int8"), 17)
                assert_rows(out, linear.of_codes(x, codes, scale, points), rtol=1e-6, atol=0)


def test_rows_of_nothing_and_rows_that_are_not_finite(isa: str) -> None:
    w = weight("int4:g64", 40, 128)
    x = torch.randn(6, 128)
    x[0] = 0.0
    x[1, :64] = 1e-38
    x[2, 70] = float("nan")
    x[3, 5] = float("inf")
    x[4, 127] = -float("inf")
    out = poisoned(6, 40)
    run(isa, lambda calls: calls.linear(x, w.packed, None, out, "int8"), 6)
    assert torch.equal(out[0], torch.zeros(40))
    assert out[2:5].isnan().all()
    torch.testing.assert_close(out[[1, 5]], expected(w, x[[1, 5]]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("picked", [[], [4], [0, 7, 7, 19, 3], list(range(20)) * 2])
def test_logits_of_codes_reads_only_the_rows_asked_for(isa: str, picked: list[int], softcap: float | None) -> None:
    w = weight("int8", 1025, 192)
    assert w.codes is not None
    hidden, out = torch.randn(20, 192) * 3, poisoned(len(picked) + GUARD, 1025)
    index = int32([*picked, *[-1] * GUARD])
    run(isa, lambda calls: calls.logits(hidden, index, w.packed, out, softcap, "int8"), 20, 1, len(picked))
    wanted = logits.of_codes(hidden, int32(picked), *w.codes, softcap)
    assert_rows(out, wanted, rtol=1e-4, atol=1e-3)


def test_an_index_outside_the_step_is_refused_before_anything_is_computed(isa: str) -> None:
    w, out = weight("int8", 8, 8), poisoned(2, 8)
    calls = TensorCalls(threads=1, isa=isa)
    calls.logits(torch.randn(4, 8), int32([2, 3]), w.packed, out, None, "int8")
    with pytest.raises(IndexError, match=r"logits_rows\[1\] = 3"):
        calls.run(3, 1, 2)
    assert out.isnan().all()


def test_products_that_share_scratch_do_not_disturb_each_other(isa: str) -> None:
    first, second = weight("int8", 64, 128), weight("int4:g128", 64, 128)
    x, y = torch.randn(5, 128), torch.randn(5, 128)
    out = [poisoned(5, 64), poisoned(5, 64)]

    def add(calls: TensorCalls) -> None:
        calls.linear(x, first.packed, None, out[0], "int8")
        calls.linear(y, second.packed, None, out[1], "int8")

    run(isa, add, 5)
    for made, w, rows in zip(out, (first, second), (x, y), strict=True):
        torch.testing.assert_close(made, expected(w, rows), rtol=1e-5, atol=1e-5)


def test_a_float_weight_has_no_codes_to_multiply() -> None:
    with pytest.raises(ValueError, match="4 or 8 bits"):
        TensorCalls(threads=1).linear(torch.randn(1, 8), weight("f16", 8, 8).packed, None, poisoned(1, 8), "int8")
    with pytest.raises(ValueError, match="unknown compute"):
        TensorCalls(threads=1).linear(torch.randn(1, 8), weight("int8", 8, 8).packed, None, poisoned(1, 8), "int4")


@pytest.mark.parametrize("producer", ["rms_norm", "add_rms_norm", "gated_act"])
@pytest.mark.parametrize("form", ["int8", "int4:g64", "int4:g12:asym"])
def test_a_norm_or_activation_before_it_quantizes_the_rows_itself(isa: str, producer: str, form: str) -> None:
    columns, tokens = columns_of(form, 192), 21
    w = weight(form, 70, columns)
    x, y, norm = torch.randn(tokens, columns), torch.randn(tokens, columns), torch.rand(columns)
    gate_up = torch.randn(tokens, 2 * columns)
    made, summed, out = poisoned(tokens + GUARD, columns), poisoned(tokens, columns), poisoned(tokens + GUARD, 70)

    def add(calls: TensorCalls) -> None:
        if producer == "rms_norm":
            calls.rms_norm(x, norm, made, 1e-6)
        elif producer == "add_rms_norm":
            calls.add_rms_norm(x, y, norm, made, summed, 1e-6)
        else:
            calls.gated_act(gate_up, made, "silu")
        before = len(calls)
        calls.linear(made, w.packed, None, out, "int8")
        assert len(calls) == before + 1

    run(isa, add, tokens)
    assert_rows(out, expected(w, made[:tokens]), rtol=1e-5, atol=1e-5 * max(1.0, out[:tokens].abs().max().item()))


def test_a_view_of_another_width_is_not_taken_for_the_rows_a_norm_has_made(isa: str) -> None:
    w = weight("int8", 30, 64)
    x, made, out = torch.randn(8, 128), poisoned(8, 128), poisoned(16, 30)
    calls = TensorCalls(threads=2, isa=isa)
    calls.rms_norm(x, torch.ones(128), made, 1e-6)
    calls.linear(made.view(16, 64), w.packed, None, out, "int8")
    calls.run(8, 1, 1)
    torch.testing.assert_close(out[:8], expected(w, made.view(16, 64)[:8]), rtol=1e-5, atol=1e-4)


def test_logits_of_no_rows_at_all(isa: str) -> None:
    w = weight("int8", 30, 64)
    run(
        isa, lambda calls: calls.logits(torch.randn(4, 64), int32([]), w.packed, poisoned(0, 30), None, "int8"), 4, 1, 0
    )


def test_zero_points_that_leave_the_byte_are_refused() -> None:
    codes, scale = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 1)
    with pytest.raises(ValueError, match=r"within -120\.\.120"):
        pack(codes, bits=4, scale=scale, zero=torch.full((4, 1), -128, dtype=torch.int8))


def test_threads_that_run_one_list_take_turns(isa: str) -> None:
    w = weight("int4:g64", 300, 512)
    x, out = torch.randn(64, 512), poisoned(64, 300)
    calls = TensorCalls(threads=2, isa=isa)
    calls.linear(x, w.packed, None, out, "int8")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda rows: calls.run(rows, 1, 1), [64, 3, 17, 1] * 25))
    calls.run(64, 1, 1)
    torch.testing.assert_close(out, expected(w, x), rtol=1e-5, atol=1e-4)


def test_a_child_forked_while_others_compute_can_compute() -> None:
    script = """
import os, sys, threading, time
import numpy as np
from quantkit_kernels import cpu
calls = cpu.CallList(threads=2)
x, out = np.ones((4, 64), np.float32), np.zeros((4, 64), np.float32)
calls.add(x, x, out)
calls.run(4, 1, 1)
stop = threading.Event()
def spin():
    while not stop.is_set():
        calls.run(4, 1, 1)
other = threading.Thread(target=spin)
other.start()
bad = 0
for _ in range(60):
    child = os.fork()
    if child == 0:
        calls.run(4, 1, 1)  # the other thread's own list, in the middle of a step
        fresh = cpu.CallList(threads=2)
        fresh.add(x, x, out.copy())
        fresh.run(4, 1, 1)
        os._exit(0)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.001)
    else:
        os.kill(child, 9)
        bad += 1
stop.set()
other.join()
sys.exit(bad)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
