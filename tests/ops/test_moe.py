"""The references of routing and grouped products, against Transformers' routers and each token by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from quantkit_kernels.ops import moe_linear, moe_route, moe_sum


@pytest.mark.parametrize(
    ("router", "normed", "renormalize"),
    [
        (MixtralTopKRouter, False, True),
        (Qwen2MoeTopKRouter, False, False),
        (Qwen2MoeTopKRouter, True, True),
        (Qwen3MoeTopKRouter, True, True),
    ],
)
def test_tokens_are_routed_as_transformers_routes_them(
    router: type[nn.Module], normed: bool, renormalize: bool
) -> None:
    config = SimpleNamespace(
        num_experts=60, num_local_experts=60, num_experts_per_tok=4, hidden_size=32, norm_topk_prob=normed
    )
    module = router(config)
    nn.init.normal_(module.weight)
    with torch.no_grad():
        logits, scores, indices = module(torch.randn(50, 32))
    experts, weights = moe_route.reference(logits, torch.zeros(50), 4, renormalize)
    assert torch.equal(experts.long(), indices)
    torch.testing.assert_close(weights, scores, rtol=1e-5, atol=1e-7)


def test_a_softmax_over_the_chosen_is_one_over_all_renormalized() -> None:
    logits = torch.randn(20, 60) * 4
    experts, weights = moe_route.reference(logits, torch.zeros(20), 8, True)
    torch.testing.assert_close(weights, logits.gather(1, experts.long()).softmax(-1), rtol=1e-6, atol=1e-8)
    _, plain = moe_route.reference(logits, torch.zeros(20), 8, False)
    torch.testing.assert_close(plain / plain.sum(1, keepdim=True), weights, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("top_k", [0, 9])
def test_a_token_cannot_have_more_experts_than_there_are(top_k: int) -> None:
    with pytest.raises(ValueError, match=f"a token cannot have {top_k} of 8 experts"):
        moe_route.reference(torch.zeros(1, 8), torch.zeros(1), top_k, True)


def test_every_pair_has_a_place_in_a_block_of_its_expert() -> None:
    tokens, num_experts, top_k, block_rows = 70, 12, 3, 16
    slots = torch.zeros(tokens)
    slots[[4, 60]] = -1
    experts, _ = moe_route.reference(torch.randn(tokens, num_experts), slots, top_k, True)
    order, block_expert = moe_route.blocks_of(experts, num_experts, block_rows)
    placed = order[order >= 0]
    assert sorted(placed.tolist()) == (experts.flatten() >= 0).nonzero()[:, 0].tolist()
    for pairs, expert in zip(order.view(-1, block_rows), block_expert.tolist(), strict=True):
        live = pairs[pairs >= 0].long()
        assert (experts.flatten()[live] == expert).all()
        assert bool(live.numel()) == (expert >= 0)
        assert live.tolist() == sorted(live.tolist())


def test_pairs_are_multiplied_and_summed_as_by_hand() -> None:
    x, weight = torch.randn(5, 24), torch.randn(6, 10, 24)
    experts = torch.tensor([[0, 5], [2, 1], [-1, -1], [5, 0], [3, 2]])
    weights = torch.rand(5, 2)
    y = moe_linear.reference(x, weight, experts)
    assert torch.equal(moe_linear.reference(x.repeat_interleave(2, 0), weight, experts), y)
    assert not y[4:6].any()
    y[4:6] = float("nan")
    summed = moe_sum.reference(y, experts, weights)
    for token in (0, 1, 3, 4):
        wanted = sum(weights[token, j] * (weight[experts[token, j]] @ x[token]) for j in range(2))
        torch.testing.assert_close(summed[token], wanted, rtol=1e-5, atol=1e-5)
    assert not summed[2].any()
