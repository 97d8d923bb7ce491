from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit_kernels.ops import kv_cells
from quantkit_kernels.ops import paged_attention as op
from quantkit_kernels.triton import paged_attention as kernel
from tests.ops.native import GUARD, Cache, cache, int32, poisoned

FORMATS = ["INT8", "FP8", "INT4", "FP16"]  # the interpreter multiplies no matrices of BF16
CLOSE = dict.fromkeys(FORMATS, 3e-3) | {"INT4": 4e-3}
"""Of 1, and two thirds of it of an output: queries with their scales folded in, weights and, in INT4, keys and values
are rounded to 11 bits."""
HEAD_DIMS = (64, 80, 96, 128, 256)


def assert_close(out: Tensor, wanted: Tensor, form: str) -> None:
    torch.testing.assert_close(out.float(), wanted, rtol=CLOSE[form] * 2 / 3, atol=CLOSE[form])


def one_of(values: Sequence[int]) -> int:
    return values[int(torch.randint(len(values), ()))]


def attend(
    q: Tensor, paged: Cache, lengths: list[int], sizes: tuple[int, int, int],
    window: int | None = None, softcap: float | None = None, programs: int = 2,
) -> Tensor:  # fmt: skip
    """What the kernels make of poisoned outputs and a poisoned workspace."""
    sequences = len(lengths)
    buffer = poisoned(sequences + GUARD, q.shape[1]).to(q.dtype)
    parts = tuple(part.fill_(float("nan")) for part in kernel.workspace(sequences, sizes[0], sizes[2], q.device))
    out = buffer[:sequences]
    kernel.paged_attention(
        q, paged.k, paged.v, paged.k_scale, paged.v_scale, paged.table, int32(lengths), *sizes, paged.form,
        sizes[2] ** -0.5, window, softcap, out, parts, programs,
    )  # fmt: skip
    assert buffer[sequences:].isnan().all()
    return out


def expected(
    q: Tensor, paged: Cache, lengths: list[int], sizes: tuple[int, int, int],
    window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    return op.reference(
        q.float(), paged.k, paged.v, paged.k_scale, paged.v_scale, paged.table, int32(list(range(len(lengths) + 1))),
        int32(lengths), *sizes, paged.form, sizes[2] ** -0.5, window, softcap,
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("sizes", "lengths", "block_size"),
    [
        ((9, 3, 64), [1, 131], 16),
        ((4, 2, 80), [300], 8),
        ((17, 1, 96), [257], 16),
        ((2, 2, 128), [129], 32),
        ((2, 1, 256), [70], 16),
        ((1, 1, 24), [33], 16),
    ],
)
def test_decode_equals_its_reference(
    form: str, sizes: tuple[int, int, int], lengths: list[int], block_size: int
) -> None:
    heads, kv_heads, head_dim = sizes
    paged = cache(form, lengths, kv_heads, head_dim, block_size)
    q = (torch.randn(len(lengths), heads * head_dim) * 2).half()
    for window, softcap in ((None, None), (19, 5.0)):
        out = attend(q, paged, lengths, sizes, window, softcap)
        assert_close(out, expected(q, paged, lengths, sizes, window, softcap), form)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_equals_its_reference_over_random_shapes(form: str, head_dim: int) -> None:
    kv_heads = one_of((1, 2, 3))
    sizes = (kv_heads * one_of((1, 3, 4, 7)), kv_heads, head_dim)
    lengths = [one_of(range(1, 90)), 0, one_of(range(1, 90))]
    paged = cache(form, lengths, kv_heads, head_dim, one_of((8, 16, 32)))
    q = torch.randn(3, sizes[0] * head_dim).half()
    window, softcap = one_of((0, 5, 40)) or None, one_of((0, 3)) or None
    out = attend(q, paged, lengths, sizes, window, softcap)
    live = [0, 2]
    some = replace(paged, table=paged.table[live])
    assert_close(out[live], expected(q[live], some, [lengths[b] for b in live], sizes, window, softcap), form)
    assert torch.equal(out[1], torch.zeros_like(out[1]))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("length", "window"), [(1, None), (17, None), (1000, None), (4097, None), (4097, 700)])
