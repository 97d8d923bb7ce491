"""Launch the linear kernel that fits: by bits, group size and number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit_kernels.triton import linear_w4a16, linear_w8a16
from quantkit_kernels.triton.layout import GpuMatrix
from quantkit_kernels.triton.operands import expect
from quantkit_kernels.triton.spec import Fact, KernelSpec
from quantkit_kernels.triton.tiles import FEW_ROWS

_SPECS = (*linear_w4a16.SPECS, *linear_w8a16.SPECS)
_SCALES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def linear(
    x: Tensor, matrix: GpuMatrix, bias: Tensor | None = None, out: Tensor | None = None, *, rows: str | None = None
) -> Tensor:
    """`x · wᵀ + bias` with packed weights.

    x: contiguous float16 `[T, K]`; bias: float16 `[N]` or None; rows: `few` (at most 16) or `many`, by T if absent.
    Returns float16 `[T, N]`, written to `out` where given. Raises ValueError for other shapes or types and for weights
    that no kernel takes.
    """
    n, k = matrix.words.shape[0], matrix.columns
    expect("x", x, (None, k), (torch.float16,))
    if bias is not None:
        expect("bias", bias, (n,), (torch.float16,))
    out = x.new_empty(x.shape[0], n) if out is None else out
    expect("out", out, (x.shape[0], n), (torch.float16,))
    if not out.numel():
        return out
    facts: dict[str, Fact] = {
        "op": "linear",
        "rows": rows or ("few" if x.shape[0] <= FEW_ROWS else "many"),
        "dtype": "fp16",
        "n": n,
        "k": k,
        "bits": matrix.bits,
        "group_size": matrix.group_size,
        "symmetric": matrix.zero is None,
        "bias": bias is not None,
        "scale": _SCALES[matrix.scale.dtype],
    }
    if facts["rows"] == "few" and x.shape[0] > FEW_ROWS:
        raise ValueError(f"{x.shape[0]} rows are more than the {FEW_ROWS} that a kernel for few rows takes")
    spec = _fitting(facts)
    how = spec.signature(facts)
    given = {"x": x, "words": matrix.words, "scale": matrix.scale, "zero": matrix.zero, "bias": bias, "out": out}
    values = {**given, "rows": x.shape[0], "n": n, "k": k}
    spec.function[spec.grid(how, {"rows": x.shape[0], "n": n})](
        **{name: values[name] for name in how.arguments},
        **how.constants,
        num_warps=how.num_warps,
        num_stages=how.num_stages,
    )
    return out


def _fitting(facts: dict[str, Fact]) -> KernelSpec:
    refusals = {spec.name: spec.refusal(facts) for spec in _SPECS}
    spec = next((spec for spec in _SPECS if refusals[spec.name] is None), None)
    if spec is None:
        raise ValueError("; ".join(dict.fromkeys(filter(None, refusals.values()))))
    return spec
