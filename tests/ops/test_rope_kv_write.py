from __future__ import annotations

import pytest
import torch

from quantkit_kernels.cache_formats import CACHE_FORMATS
from quantkit_kernels.ops import kv_cells, qk_norm_rope_kv_write
from tests.ops.native import GUARD, assert_rows, cache, int32, poisoned, run

CASES = [
    (9, 3, 64, 64, False, 1),
    (4, 1, 80, 32, True, 21),
    (2, 2, 128, 128, True, 5),
    (3, 3, 20, 18, False, 130),
    (2, 1, 96, 96, False, 40),
    (2, 1, 72, 72, True, 17),
    (1, 1, 256, 256, True, 33),
]
"""Query heads, KV heads, channels, rotated ones, norm, tokens."""


@pytest.mark.parametrize(
    ("form", "heads", "kv_heads", "head_dim", "rotary", "norm", "tokens"),
    [(form, *case) for form in CACHE_FORMATS for case in CASES if form != "INT4" or case[2] % 8 == 0],
)
def test_rope_and_cache_write_equal_their_reference(
    isa: str, form: str, heads: int, kv_heads: int, head_dim: int, rotary: int, norm: bool, tokens: int
) -> None:
    paged = cache(form, [tokens, 7], kv_heads, head_dim, block_size=16 if tokens % 2 else 8)
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
        expected_k, expected_v, paged.k_scale, paged.v_scale, *sizes, form,
    )  # fmt: skip
    q = poisoned(tokens + GUARD, heads * head_dim)
    index = int32(torch.cat((positions, torch.zeros(GUARD))))
    mapping = int32(torch.cat((slots, torch.zeros(GUARD))))
    run(
        isa,
        lambda calls: calls.qk_norm_rope_kv_write(
            qkv, index, mapping, cos, sin, q_norm, k_norm, 1e-6, 0.5,
            paged.k, paged.v, paged.k_scale, paged.v_scale, q, *sizes, form,
        ),
        tokens,
    )  # fmt: skip
    assert_rows(q, expected)
    assert torch.equal(paged.v.view(torch.uint8), expected_v.view(torch.uint8))
    k, wanted = (kv_cells.load(cells, form, head_dim) for cells in (paged.k, expected_k))
    if form in ("INT8", "FP8", "INT4"):
        # A value at the edge between two codes may round either way after a different last bit.
        step = {"INT8": 1.0, "FP8": wanted.abs() / 8 + 2**-9, "INT4": 254 / 15 * 4}[form]
        assert not ((k - wanted).abs() > step).any()
        assert (paged.k != expected_k).float().mean() < 2e-3
    else:
        tolerance = {"FP32": 1e-5, "FP16": 2e-3, "BF16": 1.6e-2}[form]
        torch.testing.assert_close(k, wanted, rtol=tolerance, atol=1e-5, equal_nan=True)


def test_int8_storage_rounds_half_to_even_and_saturates(isa: str) -> None:
    paged = cache("INT8", [1], 1, 16)
    paged.k_scale, paged.v_scale = torch.full((1, 16), 0.5), torch.full((1, 16), 0.5)
    v = torch.tensor([0.25, 0.75, 1.25, -0.25, -0.75, 63.5, 63.75, 64.0, 1e9, -1e9, -63.5, -64.0, 0.2, 0.3, -0.3, 0.0])
    qkv = torch.cat((torch.zeros(32), v)).unsqueeze(0)
    one = torch.ones(1, 8)
    slot = int32(paged.slots(0, torch.tensor([0])))
    run(
        isa,
        lambda calls: calls.qk_norm_rope_kv_write(
            qkv, int32([0]), slot, one, one * 0, None, None, 1e-6, 0.0,
            paged.k, paged.v, paged.k_scale, paged.v_scale, poisoned(1, 16), 1, 1, 16, "INT8",
        ),
        1,
    )  # fmt: skip
    stored = paged.v[int(slot) // 16, 0, int(slot) % 16].tolist()
    assert stored == [0, 2, 2, 0, -2, 127, 127, 127, 127, -127, -127, -127, 0, 1, -1, 0]


def hard_values(head_dim: int, top: float) -> torch.Tensor:
    """Rows `[T, D]` in units of a scale: every magnitude, edges of codes, constants, both zeros, what isn't finite."""
    exponents = torch.randint(-40, 12, (300, head_dim))
    spread = torch.randn(300, head_dim) * 2.0**exponents
    sixteenths = torch.randint(-16 * 448, 16 * 448, (60, head_dim)) / 16 * 2.0 ** torch.randint(-14, 1, (60, head_dim))
    near = 100 + torch.rand(40, head_dim) * 10.0 ** -torch.randint(0, 6, (40, 1))
    same = torch.tensor([0.0, -0.0, 1.0, -3.3, 5e-8, -5e-8, 7e4, -7e4, top, -top]).unsqueeze(1).expand(10, head_dim)
    rows = torch.cat([spread, sixteenths, near, same, torch.randn(40, head_dim) * top / 3])
    for i, value in enumerate((float("inf"), float("-inf"), float("nan"), -0.0, 1e38)):
        rows[7 * i + 1, i] = value
    return rows


@pytest.mark.parametrize("form", ["FP8", "INT4"])
@pytest.mark.parametrize("head_dim", [64, 80, 72, 8, 256])
def test_every_value_is_stored_as_the_reference_stores_it_bit_for_bit(isa: str, form: str, head_dim: int) -> None:
    scale = torch.rand(1, head_dim) + 0.01
    values = hard_values(head_dim, CACHE_FORMATS[form].top or 0.0) * scale
    tokens = len(values)
    paged = cache(form, [tokens], 1, head_dim)
    slots = paged.slots(0, torch.arange(tokens))
    still = torch.ones(1, head_dim // 2)  # no rotation: keys are stored as they come
    run(
        isa,
        lambda calls: calls.qk_norm_rope_kv_write(
            torch.cat((values, values.roll(1, 0), values), 1), int32([0] * tokens), int32(slots), still, still * 0,
            None, None, 1e-6, 0.0, paged.k, paged.v, scale, scale, poisoned(tokens, head_dim), 1, 1, head_dim, form,
        ),
        tokens,
    )  # fmt: skip
    stored = [side[slots // 16, 0, slots % 16] for side in (paged.k, paged.v)]
    assert torch.equal(stored[1], kv_cells.store(values, scale[0], form))
    keys = values.roll(1, 0)
    finite = keys.isfinite().all(1)  # no rotation multiplies by zero, and may change a zero's sign
    got, wanted = (
        kv_cells.load(cells[finite], form, head_dim) for cells in (stored[0], kv_cells.store(keys, scale[0], form))
    )
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(("position", "slot", "message"), [(9, 0, r"positions\[0\]"), (0, 64, r"slot_mapping\[0\]")])
def test_an_index_outside_its_table_is_refused(isa: str, position: int, slot: int, message: str) -> None:
    store = torch.zeros(4, 1, 16, 16)
    with pytest.raises(IndexError, match=message):
        run(
            isa,
            lambda calls: calls.qk_norm_rope_kv_write(
                torch.zeros(1, 48), int32([position]), int32([slot]), torch.ones(9, 8), torch.zeros(9, 8), None, None,
                1e-6, 0.0, store, store.clone(), None, None, poisoned(1, 16), 1, 1, 16, "FP32",
            ),
            1,
        )  # fmt: skip
