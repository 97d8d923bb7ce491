from __future__ import annotations

import pytest
import torch

from quantkit_kernels.ops import logits as op
from quantkit_kernels.triton.softcap import softcap
from tests.ops.native import GUARD, poisoned


@pytest.mark.parametrize(("rows", "width"), [(1, 49152), (3, 80), (17, 1027), (300, 33)])
@pytest.mark.parametrize("cap", [30.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_are_capped_where_they_lie(rows: int, width: int, cap: float, dtype: torch.dtype) -> None:
    buffer = poisoned(rows + GUARD, width).to(dtype)
    before = (3 * cap * torch.randn(rows, width)).to(dtype)
    before[0, 0], before[-1, -1] = 1e4, -1e4
    buffer[:rows] = before
    assert softcap(buffer[:rows], cap) is not None
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(buffer[:rows].float(), op.capped(before.float(), cap), rtol=step, atol=1e-6 * cap)
    assert buffer[:rows].abs().max() <= cap
    assert buffer[rows:].isnan().all()


def test_what_is_no_number_stays_none() -> None:
    out = softcap(torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.0]]), 30.0)
    assert out[0, 0].isnan()
    assert out[0, 1:].tolist() == [30.0, -30.0, 0.0]


def test_no_rows_launch_nothing() -> None:
    assert softcap(torch.zeros(0, 8), 30.0).shape == (0, 8)


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan")])
def test_a_cap_that_is_none_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="a softcap is above 0"):
        softcap(torch.zeros(1, 8), cap)


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match="logits is int32"):
        softcap(torch.zeros(1, 8, dtype=torch.int32), 30.0)
