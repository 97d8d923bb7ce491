from __future__ import annotations

import pytest
import torch

from quantkit_kernels.ops import qk_norm_rope_kv_write as op
from quantkit_kernels.triton.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from tests.ops.native import GUARD, cache, int32, poisoned


@pytest.mark.parametrize("form", ["INT8", "FP16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary", "norm", "tokens"),
    [
        (9, 3, 64, 64, False, 1),
        (4, 1, 80, 32, True, 21),
        (3, 3, 96, 96, True, 2),
        (20, 10, 128, 128, True, 5),
        (4, 2, 256, 64, False, 3),
        (2, 1, 20, 18, False, 33),
    ],
)
def test_rope_and_cache_write_equal_their_reference(
    form: str, heads: int, kv_heads: int, head_dim: int, rotary: int, norm: bool, tokens: int
) -> None:
    paged = cache(form, [tokens, 7], kv_heads, head_dim, block_size=16 if tokens % 2 else 8)
    positions = int32(torch.randperm(tokens))
    slots = int32(paged.slots(0, positions))
    slots[tokens // 2] = -1
    angle = torch.rand(tokens, rotary // 2) * 6
    cos, sin = angle.cos(), angle.sin()
    q_norm, k_norm = (torch.rand(head_dim), torch.rand(head_dim)) if norm else (None, None)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).half()
    expected_k, expected_v = paged.k.clone(), paged.v.clone()
    sizes = (heads, kv_heads, head_dim)
    expected = op.reference(
        qkv.float(), positions, slots, cos, sin, q_norm, k_norm, 1e-6, 0.5,
        expected_k, expected_v, paged.k_scale, paged.v_scale, *sizes, form,
    )  # fmt: skip
    q = poisoned(tokens + GUARD, heads * head_dim).half()
    qk_norm_rope_kv_write(
        qkv, positions, slots, cos, sin, q_norm, k_norm, 1e-6, 0.5,
        paged.k, paged.v, paged.k_scale, paged.v_scale, *sizes, q[:tokens],
    )  # fmt: skip
    torch.testing.assert_close(q[:tokens].float(), expected, rtol=1e-3, atol=1e-5)
    assert q[tokens:].isnan().all()
    if form == "INT8":
        # A key at the edge between two codes may round either way after a different last bit.
        assert (paged.k.int() - expected_k.int()).abs().max() <= 1
        assert (paged.k != expected_k).float().mean() < 1e-3
        assert torch.equal(paged.v, expected_v)
    else:
        torch.testing.assert_close(paged.k, expected_k, rtol=2e-3, atol=1e-5, equal_nan=True)
        assert torch.equal(paged.v.nan_to_num(7.0), expected_v.nan_to_num(7.0))


def test_int8_storage_rounds_half_to_even_and_saturates() -> None:
    paged = cache("INT8", [1], 1, 16)
    scale = torch.full((1, 16), 0.5)
    v = torch.tensor([0.25, 0.75, 1.25, -0.25, -0.75, 63.5, 63.75, 64.0, 6e4, -6e4, -63.5, -64.0, 0.2, 0.3, -0.3, 0.0])
    qkv = torch.cat((torch.zeros(32), v)).half().unsqueeze(0)
    slot = int32(paged.slots(0, torch.tensor([0])))
    one = torch.ones(1, 8)
    qk_norm_rope_kv_write(
        qkv, int32([0]), slot, one, one * 0, None, None, 1e-6, 0.0, paged.k, paged.v, scale, scale, 1, 1, 16
    )
    stored = paged.v[int(slot) // 16, 0, int(slot) % 16].tolist()
    assert stored == [0, 2, 2, 0, -2, 127, 127, 127, 127, -127, -127, -127, 0, 1, -1, 0]


def test_no_tokens_leave_the_cache_alone() -> None:
    paged = cache("INT8", [3], 1, 64)
    before = paged.k.clone()
    table = torch.ones(4, 32)
    q = qk_norm_rope_kv_write(
        torch.empty(0, 3 * 64), int32([]), int32([]), table, table, None, None, 1e-6, 0.0,
        paged.k, paged.v, paged.k_scale, paged.v_scale, 1, 1, 64,
    )  # fmt: skip
    assert q.shape == (0, 64)
    assert torch.equal(paged.k, before)


def test_an_int8_cache_without_scales_is_refused() -> None:
    paged = cache("INT8", [3], 1, 64)
    table = torch.ones(4, 32)
    with pytest.raises(ValueError, match="needs k_scale"):
        qk_norm_rope_kv_write(
            torch.zeros(1, 3 * 64), int32([0]), int32([0]), table, table, None, None, 1e-6, 0.0,
            paged.k, paged.v, None, None, 1, 1, 64,
        )  # fmt: skip
