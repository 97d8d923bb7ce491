"""Grouped products and the sum behind them equal their references; a pair's bits do not depend on its batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit_kernels.ops import gated_act as act_op
from quantkit_kernels.ops import moe_linear as op
from quantkit_kernels.ops import moe_sum as sum_op
from quantkit_kernels.triton import Fact, kernels
from quantkit_kernels.triton.gated_act import gated_act
from quantkit_kernels.triton.layout import GpuExperts, pack_matrix, pad_experts, stack_experts
from quantkit_kernels.triton.moe_linear import moe_linear
from quantkit_kernels.triton.moe_route import Routing, moe_route
from quantkit_kernels.triton.moe_sum import moe_sum
from tests.ops.native import GUARD, between, poisoned

# The interpreter's numpy tells of the overflow that makes silu of a large negative number zero.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

FORMS = ["int4:32", "int4:64", "int4:128", "int4:32:asym", "int4:64:asym", "int4:128:asym", "int8", "f16"]


def random_experts(form: str, count: int, n: int, k: int) -> tuple[GpuExperts, Tensor]:
    """Random weights as the kernels read them, and dequantized in float64 `[count, n, k]`."""
    if form == "f16":
        weight = (torch.randn(count, n, k) * 0.05).half()
        return pad_experts(weight), weight.double()
    kind, *rest = form.split(":")
    bits, group = int(kind[3:]), int(rest[0]) if rest else 0
    groups, top = k // group if group else 1, 1 << (bits - 1)
    packed, dense = [], []
    for _ in range(count):
        codes = torch.randint(-top, top, (n, k)).to(torch.int8)
        scale = (torch.rand(n, groups) * 0.02 + 0.001).bfloat16()
        zero = torch.randint(-top, top, (n, groups)).to(torch.int8) if "asym" in rest else None
        packed.append(pack_matrix(codes, scale, zero, bits=bits, group_size=group))
        real = codes.double() - (0 if zero is None else zero.double().repeat_interleave(k // groups, 1))
        dense.append(real * scale.double().repeat_interleave(k // groups, 1))
    return stack_experts(packed), torch.stack(dense)


def routed(tokens: int, num_experts: int, top_k: int, padded: list[int] | None = None) -> Routing:
    slots = torch.arange(tokens, dtype=torch.int32)
    slots[padded or []] = -1
    return moe_route(torch.randn(tokens, num_experts), slots, top_k, renormalize=True)


def check(routing: Routing, weights: GpuExperts, dense: Tensor, *, share: bool) -> None:
    """Every pair's row equals the reference; rows of padding and rows behind the last stay poison."""
    tokens, top_k = routing.experts.shape
    x = torch.randn(tokens if share else tokens * top_k, dense.shape[2]).half()
    buffer = poisoned(tokens * top_k + GUARD, dense.shape[1]).half()
    moe_linear(x, weights, routing, buffer[: tokens * top_k])
    expected = op.reference(x, dense.float(), routing.experts)
    live = (routing.experts >= 0).flatten()
    bound = {"rtol": 1e-3, "atol": 1e-5 * max(float(expected.abs().max()), 1e-3)}
    torch.testing.assert_close(buffer[: tokens * top_k][live].float(), expected[live], **bound)
    assert buffer[tokens * top_k :].isnan().all()
    assert buffer[: tokens * top_k][~live].isnan().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "n", "k"),
    [(1, 8, 2, 40, 128), (16, 8, 8, 33, 256), (5, 60, 2, 64, 576), (3, 8, 1, 1, 1152)],
)
def test_few_tokens_equal_the_reference(tokens: int, num_experts: int, top_k: int, n: int, k: int, form: str) -> None:
    group = int(form.split(":")[1]) if ":" in form else 1
    weights, dense = random_experts(form, num_experts, n, k + -k % group)
    check(routed(tokens, num_experts, top_k), weights, dense, share=bool(n % 2))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "n", "k"), [(17, 60, 2, 65, 256), (64, 8, 2, 40, 576), (129, 8, 1, 70, 128)]
)
def test_many_tokens_equal_the_reference(tokens: int, num_experts: int, top_k: int, n: int, k: int, form: str) -> None:
    group = int(form.split(":")[1]) if ":" in form else 1
    weights, dense = random_experts(form, num_experts, n, k + -k % group)
    check(routed(tokens, num_experts, top_k), weights, dense, share=bool(n % 2))


