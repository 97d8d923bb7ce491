from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit_kernels import cpu
from quantkit_kernels.cache_formats import CACHE_FORMATS
from quantkit_kernels.ops import kv_cells, paged_attention
from tests.ops.native import GUARD, Cache, TensorCalls, assert_rows, cache, int32, poisoned, run

CASES = [
    ((9, 3, 64), [1, 1, 1], [1, 64, 131], 16),
    ((4, 4, 80), [7, 1, 33], [7, 200, 150], 16),
    ((8, 1, 72), [65], [65], 8),
    ((2, 1, 128), [3, 0, 90], [67, 40, 130], 32),
    ((6, 2, 20), [129, 1], [129, 17], 16),
    ((6, 2, 64), [1, 1], [1100, 513], 16),
    ((4, 2, 40), [30, 1], [530, 1024], 8),
    ((3, 1, 96), [17, 1], [17, 1000], 16),
    ((2, 1, 256), [1], [4097], 16),
]
"""(query heads, KV heads, channels), new tokens, lengths, block size."""


def attend(
    isa: str, q: Tensor, paged: Cache, fresh: list[int], lengths: list[int], sizes: tuple[int, int, int],
    window: int | None = None, softcap: float | None = None, threads: int = 2,
) -> Tensor:  # fmt: skip
    out = poisoned(q.shape[0] + GUARD, q.shape[1])
    start = int32([0, *torch.tensor(fresh).cumsum(0).tolist()])
    run(
        isa,
        lambda calls: calls.paged_attention(
            q, paged.k, paged.v, paged.k_scale, paged.v_scale, paged.table, start, int32(lengths), out, *sizes,
            paged.form, sizes[2] ** -0.5, window, softcap,
        ),
        q.shape[0], len(fresh), threads=threads,
    )  # fmt: skip
    assert out[q.shape[0] :].isnan().all()
    return out[: q.shape[0]]


@pytest.mark.parametrize(
    ("form", "sizes", "fresh", "lengths", "block_size"),
    [(form, *case) for form in CACHE_FORMATS for case in CASES if form != "INT4" or case[0][2] % 8 == 0],
)
def test_attention_equals_its_reference(
    isa: str, form: str, sizes: tuple[int, int, int], fresh: list[int], lengths: list[int], block_size: int
) -> None:
    heads, kv_heads, head_dim = sizes
    paged = cache(form, lengths, kv_heads, head_dim, block_size)
    q = torch.randn(sum(fresh), heads * head_dim) * 2
    start = int32([0, *torch.tensor(fresh).cumsum(0).tolist()])
    for window, softcap in ((None, None), (19, None), (None, 5.0)):
        expected = paged_attention.reference(
            q, paged.k, paged.v, paged.k_scale, paged.v_scale, paged.table,
            start, int32(lengths), *sizes, form, head_dim**-0.5, window, softcap,
        )  # fmt: skip
        out = attend(isa, q, paged, fresh, lengths, sizes, window, softcap)
        assert_rows(out, expected, rtol=1e-4, atol=2e-5 + rounding(paged))


def rounding(paged: Cache) -> float:
    """A weight between two codes may round either way by the last bit of its exponential; so may one of q."""
    if paged.form != "INT8" or paged.v_scale is None:
        return 0.0
    return 2 / paged_attention.CODE_TOP * float((paged.v.float().abs() * paged.v_scale.unsqueeze(1)).max())


@pytest.mark.parametrize("sizes", [(9, 3, 64), (4, 4, 80), (4, 2, 20), (2, 1, 256)])
def test_every_instruction_set_gives_the_same_bits_over_an_int8_cache(sizes: tuple[int, int, int]) -> None:
    fused = [isa for isa in cpu.supported_isas() if isa != "portable"]  # which rounds a·b + c twice
    fresh, lengths = [1, 40, 1, 65], [1, 40, 300, 130]
    paged = cache("INT8", lengths, sizes[1], sizes[2])
    q = torch.randn(sum(fresh), sizes[0] * sizes[2])
    for window in (None, 37):
        made = [attend(isa, q, paged, fresh, lengths, sizes, window) for isa in fused]
        assert all(torch.equal(made[0], other) for other in made[1:]), fused


@pytest.mark.parametrize("form", CACHE_FORMATS)
@pytest.mark.parametrize("window", [None, 37])
def test_decode_chunks_and_whole_prefill_give_the_same_bits(isa: str, form: str, window: int | None) -> None:
    sizes, length = (6, 2, 64), 150
    paged = cache(form, [length], 2, 64)
    q = torch.randn(length, 6 * 64)
    whole = attend(isa, q, paged, [length], [length], sizes, window)
    assert torch.equal(whole, attend(isa, q, paged, [length], [length], sizes, window, threads=1))
    for first, last in ((0, 70), (70, 71), (71, 150)):
        chunk = attend(isa, q[first:last].contiguous(), paged, [last - first], [last], sizes, window)
        assert torch.equal(chunk, whole[first:last])
    for position in (0, 1, 15, 63, 64, 65, 127, 128, 149):
        alone = attend(isa, q[position : position + 1].contiguous(), paged, [1], [position + 1], sizes, window)
        assert torch.equal(alone[0], whole[position])


