"""Routing equals its reference exactly, whatever the batch: who goes where, with what weight, in which order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit_kernels.ops import moe_route as op
from quantkit_kernels.triton import kernels
from quantkit_kernels.triton.moe_route import BLOCK_ROWS, Routing, moe_order_kernel, moe_route
from tests.ops.native import between, int32

# The interpreter's numpy tells of what makes a spoiled row's weights NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = [(8, 1), (8, 2), (8, 8), (60, 1), (60, 2), (60, 8), (1, 1), (33, 3)]


def slots(tokens: int, *padded: int) -> Tensor:
    found = torch.arange(tokens, dtype=torch.int32)
    found[list(padded)] = -1
    return found


def check(logits: Tensor, slot_mapping: Tensor, top_k: int, *, renormalize: bool, rows: str | None = None) -> Routing:
    """Experts and order are the reference's, weights nearly."""
    found = moe_route(logits, slot_mapping, top_k, renormalize=renormalize, rows=rows)
    experts, weights = op.reference(logits, slot_mapping, top_k, renormalize)
    assert torch.equal(found.experts, experts)
    torch.testing.assert_close(found.weights, weights, rtol=2e-6, atol=1e-7, equal_nan=True)
    order, block_expert = op.blocks_of(experts, logits.shape[1], BLOCK_ROWS[found.rows])
    assert torch.equal(found.block_expert, block_expert)
    assert torch.equal(found.order, order)
    return found


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), SIZES)
@pytest.mark.parametrize("tokens", [1, 16, 17, 300])
def test_random_logits_are_routed_as_the_reference_routes_them(
    tokens: int, num_experts: int, top_k: int, renormalize: bool
) -> None:
    logits = torch.randn(tokens, num_experts) * 3
    check(logits, slots(tokens), top_k, renormalize=renormalize)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_any_size_with_padding(dtype: torch.dtype) -> None:
    tokens, num_experts = between(2, 200), between(2, 70)
    logits = (torch.randn(tokens, num_experts) * 3).to(dtype)
    padded = [0, between(0, tokens - 1), tokens - 1]
    found = check(logits, slots(tokens, *padded), between(1, min(num_experts, 8)), renormalize=True)
    assert (found.experts[padded] == -1).all()
    assert (found.weights[padded] == 0).all()


def test_among_equal_logits_the_lowest_experts_are_chosen_in_order() -> None:
    logits = torch.zeros(3, 60)
    logits[1, 7], logits[1, 50] = -0.0, 1.0
    logits[2] = torch.randint(0, 2, (60,)).float()
    found = check(logits, slots(3), 4, renormalize=True)
    assert found.experts[:2].tolist() == [[0, 1, 2, 3], [50, 0, 1, 2]]


def test_padding_alone_fills_no_block() -> None:
    found = check(torch.randn(5, 8), slots(5, *range(5)), 2, renormalize=False)
    assert (found.block_expert == -1).all()
    assert (found.order == -1).all()


@pytest.mark.parametrize("tokens", [9, 100])
def test_all_tokens_may_go_to_one_expert(tokens: int) -> None:
    logits = torch.randn(tokens, 60)
    logits[:, 41] = 50.0
    found = check(logits, slots(tokens), 1, renormalize=True)
    assert set(found.block_expert.tolist()) <= {41, -1}
    assert (found.weights == 1).all()


def test_as_many_blocks_may_be_filled_as_are_reckoned_with() -> None:
    """Every expert's last block with one pair, or every expert with all tokens."""
    spread = torch.full((33, 33), -9.0)
    spread.fill_diagonal_(9.0)
    assert (check(spread, slots(33), 1, renormalize=True).block_expert >= 0).all()
    assert (check(torch.randn(40, 8), slots(40), 8, renormalize=True).block_expert >= 0).all()


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), -float("nan")])
def test_a_row_that_is_not_finite_has_weights_of_nan_and_experts_that_exist(spoiled: float) -> None:
    logits = torch.randn(4, 8)
    logits[1, 3], logits[2] = spoiled, -float("inf")
    logits[3, ::2] = -float("inf")
    for renormalize in (True, False):
        found = check(logits, slots(4), 8, renormalize=renormalize)
        assert found.weights[1:3].isnan().all()
        assert not found.weights[[0, 3]].isnan().any()
        assert (found.experts.sort(dim=1).values == torch.arange(8)).all()


def test_a_tokens_routing_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(40, 60).half()
    whole = moe_route(logits, slots(40), 4, renormalize=True)
    for first, last in ((0, 1), (7, 23), (39, 40)):
        part = moe_route(logits[first:last], slots(last - first), 4, renormalize=True)
        assert torch.equal(part.experts, whole.experts[first:last])
        assert torch.equal(part.weights, whole.weights[first:last])


def test_nothing_beyond_the_blocks_is_written_and_everything_within() -> None:
    experts, _ = op.reference(torch.randn(37, 8), slots(37, 5), 2, True)
    order, block_expert = op.blocks_of(experts, 8, 32)
    made = [torch.full((each.numel() + 40,), -77, dtype=torch.int32) for each in (order, block_expert)]
    spec = kernels()["moe_order"]
    how = spec.signature({"op": "moe_route", "experts": 8, "top_k": 2, "rows": "many", "renormalize": True})
    moe_order_kernel[spec.grid(how, {"rows": 37})](experts, *made, 74, block_expert.numel(), **how.constants)
    for found, wanted in zip(made, (order, block_expert), strict=True):
        assert torch.equal(found[: wanted.numel()], wanted)
        assert (found[wanted.numel() :] == -77).all()


def test_many_rows_may_be_asked_for_where_there_are_few() -> None:
    check(torch.randn(3, 8), slots(3), 2, renormalize=True, rows="many")
    with pytest.raises(ValueError, match="17 rows are more than the 16"):
        moe_route(torch.randn(17, 8), slots(17), 2, renormalize=True, rows="few")


def test_no_tokens_launch_nothing() -> None:
    found = moe_route(torch.empty(0, 8), int32([]), 2, renormalize=True)
    assert found.experts.shape == (0, 2)
    assert not found.block_expert.numel()


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 9), (8, 0), (64, 33), (1025, 2)])
def test_numbers_of_experts_that_no_kernel_takes_are_refused(num_experts: int, top_k: int) -> None:
    said = "1025 experts are more than the 1024" if num_experts > 1024 else f"a token cannot have {top_k} of"
    with pytest.raises(ValueError, match=said):
        moe_route(torch.randn(2, num_experts), slots(2), top_k, renormalize=True)
    assert said in str(kernels()["moe_topk"].refusal({"experts": num_experts, "top_k": top_k}))


def test_what_is_no_routing_is_refused() -> None:
    with pytest.raises(ValueError, match="slot_mapping is int64"):
        moe_route(torch.randn(2, 8), torch.zeros(2, dtype=torch.int64), 2, renormalize=True)
    with pytest.raises(ValueError, match="logits is float64"):
        moe_route(torch.randn(2, 8).double(), slots(2), 2, renormalize=True)
