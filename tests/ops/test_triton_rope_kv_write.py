from __future__ import annotations

import pytest
import torch

from quantkit_kernels.ops import kv_cells
from quantkit_kernels.ops import qk_norm_rope_kv_write as op
from quantkit_kernels.triton.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from tests.ops.native import GUARD, cache, int32, poisoned

FORMATS = ["INT8", "FP8", "INT4", "FP16"]  # the interpreter does not round to BF16


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary", "norm", "tokens"),
    [
        (9, 3, 64, 64, False, 1),
        (4, 1, 80, 32, True, 21),
        (3, 3, 96, 96, True, 2),
        (20, 10, 128, 128, True, 5),
        (4, 2, 256, 64, False, 3),
        (2, 1, 24, 18, False, 33),
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
        paged.k, paged.v, paged.k_scale, paged.v_scale, *sizes, form, q[:tokens],
    )  # fmt: skip
    torch.testing.assert_close(q[:tokens].float(), expected, rtol=1e-3, atol=1e-5)
    assert q[tokens:].isnan().all()
    assert torch.equal(paged.v.view(torch.uint8), expected_v.view(torch.uint8))
    k, wanted = (kv_cells.load(cells, form, head_dim) for cells in (paged.k, expected_k))
    if form == "FP16":
        torch.testing.assert_close(k, wanted, rtol=2e-3, atol=1e-5, equal_nan=True)
        return
    # A key at the edge between two codes may round either way after a different last bit.
    step = {"INT8": 1.0, "FP8": wanted.abs() / 8 + 2**-9, "INT4": 254 / 15 * 4}[form]
    assert not ((k - wanted).abs() > step).any()
    assert (paged.k.view(torch.uint8) != expected_k.view(torch.uint8)).float().mean() < 1e-3


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_values_of_any_size_leave_the_bytes_that_the_cpu_leaves(form: str, head_dim: int) -> None:
    tokens, heads = int(torch.randint(1, 20, ())), int(torch.randint(1, 12, ()))
    paged = cache(form, [tokens], heads, head_dim)
    slots = int32(paged.slots(0, torch.arange(tokens)))
    slots[torch.rand(tokens) < 0.2] = -1
    sizes = torch.exp2(torch.randint(-20, 12, (tokens, heads, 1)).float())
    v = torch.randn(tokens, heads, head_dim) * sizes
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 6e4, float("nan")])
    if form in ("FP8", "INT4", "FP16"):
        v = torch.where(torch.rand_like(v) < 0.01, special[torch.randint(6, v.shape)], v)
    v[0, 0] = 0.0
    v[-1, -1] = v[-1, -1, 0]  # one value a group
    halves = torch.cat((torch.zeros(tokens, 2 * heads, head_dim), v), dim=1).half().view(tokens, -1)
    expected_k, expected_v = paged.k.clone(), paged.v.clone()
    one = torch.ones(1, head_dim // 2)
    given = (halves, int32([0] * tokens), slots, one, one * 0, None, None, 1e-6, 0.0)
    scales = (paged.k_scale, paged.v_scale, heads, heads, head_dim, form)
    op.reference(halves.float(), *given[1:], expected_k, expected_v, *scales)
    qk_norm_rope_kv_write(*given, paged.k, paged.v, *scales)
    assert torch.equal(paged.k.view(torch.uint8), expected_k.view(torch.uint8))
    assert torch.equal(paged.v.view(torch.uint8), expected_v.view(torch.uint8))


@pytest.mark.parametrize("base", [0.0, 2.0**-9, 2.0**-6, 1.0, 448.0, -448.0, -(2.0**-6)])
def test_fp8_storage_rounds_half_to_even_and_saturates(base: float) -> None:
    """Neighbours of every kind of code, and the middles between them."""
    paged = cache("FP8", [1], 1, 64)
    scale = torch.ones(1, 64)
    v = (base + torch.arange(-32, 32) * max(abs(base), 2.0**-6) / 32).half()
    one = torch.ones(1, 32)
    slot = int32(paged.slots(0, torch.tensor([0])))
    qk_norm_rope_kv_write(
        torch.cat((torch.zeros(128), v)).half().unsqueeze(0), int32([0]), slot, one, one * 0, None, None, 1e-6, 0.0,
        paged.k, paged.v, scale, scale, 1, 1, 64, "FP8",
    )  # fmt: skip
    stored = paged.v[int(slot) // 16, 0, int(slot) % 16]
    assert torch.equal(stored, v.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def test_int8_storage_rounds_half_to_even_and_saturates() -> None:
    paged = cache("INT8", [1], 1, 16)
    scale = torch.full((1, 16), 0.5)
    v = torch.tensor([0.25, 0.75, 1.25, -0.25, -0.75, 63.5, 63.75, 64.0, 6e4, -6e4, -63.5, -64.0, 0.2, 0.3, -0.3, 0.0])
    qkv = torch.cat((torch.zeros(32), v)).half().unsqueeze(0)
    slot = int32(paged.slots(0, torch.tensor([0])))
    one = torch.ones(1, 8)
    qk_norm_rope_kv_write(
        qkv, int32([0]), slot, one, one * 0, None, None, 1e-6, 0.0, paged.k, paged.v, scale, scale, 1, 1, 16, "INT8"
    )
    stored = paged.v[int(slot) // 16, 0, int(slot) % 16].tolist()
    assert stored == [0, 2, 2, 0, -2, 127, 127, 127, 127, -127, -127, -127, 0, 1, -1, 0]


def test_no_tokens_leave_the_cache_alone() -> None:
    paged = cache("INT8", [3], 1, 64)
    before = paged.k.clone()
    table = torch.ones(4, 32)
    q = qk_norm_rope_kv_write(
        torch.empty(0, 3 * 64), int32([]), int32([]), table, table, None, None, 1e-6, 0.0,
        paged.k, paged.v, paged.k_scale, paged.v_scale, 1, 1, 64, "INT8",
    )  # fmt: skip
    assert q.shape == (0, 64)
    assert torch.equal(paged.k, before)


@pytest.mark.parametrize("form", ["INT8", "FP8", "INT4"])
def test_a_quantized_cache_without_scales_is_refused(form: str) -> None:
    paged = cache(form, [3], 1, 64)
    table = torch.ones(4, 32)
    with pytest.raises(ValueError, match="needs k_scale"):
        qk_norm_rope_kv_write(
            torch.zeros(1, 3 * 64), int32([0]), int32([0]), table, table, None, None, 1e-6, 0.0,
            paged.k, paged.v, None, None, 1, 1, 64, form,
        )  # fmt: skip
