from __future__ import annotations

import pytest
import torch

from quantkit_kernels.ops import embedding as op
from quantkit_kernels.triton.embedding import embedding
from tests.ops.native import GUARD, int32, poisoned


@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (3, 80), (300, 1027), (2, 2049)])
@pytest.mark.parametrize("scale", [1.0, 576**0.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_of_the_table_equal_their_reference(tokens: int, width: int, scale: float, dtype: torch.dtype) -> None:
    table = torch.randn(50, width).to(dtype)
    ids = torch.randint(0, 50, (tokens,), dtype=torch.int32)
    ids[-1] = 49
    buffer = poisoned(tokens + GUARD, width).half()
    embedding(ids, table, scale, buffer[:tokens])
    expected = op.reference(ids, table, scale)
    torch.testing.assert_close(buffer[:tokens].float(), expected, rtol=1e-3, atol=1e-6)
    if scale == 1.0:
        assert torch.equal(buffer[:tokens], expected.half())
    assert buffer[tokens:].isnan().all()


def test_a_row_far_into_a_large_table_is_found() -> None:
    """Behind element 2³¹; only the pages that are read exist."""
    table = torch.empty(2**21, 1028, dtype=torch.float16)
    table[-1] = torch.arange(1028)
    assert torch.equal(embedding(int32([2**21 - 1]), table)[0], table[-1])


def test_no_tokens_launch_nothing() -> None:
    assert embedding(int32([]), torch.zeros(3, 8)).shape == (0, 8)


def test_ids_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="token_ids is int64"):
        embedding(torch.tensor([1]), torch.zeros(3, 8))