@pytest.mark.parametrize("form", ["INT8", "FP8", "INT4"])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(isa: str, form: str) -> None:
    sizes, lengths, fresh = (4, 2, 64), [90, 33, 64, 1], [1, 33, 12, 1]
    paged = cache(form, lengths, 2, 64)
    q = torch.randn(sum(fresh), 4 * 64)
    batch = attend(isa, q, paged, fresh, lengths, sizes)
    start = 0
    for b, count in enumerate(fresh):
        one = replace(paged, table=paged.table[b : b + 1].contiguous())
        alone = attend(isa, q[start : start + count].contiguous(), one, [count], [lengths[b]], sizes, threads=1)
        assert torch.equal(alone, batch[start : start + count])
        start += count


@pytest.mark.parametrize("form", ["INT8", "FP8", "INT4", "FP16"])
@pytest.mark.parametrize("window", [None, 700])
def test_a_long_context_has_the_same_bits_however_it_is_shared(isa: str, form: str, window: int | None) -> None:
    """Cut by position between threads, kept whole by one, or as the last rows of a prompt's chunk."""
    sizes, lengths = (6, 2, 64), [1300, 511, 513, 1]
    paged = cache(form, lengths, 2, 64)
    q = torch.randn(4, 6 * 64)
    one = attend(isa, q, paged, [1] * 4, lengths, sizes, window, threads=1)
    for threads in (2, 5):
        assert torch.equal(attend(isa, q, paged, [1] * 4, lengths, sizes, window, threads=threads), one)
    chunk = torch.cat([torch.randn(39, 6 * 64), q[:1]])
    only = replace(paged, table=paged.table[:1])
    assert torch.equal(attend(isa, chunk, only, [40], lengths[:1], sizes, window)[-1:], one[:1])
    alone = attend(isa, q[:1], only, [1], lengths[:1], sizes, window)
    assert torch.equal(alone, one[:1])


def test_a_query_that_is_not_finite_spoils_its_own_row_alone(isa: str) -> None:
    paged = cache("INT8", [1200], 1, 64)
    q = torch.randn(1, 3 * 64)
    sound = attend(isa, q, paged, [1], [1200], (3, 1, 64))
    q[0, 70] = float("inf")
    out = attend(isa, q, paged, [1], [1200], (3, 1, 64))
    assert out[0, 64:128].isnan().all()
    assert torch.equal(out[0, :64], sound[0, :64])
    assert torch.equal(out[0, 128:], sound[0, 128:])


