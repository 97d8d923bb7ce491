from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit_kernels.ops import paged_attention as op
from quantkit_kernels.triton import paged_attention as kernel
from tests.ops.native import GUARD, Cache, cache, int32, poisoned

FORMATS = ["INT8", "FP16"]


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
        q, paged.k, paged.v, paged.k_scale, paged.v_scale, paged.table, int32(lengths), *sizes, sizes[2] ** -0.5,
        window, softcap, out, parts, programs,
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
        ((1, 1, 20), [33], 16),
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
        torch.testing.assert_close(
            out.float(), expected(q, paged, lengths, sizes, window, softcap), rtol=2e-3, atol=3e-3
        )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("window", [None, 700])
def test_a_long_sequence_split_many_times_equals_its_reference(form: str, window: int | None) -> None:
    sizes, lengths = (3, 1, 64), [4097]
    paged = cache(form, lengths, 1, 64)
    q = torch.randn(1, 3 * 64).half()
    out = attend(q, paged, lengths, sizes, window)
    torch.testing.assert_close(out.float(), expected(q, paged, lengths, sizes, window), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("programs", [1, 3])
def test_the_number_of_programs_does_not_change_the_bits(programs: int) -> None:
    sizes, lengths = (2, 1, 64), [1000]
    paged = cache("INT8", lengths, 1, 64)
    q = torch.randn(1, 2 * 64).half()
    wide = attend(q, paged, lengths, sizes, programs=kernel.MOST_SPLITS)
    assert torch.equal(attend(q, paged, lengths, sizes, programs=programs), wide)


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch() -> None:
    sizes, lengths = (4, 2, 64), [270, 1]
    paged = cache("INT8", lengths, 2, 64)
    q = torch.randn(2, 4 * 64).half()
    batch = attend(q, paged, lengths, sizes)
    for b, length in enumerate(lengths):
        one = replace(paged, table=paged.table[b : b + 1].contiguous())
        assert torch.equal(attend(q[b : b + 1].contiguous(), one, [length], sizes)[0], batch[b])


@pytest.mark.parametrize("window", [None, 8])
def test_cells_nobody_may_see_never_reach_the_result(window: int | None) -> None:
    sizes, length = (2, 1, 64), 70
    paged = cache("FP16", [length], 1, 64)
    q = torch.randn(1, 128).half()
    clean = attend(q, paged, [length], sizes, window)
    hidden = paged.slots(0, torch.arange(length if window is None else length - window))
    if window is not None:
        paged.k.view(-1, 64)[hidden] = float("nan")
        paged.v.view(-1, 64)[hidden] = float("inf")
        paged.table[0, : (length - window) // 16] = -1
    assert clean.isfinite().all()
    assert torch.equal(attend(q, paged, [length], sizes, window), clean)


def test_padding_rows_get_zeros() -> None:
    paged = cache("INT8", [20, 0], 1, 64)
    out = attend(torch.randn(2, 64).half(), paged, [20, 0], (1, 1, 64))
    assert torch.equal(out[1], torch.zeros(64).half())
    assert out[0].abs().min() > 0


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
