from __future__ import annotations

import pytest
import torch

from quantkit_kernels.ops import add, add_rms_norm, embedding, gated_act, rms_norm
from tests.ops.native import GUARD, assert_rows, int32, poisoned, run

SIZES = [(1, 576), (3, 80), (37, 1027), (300, 64), (0, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 24.0])
def test_embedding_equals_its_reference(isa: str, dtype: torch.dtype, scale: float) -> None:
    table = torch.randn(101, 83).to(dtype)
    ids = int32(torch.randint(0, 101, (45,)))
    out = poisoned(45 + GUARD, 83)
    run(isa, lambda calls: calls.embedding(ids, table, out, scale), 45 - 2)
    assert_rows(out[:-2], embedding.reference(ids[:43], table, scale), rtol=0, atol=0)


@pytest.mark.parametrize(("tokens", "hidden"), SIZES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_equals_its_reference(isa: str, tokens: int, hidden: int, offset: float) -> None:
    x, weight = torch.randn(tokens + GUARD, hidden) * 100, torch.randn(hidden)
    out = poisoned(tokens + GUARD, hidden)
    run(isa, lambda calls: calls.rms_norm(x, weight, out, 1e-5, offset), tokens)
    assert_rows(out, rms_norm.reference(x[:tokens], weight, 1e-5, offset))


@pytest.mark.parametrize(("tokens", "hidden"), SIZES)
@pytest.mark.parametrize("in_place", [False, True])
def test_add_rms_norm_equals_its_reference(isa: str, tokens: int, hidden: int, in_place: bool) -> None:
    x, residual, weight = torch.randn(tokens, hidden), torch.randn(tokens, hidden) * 50, torch.randn(hidden)
    expected, expected_sum = add_rms_norm.reference(x, residual, weight, 1e-6, 0.0)
    out = x if in_place else poisoned(tokens, hidden)
    total = residual if in_place else poisoned(tokens, hidden)
    run(isa, lambda calls: calls.add_rms_norm(x, residual, weight, out, total, 1e-6), tokens)
    assert_rows(out, expected)
    assert_rows(total, expected_sum, rtol=0, atol=0)


@pytest.mark.parametrize(("tokens", "hidden"), SIZES)
def test_add_equals_its_reference(isa: str, tokens: int, hidden: int) -> None:
    x, y, out = torch.randn(tokens, hidden), torch.randn(tokens, hidden), poisoned(tokens + GUARD, hidden)
    run(isa, lambda calls: calls.add(x, y, out), tokens)
    assert_rows(out, add.reference(x, y), rtol=0, atol=0)


@pytest.mark.parametrize(("tokens", "inner"), SIZES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_act_equals_its_reference(isa: str, tokens: int, inner: int, activation: str) -> None:
    gate_up = torch.randn(tokens + GUARD, 2 * inner) * 8
    if tokens:
        gate_up[0, :4] = torch.tensor([0.0, -200.0, 200.0, -88.0])
    out = poisoned(tokens + GUARD, inner)
    run(isa, lambda calls: calls.gated_act(gate_up, out, activation), tokens)
    # In float64: torch's float32 gelu_tanh loses the digits of 1 + tanh(x) for negative x.
    assert_rows(out, gated_act.reference(gate_up[:tokens].double(), activation).float(), rtol=3e-6, atol=1e-6)


def test_a_nan_is_never_hidden(isa: str) -> None:
    gate_up = torch.randn(2, 64)
    gate_up[1, 5] = float("nan")
    out, normed = torch.zeros(2, 32), torch.zeros(2, 64)
    run(isa, lambda calls: calls.gated_act(gate_up, out, "silu"), 2)
    run(isa, lambda calls: calls.rms_norm(gate_up, torch.ones(64), normed, 1e-6), 2)
    assert out[1, 5].isnan()
    assert normed[1].isnan().all()
    assert not out[0].isnan().any()


@pytest.mark.parametrize("op", ["norm", "act"])
def test_rowwise_bits_depend_neither_on_other_rows_nor_on_threads(isa: str, op: str) -> None:
    x, weight = torch.randn(200, 322), torch.randn(322)

    def compute(rows: torch.Tensor, threads: int) -> torch.Tensor:
        out = poisoned(rows.shape[0], 322 if op == "norm" else 161)
        if op == "norm":
            run(isa, lambda calls: calls.rms_norm(rows, weight, out, 1e-6), rows.shape[0], threads=threads)
        else:
            run(isa, lambda calls: calls.gated_act(rows, out, "silu"), rows.shape[0], threads=threads)
        return out

    whole = compute(x, 2)
    assert torch.equal(whole, compute(x, 1))
    assert torch.equal(whole[77:78], compute(x[77:78].contiguous(), 2))
