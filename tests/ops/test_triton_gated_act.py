from __future__ import annotations

import pytest
import torch

from quantkit_kernels.ops import gated_act as op
from quantkit_kernels.triton.gated_act import gated_act
from tests.ops.native import GUARD, poisoned

# The interpreter's numpy tells of the overflow that makes silu(-200) zero.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.parametrize(("tokens", "width"), [(1, 1536), (3, 80), (37, 1027), (2, 2049)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gated_act_equals_its_reference(tokens: int, width: int, activation: str, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(tokens, 2 * width) * 5).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, -200.0, 200.0, -88.0])
    buffer = poisoned(tokens + GUARD, width).to(dtype)
    gated_act(gate_up, activation, buffer[:tokens])
    # In float64: torch's float32 gelu_tanh loses the digits of 1 + tanh(x) for negative x.
    expected = op.reference(gate_up.double(), activation).float()
    tolerance = {"rtol": 1e-3, "atol": 1e-6} if dtype == torch.float16 else {"rtol": 3e-6, "atol": 1e-6}
    torch.testing.assert_close(buffer[:tokens].float(), expected, **tolerance)
    assert buffer[tokens:].isnan().all()


def test_no_rows_launch_nothing() -> None:
    assert gated_act(torch.empty(0, 64), "silu").shape == (0, 32)


def test_a_nan_is_not_hidden() -> None:
    gate_up = torch.randn(2, 64).half()
    gate_up[1, 5] = float("nan")
    out = gated_act(gate_up, "silu")
    assert out.isnan().nonzero().tolist() == [[1, 5]]


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown activation 'relu'"):
        gated_act(torch.zeros(1, 64), "relu")
