"""Launch the linear kernel that fits: by what weights and activations are, and the number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit_kernels.triton import linear_a8, linear_w4a16, linear_w8a16, split_k
from quantkit_kernels.triton.layout import CodeRows, GpuMatrix
from quantkit_kernels.triton.operands import expect
from quantkit_kernels.triton.spec import Fact, KernelSpec
from quantkit_kernels.triton.split_k import splits
from quantkit_kernels.triton.tiles import FEW_ROWS
from quantkit_kernels.triton.tuning import tuned

_SPECS = (*linear_w4a16.SPECS, *linear_w8a16.SPECS, *linear_a8.SPECS)
FLOAT_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Types of scales, as facts name them."""


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
    facts: dict[str, Fact] = {
        "bits": matrix.bits, "group_size": matrix.group_size, "symmetric": matrix.zero is None,
        "scale": FLOAT_NAMES[matrix.scale.dtype],
    }  # fmt: skip
    weights = {"words": matrix.words, "scale": matrix.scale, "zero": matrix.zero}
    return _launch(facts, n, {"x": x, **weights}, bias, out, rows)


def linear_codes(
    x: Tensor,
    x_scale: Tensor,
    weights: CodeRows,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    rows: str | None = None,
) -> Tensor:
    """`(x · x_scale) · wᵀ + bias` with activations that are codes, of the type of the weights' codes.

    x: contiguous int8 or float8_e4m3fn `[T, K]`; x_scale: float32 `[T]`; the rest as in `linear`. FP8 needs sm_89.
    Returns float16 `[T, N]`. ValueError as in `linear`.
    """
    n, k = weights.codes.shape[0], weights.columns
    expect("x", x, (None, k), (weights.codes.dtype,))
    expect("x_scale", x_scale, (x.shape[0],), (torch.float32,))
    facts: dict[str, Fact] = {
        "bits": 8, "group_size": 0, "symmetric": True, "scale": FLOAT_NAMES[weights.scale.dtype],
        "quant": "int8" if x.dtype == torch.int8 else "fp8",
    }  # fmt: skip
    given = {"x": x, "x_scale": x_scale, "codes": weights.codes, "scale": weights.scale}
    return _launch(facts, n, given, bias, out, rows)


def _launch(
    form: dict[str, Fact],
    n: int,
    given: Mapping[str, Tensor | None],
    bias: Tensor | None,
    out: Tensor | None,
    rows: str | None,
) -> Tensor:
    """Complete the facts about the weight's form, and launch the kernel that serves them."""
    x = given["x"]
    assert x is not None
    t, k = x.shape
    if bias is not None:
        expect("bias", bias, (n,), (torch.float16,))
    out = x.new_empty(t, n, dtype=torch.float16) if out is None else out
    expect("out", out, (t, n), (torch.float16,))
    if not out.numel():
        return out
    facts = tuned({
        "op": "linear", "sm": _capability(x), "rows": rows or ("few" if t <= FEW_ROWS else "many"), "dtype": "fp16",
        "n": n, "k": k, "bias": bias is not None, **form,
    })  # fmt: skip
    if facts["rows"] == "few" and t > FEW_ROWS:
        raise ValueError(f"{t} rows are more than the {FEW_ROWS} that a kernel for few rows takes")
    values: dict[str, Any] = {**given, "bias": bias, "out": out, "rows": t, "n": n, "k": k}
    first = _fitting(facts)
    parts = splits(facts)
    if parts > 1:
        of_integers = facts.get("quant") == "int8"
        values["partial"] = x.new_empty(parts, FEW_ROWS, n, dtype=torch.int32 if of_integers else torch.float32)
    for spec in (first, *(after for after in split_k.SPECS if after.refusal(facts) is None)):
        how = spec.signature(facts)
        spec.function[spec.grid(how, {"rows": t, "n": n})](
            **{name: values[name] for name in how.arguments},
            **how.constants,
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )
    return out


def _capability(x: Tensor) -> int:
    """That of the device which holds x; the interpreter can do what the newest target can."""
    major, minor = torch.cuda.get_device_capability(x.device) if x.is_cuda else (12, 0)
    return major * 10 + minor


def _fitting(facts: dict[str, Fact]) -> KernelSpec:
    refusals = {spec.name: spec.refusal(facts) for spec in _SPECS}
    spec = next((spec for spec in _SPECS if refusals[spec.name] is None), None)
    if spec is None:
        raise ValueError("; ".join(dict.fromkeys(filter(None, refusals.values()))))
    return spec
