from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from quantkit_kernels.ops import paged_attention as op
from quantkit_kernels.triton.paged_prefill import paged_prefill
from tests.ops.native import GUARD, Cache, cache, int32, poisoned

FORMATS = ["INT8", "FP8", "INT4", "FP16"]  # the interpreter multiplies no matrices of BF16
CLOSE = dict.fromkeys(FORMATS, 3e-3) | {"INT4": 4e-3}
"""As in test_triton_paged_attention.py."""
SPREAD = {"INT4": 1}
"""Of queries. Where a GPU rounds code · scale + minimum once, the interpreter does twice, and queries multiply that."""
Sizes = tuple[int, int, int]


def starts_of(counts: Sequence[int]) -> Tensor:
    return int32([sum(counts[:b]) for b in range(len(counts) + 1)])


def attend(
    q: Tensor, paged: Cache, counts: Sequence[int], lengths: Sequence[int], sizes: Sizes,
    window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """What the kernel makes of a poisoned output."""
    buffer = poisoned(q.shape[0] + GUARD, q.shape[1]).to(q.dtype)
    out = buffer[: q.shape[0]]
    paged_prefill(
        q, paged.k, paged.v, paged.k_scale, paged.v_scale, paged.table, starts_of(counts), int32(list(lengths)),
        *sizes, paged.form, sizes[2] ** -0.5, window, softcap, out,
    )  # fmt: skip
    assert buffer[q.shape[0] :].isnan().all()
    return out


def assert_right(
    out: Tensor, q: Tensor, paged: Cache, counts: Sequence[int], lengths: Sequence[int], sizes: Sizes,
    window: int | None = None, softcap: float | None = None,
) -> None:  # fmt: skip
    wanted = op.reference(
        q.float(), paged.k, paged.v, paged.k_scale, paged.v_scale, paged.table, starts_of(counts),
        int32(list(lengths)), *sizes, paged.form, sizes[2] ** -0.5, window, softcap,
    )  # fmt: skip
    bound = CLOSE[paged.form]
    torch.testing.assert_close(out.float(), wanted, rtol=bound * 2 / 3, atol=bound)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("sizes", "counts", "lengths", "window", "softcap"),
    [
        ((9, 3, 64), [5, 1, 70], [5, 90, 133], None, None),
        ((4, 2, 80), [33], [40], None, 5.0),
        ((3, 1, 96), [1, 2], [1, 64], 7, None),
        ((8, 1, 128), [20, 0, 1], [20, 0, 65], 30, 3.0),
        ((2, 1, 256), [37], [70], None, None),
    ],
)
def test_chunks_equal_their_reference(
    form: str, sizes: Sizes, counts: list[int], lengths: list[int], window: int | None, softcap: float | None
) -> None:
    paged = cache(form, lengths, sizes[1], sizes[2])
    q = (torch.randn(sum(counts), sizes[0] * sizes[2]) * SPREAD.get(form, 2)).half()
    out = attend(q, paged, counts, lengths, sizes, window, softcap)
    assert_right(out, q, paged, counts, lengths, sizes, window, softcap)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_random_steps_equal_their_reference(form: str, head_dim: int) -> None:
    def up_to(most: int, least: int = 0) -> int:
        return int(torch.randint(least, most + 1, ()))

    kv_heads = up_to(2, 1)
    sizes = (kv_heads * up_to(5, 1), kv_heads, head_dim)
    counts = [up_to(40) for _ in range(up_to(3, 1))]
    lengths = [count + up_to(50) for count in counts]
    padding, window, softcap = up_to(3), up_to(40) or None, up_to(3) or None
    paged = cache(form, lengths, kv_heads, head_dim, 8 << up_to(2))
    q = torch.randn(sum(counts) + padding, sizes[0] * head_dim).half()
    out = attend(q, paged, counts, lengths, sizes, window, softcap)
    assert_right(out, q, paged, counts, lengths, sizes, window, softcap)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("length", [1, 17, 1000, 4097])
def test_the_end_of_a_prompt_of_any_length_equals_its_reference(form: str, length: int) -> None:
    sizes, counts = (2, 1, 64), [min(length, 20)]
    paged = cache(form, [length], 1, 64)
    q = torch.randn(counts[0], 128).half()
    assert_right(attend(q, paged, counts, [length], sizes), q, paged, counts, [length], sizes)


@pytest.fixture
def placeless_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by BLAS, where a row's last bit depends on its place among others; on a GPU none does.
    In float64 that bit is far below what is kept."""

    def create_dot(self: InterpreterBuilder, a: Any, b: Any, d: Any, *_: Any) -> TensorHandle:
        product = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("placeless_products")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("window", [None, 37])
def test_how_a_prompt_is_cut_changes_no_bit(form: str, window: int | None) -> None:
    sizes, length = (3, 1, 64), 150
    paged = cache(form, [length], 1, 64)
    q = torch.randn(length, 192).half()
    whole = attend(q, paged, [length], [length], sizes, window)
    cuts = sorted({0, length, *torch.randint(1, length, (4,)).tolist()})
    for begin, end in pairwise(cuts):
        part = attend(q[begin:end].contiguous(), paged, [end - begin], [end], sizes, window)
        assert torch.equal(part, whole[begin:end])


@pytest.mark.usefixtures("placeless_products")
def test_a_sequence_has_the_same_bits_alone_and_in_a_step_of_many() -> None:
    sizes, counts, lengths = (4, 2, 64), [30, 1, 9], [30, 77, 20]
    paged = cache("INT8", lengths, 2, 64)
    q = torch.randn(40, 256).half()
    together = attend(q, paged, counts, lengths, sizes)
    starts = starts_of(counts).tolist()
    for b, length in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        one = replace(paged, table=paged.table[b : b + 1].contiguous())
        assert torch.equal(attend(q[rows].contiguous(), one, [counts[b]], [length], sizes), together[rows])


def test_a_chunk_reads_no_cell_behind_its_end() -> None:
    sizes, length = (2, 1, 64), 100
    paged = cache("FP16", [length], 1, 64)
    q = torch.randn(30, 128).half()
    before = attend(q, paged, [30], [70], sizes)
    later = paged.slots(0, torch.arange(70, length))
    paged.k.view(-1, 64)[later] = float("nan")
    paged.v.view(-1, 64)[later] = float("inf")
    paged.table[0, 5:] = -1
    assert before.isfinite().all()
    assert torch.equal(attend(q, paged, [30], [70], sizes), before)


def test_padding_gets_zeros_and_no_tokens_launch_nothing() -> None:
    paged = cache("INT8", [20, 0], 1, 64)
    q = torch.randn(90, 64).half()
    out = attend(q, paged, [20, 0], [20, 0], (1, 1, 64))
    assert torch.equal(out[20:], torch.zeros_like(out[20:]))
    assert out[:20].abs().amax(dim=1).min() > 0
    assert attend(q[:0], paged, [0, 0], [20, 0], (1, 1, 64)).shape == (0, 64)


def test_a_cache_in_another_format_than_said_is_refused() -> None:
    paged = replace(cache("INT8", [5], 1, 64), form="FP8")
    with pytest.raises(ValueError, match="k_cache is int8"):
        attend(torch.zeros(1, 64).half(), paged, [1], [5], (1, 1, 64))