@pytest.mark.parametrize("form", ["FP8", "INT4", "FP32"])
@pytest.mark.parametrize("window", [None, 8])
def test_cells_nobody_may_see_never_reach_the_result(isa: str, form: str, window: int | None) -> None:
    sizes, length = (2, 1, 64), 70
    paged = cache(form, [length], 1, 64)
    q = torch.randn(1, 128)
    clean = attend(isa, q, paged, [1], [length], sizes, window)
    hidden = paged.slots(0, torch.arange(length if window is None else length - window))
    if window is not None:
        unseen = torch.tensor([float("nan"), float("inf")]).unsqueeze(1).expand(2, 64)
        keys, values = kv_cells.store(unseen, torch.ones(64), form)
        paged.k.flatten(0, 2)[hidden] = keys
        paged.v.flatten(0, 2)[hidden] = values
        paged.table[0, : (length - window) // 16] = -1
    spoiled = attend(isa, q, paged, [1], [length], sizes, window)
    assert clean.isfinite().all()
    assert torch.equal(clean, spoiled)


def test_no_sequences_write_nothing(isa: str) -> None:
    paged = cache("INT8", [5], 1, 64)
    out = attend(isa, torch.randn(0, 64), paged, [], [], (1, 1, 64))
    assert out.shape[0] == 0


@pytest.mark.parametrize(("length", "block", "message"), [(17, 9, "block_table row"), (200, 0, "columns")])
def test_a_block_outside_the_cache_is_refused(isa: str, length: int, block: int, message: str) -> None:
    store = torch.zeros(4, 1, 16, 64)
    calls = TensorCalls(threads=1, isa=isa)
    calls.paged_attention(
        torch.zeros(1, 64), store, store.clone(), None, None, int32([[1, block, 2]]), int32([0, 1]), int32([length]),
        poisoned(1, 64), 1, 1, 64, "FP32", 1.0,
    )  # fmt: skip
    with pytest.raises(IndexError, match=message):
        calls.run(1, 1, 0)


@pytest.mark.parametrize("head_dim", [1024, 1025])
def test_heads_too_wide_for_integer_sums_are_refused_and_the_widest_are_right(isa: str, head_dim: int) -> None:
    sizes = (1, 1, head_dim)
    paged = cache("INT8", [70], 1, head_dim)
    paged.k.fill_(-128)
    q = torch.full((70, head_dim), -3.0)
    if head_dim > 1024:
        with pytest.raises(ValueError, match="at most 1024 channels"):
            attend(isa, q, paged, [70], [70], sizes)
        return
    wanted = paged_attention.reference(
        q,
        paged.k,
        paged.v,
        paged.k_scale,
        paged.v_scale,
        paged.table,
        int32([0, 70]),
        int32([70]),
        *sizes,
        "INT8",
        head_dim**-0.5,
    )
    torch.testing.assert_close(attend(isa, q, paged, [70], [70], sizes), wanted, rtol=1e-4, atol=2e-5 + rounding(paged))


def test_a_length_near_the_end_of_32_bits_is_refused(isa: str) -> None:
    paged = cache("INT8", [20], 1, 16)
    with pytest.raises(IndexError, match="needs more blocks"):
        attend(isa, torch.randn(1, 16), paged, [1], [2**31 - 5], (1, 1, 16))


def test_scores_beyond_float_make_their_own_row_not_a_number(isa: str) -> None:
    paged = cache("INT8", [90, 90], 1, 16)
    q = torch.randn(2, 16)
    alone = attend(
        isa,
        q[1:].contiguous(),
        replace(paged, table=paged.table[1:].contiguous()),
        [1],
        [90],
        (1, 1, 16),
    )
    q[0] = 3e38
    both = attend(isa, q, paged, [1, 1], [90, 90], (1, 1, 16))
    assert both[0].isnan().all()
    assert torch.equal(both[1], alone[0])


@pytest.mark.parametrize("form", ["INT8", "FP16"])
def test_a_row_whose_scores_all_overflow_downwards_is_not_a_number(isa: str, form: str) -> None:
    paged = cache(form, [90], 1, 16)
    paged.k.fill_(100 if form == "INT8" else 3.0)
    if paged.k_scale is not None:
        paged.k_scale.fill_(1.0)
    assert attend(isa, torch.full((1, 16), -3e38), paged, [1], [90], (1, 1, 16)).isnan().all()


def test_a_value_that_is_not_finite_does_not_reach_rows_before_it(isa: str) -> None:
    """Rows of a chunk share its tile: those before it have weight zero there, and zero times it is no number."""
    paged = cache("FP16", [90], 1, 16)
    paged.v[paged.table[0, 88 // paged.v.shape[2]], 0, 88 % paged.v.shape[2]] = float("inf")
    q = torch.randn(5, 16)
    rows = attend(isa, q, paged, [5], [90], (1, 1, 16))  # positions 85 to 89
    alone = [attend(isa, q[i : i + 1].contiguous(), paged, [1], [86 + i], (1, 1, 16))[0] for i in range(5)]
    assert all(torch.equal(row, one) for row, one in zip(rows[:3], alone, strict=False))
    assert rows[:3].isfinite().all()
    assert not rows[3:].isfinite().any()


@pytest.mark.parametrize("form", ["FP8", "INT4"])
def test_a_value_in_bytes_that_is_not_a_number_reaches_the_rows_that_see_it_alone(isa: str, form: str) -> None:
    paged = cache(form, [90], 1, 32)
    spoiled = kv_cells.store(torch.full((1, 32), float("nan")), torch.ones(1, 32), form)
    paged.v[paged.table[0, 88 // 16], :, 88 % 16] = spoiled
    rows = attend(isa, torch.randn(5, 32), paged, [5], [90], (1, 1, 32))  # positions 85 to 89
    assert rows[:3].isfinite().all()
    assert rows[3:].isnan().all()


def test_a_cache_in_int4_of_heads_that_no_group_divides_is_refused(isa: str) -> None:
    paged = cache("FP32", [5], 1, 20)
    with pytest.raises(ValueError, match="an INT4 cache holds heads of a multiple of 8 channels, not 20"):
        attend(isa, torch.randn(1, 20), replace(paged, form="INT4"), [1], [5], (1, 1, 20))


@pytest.mark.parametrize(("form", "message"), [("FP8", "needs k_scale"), ("FP7", "unknown KV cache format 'FP7'")])
def test_a_cache_that_cannot_be_read_is_refused(isa: str, form: str, message: str) -> None:
    paged = replace(cache("FP8", [5], 1, 16), form=form, k_scale=None)
    with pytest.raises(ValueError, match=message):
        attend(isa, torch.randn(1, 16), paged, [1], [5], (1, 1, 16))