def test_sequences_of_any_length_equal_their_reference(form: str, length: int, window: int | None) -> None:
    sizes = (3, 1, 64)
    paged = cache(form, [length], 1, 64)
    q = torch.randn(1, 3 * 64).half()
    out = attend(q, paged, [length], sizes, window)
    assert_close(out, expected(q, paged, [length], sizes, window), form)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("programs", [1, 3])
def test_the_number_of_programs_does_not_change_the_bits(form: str, programs: int) -> None:
    sizes, lengths = (2, 1, 64), [1000]
    paged = cache(form, lengths, 1, 64)
    q = torch.randn(1, 2 * 64).half()
    wide = attend(q, paged, lengths, sizes, programs=kernel.MOST_SPLITS)
    assert torch.equal(attend(q, paged, lengths, sizes, programs=programs), wide)


@pytest.mark.parametrize("form", FORMATS)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(form: str) -> None:
    sizes, lengths = (4, 2, 64), [270, 1]
    paged = cache(form, lengths, 2, 64)
    q = torch.randn(2, 4 * 64).half()
    batch = attend(q, paged, lengths, sizes)
    for b, length in enumerate(lengths):
        one = replace(paged, table=paged.table[b : b + 1].contiguous())
        assert torch.equal(attend(q[b : b + 1].contiguous(), one, [length], sizes)[0], batch[b])


@pytest.mark.parametrize("form", ["FP16", "INT4"])
@pytest.mark.parametrize("window", [None, 8])
def test_cells_nobody_may_see_never_reach_the_result(form: str, window: int | None) -> None:
    sizes, length = (2, 1, 64), 70
    paged = cache(form, [length], 1, 64)
    q = torch.randn(1, 128).half()
    clean = attend(q, paged, [length], sizes, window)
    if window is not None:
        hidden = paged.slots(0, torch.arange(length - window))
        spoiled = kv_cells.store(torch.full((1, 64), float("nan")), paged.k_scale, form)
        for side in (paged.k, paged.v):
            side.view(-1, side.shape[-1])[hidden] = spoiled
        paged.table[0, : (length - window) // 16] = -1
    assert clean.isfinite().all()
    assert torch.equal(attend(q, paged, [length], sizes, window), clean)


def test_an_int4_group_that_holds_nan_spoils_what_sees_it() -> None:
    paged = cache("INT4", [20], 1, 64)
    slot = int(paged.slots(0, torch.tensor([7])))
    paged.v[slot // 16, 0, slot % 16] = kv_cells.store(torch.full((1, 64), float("nan")), paged.v_scale, "INT4")
    assert attend(torch.randn(1, 64).half(), paged, [20], (1, 1, 64)).isnan().all()


def test_no_sequences_launch_nothing() -> None:
    paged = cache("INT8", [5], 1, 64)
    paged.table = paged.table[:0]
    assert attend(torch.empty(0, 64).half(), paged, [], (1, 1, 64)).shape == (0, 64)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 2, 64), "3 query heads do not share 2"),
        ((1, 1, 512), "wider"),
        ((1, 1, 66), "words"),
    ],
)
def test_sizes_the_kernel_does_not_cover_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    paged = cache("INT8", [5], sizes[1], sizes[2])
    with pytest.raises(ValueError, match=message):
        attend(torch.zeros(1, sizes[0] * sizes[2]).half(), paged, [5], sizes)


def test_an_int4_cache_of_heads_it_cannot_hold_is_refused() -> None:
    paged = replace(cache("INT8", [5], 1, 20), form="INT4")
    with pytest.raises(ValueError, match="heads of 20 channels: an INT4 cache is read in words of 8 codes"):
        attend(torch.zeros(1, 20).half(), paged, [5], (1, 1, 20))


@pytest.mark.parametrize(("sm", "reason"), [(80, "a cache in FP8 has kernels from sm_89 on"), (86, "INT8"), (89, None)])
def test_an_fp8_cache_is_refused_before_its_machines(sm: int, reason: str | None) -> None:
    facts = {"phase": "decode", "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "cache": "FP8", "sm": sm}
    for spec in kernel.SPECS:
        said = spec.refusal(facts)
        assert said is None if reason is None else reason in str(said)
