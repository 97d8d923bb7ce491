"""Cases of the kernels that send tokens to experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from gpu.case import Case, random_half, random_matrix
from quantkit_kernels.ops import moe_linear, moe_route, moe_sum
from quantkit_kernels.triton.layout import GpuExperts, pad_experts, stack_experts


def route(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    """Tokens of random logits, one of them padding where there are several."""
    from quantkit_kernels.triton.moe_route import BLOCK_ROWS

    num_experts, top_k = int(facts["experts"]), int(facts["top_k"])
    logits, slots = random_half(rows, num_experts, device=device), torch.arange(rows, dtype=torch.int32, device=device)
    slots[rows // 2 :][: int(rows > 1)] = -1
    chosen, weights = moe_route.reference(logits, slots, top_k, bool(facts["renormalize"]))
    order, block_expert = moe_route.blocks_of(chosen, num_experts, BLOCK_ROWS[str(facts["rows"])])
    expected = {"experts": chosen, "weights": weights, "order": order, "block_expert": block_expert}
    values: dict[str, Any] = {name: torch.empty_like(each) for name, each in expected.items()}
    values |= {"logits": logits, "slot_mapping": slots, "pairs": chosen.numel(), "blocks": block_expert.numel()}
    bound = {**dict.fromkeys(expected, (0.0, 0.5)), "weights": (1e-5, 1e-7)}
    return Case(values, {"rows": rows, "n": num_experts}, expected, bound)


def linear(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    """Pairs of tokens with experts that random logits chose."""
    from quantkit_kernels.triton.moe_route import BLOCK_ROWS

    n, k, num_experts, top_k, share = (int(facts[name]) for name in ("n", "k", "experts", "top_k", "share"))
    chosen, _ = moe_route.reference(torch.randn(rows, num_experts), torch.zeros(rows), top_k, renormalize=True)
    order, block_expert = moe_route.blocks_of(chosen, num_experts, BLOCK_ROWS[str(facts["rows"])])
    weights, dense = _random_experts(facts)
    x = random_half(rows * top_k // share, k, device=device)
    values = {
        "x": x, "words": weights.words.to(device), "scale": None if weights.scale is None else weights.scale.to(device),
        "zero": None if weights.zero is None else weights.zero.to(device), "order": order.to(device),
        "block_expert": block_expert.to(device), "n": n, "k": k,
        "out": torch.empty(rows * top_k, n, dtype=torch.float16, device=device),
    }  # fmt: skip
    expected = moe_linear.reference(x, dense.to(device), chosen.to(device))
    parts = {name: values[name] for name in ("words", "scale", "zero") if values[name] is not None}
    busy = chosen.unique().numel()
    return Case(
        values, {"rows": rows, "n": n, "blocks": block_expert.numel()}, {"out": expected},
        {"out": (1e-3, 1e-4 * float(expected.abs().max()))}, operations=2.0 * rows * top_k * n * k,
        also_moved=sum(part.nbytes for part in parts.values()) * busy // num_experts, unread=frozenset(parts),
    )  # fmt: skip


def _random_experts(facts: Mapping[str, Any]) -> tuple[GpuExperts, torch.Tensor]:
    """Weights as the kernels read them, and as float32 `[E, N, K]`.

    Codes are one random matrix, its rows rolled by the expert's number: packing many takes longer than checking them.
    """
    n, k, bits, group, num_experts = (int(facts[name]) for name in ("n", "k", "bits", "group_size", "experts"))
    if bits == 16:
        floats = random_half(num_experts, n, k, device="cpu", spread=0.02)
        return pad_experts(floats), floats.float()
    packed, dense = random_matrix(n, k, bits, group, symmetric=bool(facts["symmetric"]), scale=str(facts["scale"]))
    rolled = [
        replace(
            packed,
            words=packed.words.roll(expert, 0),
            scale=packed.scale.roll(expert, 1),
            zero=None if packed.zero is None else packed.zero.roll(expert, 1),
        )
        for expert in range(num_experts)
    ]
    return stack_experts(rolled), torch.stack([dense.roll(expert, 0) for expert in range(num_experts)])


def weighted_sum(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    """What the experts of tokens made, with nothing written for padding."""
    width, top_k = int(facts["width"]), int(facts["top_k"])
    y, weights = random_half(rows * top_k, width, device=device), torch.rand(rows, top_k, device=device)
    chosen = torch.zeros(rows, top_k, dtype=torch.int32, device=device)
    if rows > 1:
        chosen[rows // 2] = -1
        y.view(rows, top_k, width)[rows // 2] = float("nan")
    values = {"y": y, "experts": chosen, "weights": weights, "out": y.new_empty(rows, width)}
    expected = moe_sum.reference(y, chosen, weights)
    return Case(values, {"rows": rows, "n": width}, {"out": expected}, {"out": (1e-3, 1e-5)})
