from __future__ import annotations

import pytest
import torch

from quantkit_kernels.ops import qk_norm_rope_kv_write
from tests.ops.native import GUARD, assert_rows, cache, int32, poisoned, run

DTYPES = [torch.int8, torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary", "norm", "tokens"),
    [(9, 3, 64, 64, False, 1), (4, 1, 80, 32, True, 21), (2, 2, 128, 128, True, 5), (3, 3, 20, 18, False, 130)],
)
def test_rope_and_cache_write_equal_their_reference(
    isa: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotary: int, norm: bool, tokens: int
) -> None:
    paged = cache(dtype, [tokens, 7], kv_heads, head_dim, block_size=16 if tokens % 2 else 8)
    positions = torch.randperm(tokens)
    slots = paged.slots(0, positions)
    slots[tokens // 2] = -1
    angle = torch.rand(tokens, rotary // 2) * 6
    cos, sin = angle.cos(), angle.sin()
    q_norm, k_norm = (torch.rand(head_dim), torch.rand(head_dim)) if norm else (None, None)
    qkv = torch.randn(tokens + GUARD, (heads + 2 * kv_heads) * head_dim)
    expected_k, expected_v = paged.k.clone(), paged.v.clone()
    sizes = (heads, kv_heads, head_dim)
    expected = qk_norm_rope_kv_write.reference(
        qkv[:tokens], positions, slots, cos, sin, q_norm, k_norm, 1e-6, 0.5,
        expected_k, expected_v, paged.k_scale, paged.v_scale, *sizes,
    )  # fmt: skip
    q = poisoned(tokens + GUARD, heads * head_dim)
    index = int32(torch.cat((positions, torch.zeros(GUARD))))
    mapping = int32(torch.cat((slots, torch.zeros(GUARD))))
    run(
        isa,
        lambda calls: calls.qk_norm_rope_kv_write(
            qkv, index, mapping, cos, sin, q_norm, k_norm, 1e-6, 0.5,
            paged.k, paged.v, paged.k_scale, paged.v_scale, q, *sizes,
        ),
        tokens,
    )  # fmt: skip
    assert_rows(q, expected)
    if dtype == torch.int8:
        # A value at the edge between two codes may round either way after a different last bit.
        assert (paged.k.int() - expected_k.int()).abs().max() <= 1
        assert (paged.k != expected_k).float().mean() < 1e-3
        assert torch.equal(paged.v, expected_v)
    else:
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
        torch.testing.assert_close(paged.k, expected_k, rtol=tolerance, atol=1e-5, equal_nan=True)
        assert torch.equal(paged.v.nan_to_num(7.0), expected_v.nan_to_num(7.0))


def test_int8_storage_rounds_half_to_even_and_saturates(isa: str) -> None:
    paged = cache(torch.int8, [1], 1, 16)
    paged.k_scale, paged.v_scale = torch.full((1, 16), 0.5), torch.full((1, 16), 0.5)
    v = torch.tensor([0.25, 0.75, 1.25, -0.25, -0.75, 63.5, 63.75, 64.0, 1e9, -1e9, -63.5, -64.0, 0.2, 0.3, -0.3, 0.0])
    qkv = torch.cat((torch.zeros(32), v)).unsqueeze(0)
    one = torch.ones(1, 8)
    slot = int32(paged.slots(0, torch.tensor([0])))
    run(
        isa,
        lambda calls: calls.qk_norm_rope_kv_write(
            qkv, int32([0]), slot, one, one * 0, None, None, 1e-6, 0.0,
            paged.k, paged.v, paged.k_scale, paged.v_scale, poisoned(1, 16), 1, 1, 16,
        ),
        1,
    )  # fmt: skip
    stored = paged.v[int(slot) // 16, 0, int(slot) % 16].tolist()
    assert stored == [0, 2, 2, 0, -2, 127, 127, 127, 127, -127, -127, -127, 0, 1, -1, 0]


@pytest.mark.parametrize(("position", "slot", "message"), [(9, 0, r"positions\[0\]"), (0, 64, r"slot_mapping\[0\]")])
def test_an_index_outside_its_table_is_refused(isa: str, position: int, slot: int, message: str) -> None:
    store = torch.zeros(4, 1, 16, 16)
    with pytest.raises(IndexError, match=message):
        run(
            isa,
            lambda calls: calls.qk_norm_rope_kv_write(
                torch.zeros(1, 48), int32([position]), int32([slot]), torch.ones(9, 8), torch.zeros(9, 8), None, None,
                1e-6, 0.0, store, store.clone(), None, None, poisoned(1, 16), 1, 1, 16,
            ),
            1,
        )  # fmt: skip