@pytest.mark.parametrize("form", FORMS)
def test_any_size_with_padded_tokens_equals_the_reference(form: str) -> None:
    group = int(form.split(":")[1]) if ":" in form else 1
    tokens, num_experts, n, k = between(2, 300), between(1, 12), between(1, 100), group * between(1, 300 // group + 1)
    weights, dense = random_experts(form, num_experts, n, k)
    padded = [0, between(0, tokens - 1), tokens - 1]
    check(routed(tokens, num_experts, between(1, min(3, num_experts)), padded), weights, dense, share=bool(n % 2))


def test_a_wide_weight_takes_the_wider_tile() -> None:
    check(routed(2, 2, 1), *random_experts("int4:64", 2, 4100, 64), share=True)


@pytest.mark.parametrize("tokens", [11, 90])
def test_all_tokens_at_one_expert_and_none_at_the_others(tokens: int) -> None:
    weights, dense = random_experts("int4:64:asym", 60, 48, 192)
    logits = torch.randn(tokens, 60)
    logits[:, 33] = 90.0
    routing = moe_route(logits, torch.zeros(tokens, dtype=torch.int32), 1, renormalize=False)
    assert (routing.experts == 33).all()
    check(routing, weights, dense, share=True)


def test_padding_alone_writes_nothing() -> None:
    check(routed(4, 8, 2, [0, 1, 2, 3]), *random_experts("int8", 8, 40, 100), share=True)


@pytest.mark.parametrize("form", ["int4:32:asym", "int4:128", "int8", "f16"])
@pytest.mark.parametrize("rows", ["few", "many"])
def test_a_token_has_the_same_bits_alone_and_among_others(form: str, rows: str) -> None:
    weights, _ = random_experts(form, 8, 48, 384)
    tokens = 16 if rows == "few" else 150
    x, logits, slots = torch.randn(tokens, 384).half(), torch.randn(tokens, 8), torch.zeros(tokens, dtype=torch.int32)
    whole = moe_linear(x, weights, moe_route(logits, slots, 2, renormalize=True, rows=rows)).view(tokens, 2, 48)
    for first, last in ((0, 1), (5, 12), (tokens - 1, tokens)):
        part = moe_route(logits[first:last], slots[first:last], 2, renormalize=True, rows=rows)
        found = moe_linear(x[first:last], weights, part).view(last - first, 2, 48)
        assert torch.equal(found, whole[first:last])


def test_a_zero_point_one_off_is_seen() -> None:
    weights, dense = random_experts("int4:128:asym", 2, 32, 128)
    assert weights.zero is not None
    weights.zero[1, 0, 3] += 1 if weights.zero[1, 0, 3] < 7 else -1
    with pytest.raises(AssertionError):
        check(routed(2, 2, 2), weights, dense, share=True)


def test_what_no_kernel_can_serve_is_refused() -> None:
    routing = routed(3, 2, 1)
    weights, _ = random_experts("int8", 2, 8, 96)
    with pytest.raises(ValueError, match="x has 2 rows: 3 tokens with 1 experts each"):
        moe_linear(torch.zeros(2, 96).half(), weights, routing)
    with pytest.raises(ValueError, match="x is float32"):
        moe_linear(torch.zeros(3, 96), weights, routing)
    codes = torch.zeros(4, 96, dtype=torch.int8)
    grouped = stack_experts([pack_matrix(codes, torch.ones(4, 3).half(), bits=8, group_size=32)] * 2)
    with pytest.raises(ValueError, match="8-bit weights must be symmetric, with one scale a row"):
        moe_linear(torch.zeros(3, 96).half(), grouped, routing)
    facts: dict[str, Fact] = {
        "op": "moe_linear", "rows": "few", "dtype": "fp16", "n": 64, "k": 576, "bits": 4, "group_size": 128,
        "symmetric": True, "scale": "bf16", "experts": 2, "top_k": 1, "share": 1,
    }  # fmt: skip
    said = {spec.refusal(facts) for spec in kernels().values() if spec.op == "moe_linear"}
    assert "a group size of 128 on 576 columns: it must be 32, 64 or 128 and divide them" in said
    assert None not in said


def test_experts_of_different_forms_are_refused() -> None:
    small, large = (pack_matrix(torch.zeros(n, 64, dtype=torch.int8), torch.ones(n, 1).half(), bits=8) for n in (4, 8))
    with pytest.raises(ValueError, match="must have one shape and form, and these have 2"):
        stack_experts([small, large])
    with pytest.raises(ValueError, match="these have 0"):
        stack_experts([])
    with pytest.raises(ValueError, match=r"must be float16 \[E, N, K\]"):
        pad_experts(torch.zeros(2, 4, 8))


@pytest.mark.parametrize(("tokens", "top_k", "width"), [(1, 1, 1536), (5, 8, 1027), (37, 2, 80)])
def test_the_sum_equals_its_reference_and_does_not_read_padding(tokens: int, top_k: int, width: int) -> None:
    y, weights = torch.randn(tokens * top_k, width).half(), torch.rand(tokens, top_k)
    experts = torch.zeros(tokens, top_k, dtype=torch.int32)
    if tokens > 1:
        experts[tokens // 2], weights[tokens // 2] = -1, 0.0
        y.view(tokens, top_k, width)[tokens // 2] = float("nan")
    buffer = poisoned(tokens + GUARD, width).half()
    moe_sum(y, experts, weights, buffer[:tokens])
    torch.testing.assert_close(buffer[:tokens].float(), sum_op.reference(y, experts, weights), rtol=1e-3, atol=1e-6)
    assert buffer[tokens:].isnan().all()
    assert tokens == 1 or not buffer[tokens // 2].any()


def test_a_sum_is_taken_in_the_order_of_the_experts() -> None:
    y = torch.tensor([[2.0**14], [-(2.0**14)], [2.0**-10]]).half()
    weights = torch.tensor([[2.0**12, 2.0**12, 1.0]])
    experts = torch.zeros(1, 3, dtype=torch.int32)
    assert moe_sum(y, experts, weights).item() == 2.0**-10
    assert moe_sum(y[[2, 0, 1]].contiguous(), experts, weights[:, [2, 0, 1]].contiguous()).item() == 0.0


@pytest.mark.parametrize("tokens", [4, 50])
def test_a_block_of_experts_equals_each_token_sent_to_its_experts_by_hand(tokens: int) -> None:
    width, inner, num_experts, top_k = 96, 64, 8, 2
    up, up_dense = random_experts("int4:32", num_experts, 2 * inner, width)
    down, down_dense = random_experts("int8", num_experts, width, inner)
    x, logits = torch.randn(tokens, width).half() / 4, torch.randn(tokens, num_experts)
    slots = torch.arange(tokens, dtype=torch.int32)
    slots[2] = -1
    routing = moe_route(logits, slots, top_k, renormalize=True)
    found = moe_sum(
        moe_linear(gated_act(moe_linear(x, up, routing), "silu"), down, routing), routing.experts, routing.weights
    )
    for token in range(tokens):
        chosen = logits[token].topk(top_k)
        wanted = torch.zeros(width)
        for share, expert in zip(chosen.values.softmax(-1), chosen.indices.tolist(), strict=True):
            inside = act_op.reference(x[token].float()[None] @ up_dense[expert].float().T, "silu")
            wanted += share * (inside @ down_dense[expert].float().T)[0]
        if token == 2:
            assert not found[token].any()
        else:
            torch.testing.assert_close(found[token].float(), wanted, rtol=5e-3, atol=2e-3 * float(wanted.abs().max()))
