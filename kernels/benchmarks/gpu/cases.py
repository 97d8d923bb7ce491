"""One case of every kernel that is registered: inputs, what the reference makes of them, bytes and operations.

Facts are those of the static gates (`quantkit.compile.gates.CASES`), so a kernel that is added there is checked here.
An op that has no builder, or an argument that no builder fills, is a failure with its name: nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu.ahead import Ahead, Launchable
from quantkit_kernels.ops import add_rms_norm, gated_act, linear, paged_attention, qk_norm_rope_kv_write, rms_norm
from quantkit_kernels.triton import Fact, KernelSpec
from quantkit_kernels.triton.layout import pack_matrix

BLOCK = 16
NO_WINDOW = 2**31 - 1
SCALES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Case:
    """A case: values by argument, launch sizes, the arguments that it writes, and what they must be.

    bound: name -> (relative, absolute) tolerance. moved: bytes that must be read and written. operations: additions
    and multiplications. baseline: the same in plain torch FP16, where there is one.
    """

    values: dict[str, Any]
    sizes: dict[str, int]
    expected: dict[str, Tensor]
    bound: dict[str, tuple[float, float]]
    operations: float = 0.0
    baseline: Callable[[], Any] | None = None
    also_moved: int = 0
    unread: frozenset[str] = field(default_factory=frozenset)

    @property
    def moved(self) -> int:
        """Bytes of all tensors that are read or written, but for those not counted (caches count what is seen)."""
        tensors = {name: value for name, value in self.values.items() if isinstance(value, Tensor)}
        return self.also_moved + sum(t.nbytes for name, t in tensors.items() if name not in self.unread)

    def poison(self) -> None:
        """Fill what is written with what no kernel writes."""
        for name in self.expected:
            out = self.values[name]
            if out.is_floating_point():
                out.fill_(float("nan"))

    def errors(self) -> dict[str, float]:
        """By output: the largest difference, as a share of what the bound allows; above 1 is wrong."""
        found = {}
        for name, expected in self.expected.items():
            relative, absolute = self.bound[name]
            out, want = self.values[name].float(), expected.float()
            share = (out - want).abs() / (relative * want.abs() + absolute)
            share = torch.where((out == want) | (out.isnan() & want.isnan()), torch.zeros_like(share), share)
            worst = float(share.nan_to_num(nan=float("inf")).max())
            found[name] = worst
        return found


def launches(case: Case, specs: list[KernelSpec], facts: Mapping[str, Fact], ahead: Ahead) -> list[Launchable]:
    """What the op launches, one kernel after another. ValueError names arguments that the case does not fill."""
    return [ahead.launch(spec, facts, case.sizes, case.values) for spec in specs]


def build(facts: Mapping[str, Fact], rows: int, length: int, device: str) -> Case:
    """A case for these facts: `rows` rows or sequences, caches of `length` positions. ValueError: no such op."""
    builder = _BUILDERS.get(str(facts["op"]))
    if builder is None:
        raise ValueError(f"this check knows no op {facts['op']}")
    return builder(facts, rows, length, device)


def _half(*shape: int, device: str, spread: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * spread).half()


def _linear(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    n, k, bits, group = (int(facts[name]) for name in ("n", "k", "bits", "group_size"))
    if bits not in (4, 8):
        raise ValueError(f"this check packs no {bits}-bit weights")
    top, groups = 1 << (bits - 1), k // group if group else 1
    codes = torch.randint(-top, top, (n, k), dtype=torch.int8)
    scale = (torch.rand(n, groups) * 0.02 + 0.001).to(SCALES[str(facts["scale"])])
    zero = None if facts["symmetric"] else torch.randint(-top, top, (n, groups), dtype=torch.int8)
    packed = pack_matrix(codes, scale, zero, bits=bits, group_size=group)
    shifted = codes.float() - (0.0 if zero is None else zero.float().repeat_interleave(k // groups, 1))
    dense = (shifted * scale.float().repeat_interleave(k // groups, 1)).to(device)
    x, bias = _half(rows, k, device=device), _half(n, device=device) if facts["bias"] else None
    values = {
        "x": x, "words": packed.words.to(device), "scale": packed.scale.to(device),
        "zero": None if packed.zero is None else packed.zero.to(device), "bias": bias,
        "out": torch.empty(rows, n, dtype=torch.float16, device=device), "rows": rows, "n": n, "k": k,
    }  # fmt: skip
    expected = linear.reference(x.float(), dense, None if bias is None else bias.float())
    weight = dense.half()
    return Case(
        values, {"rows": rows, "n": n}, {"out": expected}, {"out": (1e-3, 1e-4 * float(expected.abs().max()))},
        operations=2.0 * rows * n * k, baseline=lambda: torch.nn.functional.linear(x, weight, bias),
    )  # fmt: skip


def _norm(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    width, eps, offset = int(facts["width"]), float(facts["eps"]), float(facts["offset"])
    x, weight = _half(rows, width, device=device), torch.randn(width, device=device)
    values: dict[str, Any] = {"x": x, "weight": weight, "y": torch.empty_like(x), "eps": eps, "offset": offset}
    if facts["op"] == "rms_norm":
        wanted = {"y": rms_norm.reference(x.float(), weight, eps, offset)}
    else:
        values |= {"residual": _half(rows, width, device=device, spread=9), "residual_out": torch.empty_like(x)}
        added = (x.float() + values["residual"].float()).half()
        wanted = {"y": rms_norm.reference(added.float(), weight, eps, offset), "residual_out": added}
        assert torch.equal(
            added, add_rms_norm.reference(x.float(), values["residual"].float(), weight, eps, offset)[1].half()
        )
    return Case(values, {"rows": rows, "n": width}, wanted, dict.fromkeys(wanted, (2e-3, 2e-3)))


def _gated_act(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    width, activation = int(facts["width"]), str(facts["activation"])
    gate_up = _half(rows, 2 * width, device=device, spread=3)
    expected = gated_act.reference(gate_up.double(), activation).float()
    values = {"gate_up": gate_up, "out": torch.empty(rows, width, dtype=torch.float16, device=device)}
    return Case(values, {"rows": rows, "n": width}, {"out": expected}, {"out": (1e-3, 1e-6)})


def _cache(facts: Mapping[str, Any], blocks: int, device: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """k, v and their scales; every cell holds something."""
    shape = (blocks, int(facts["num_kv_heads"]), int(facts["block_size"]), int(facts["head_dim"]))
    kind = str(facts["cache"])
    if kind == "INT8":
        k, v = (torch.randint(-127, 128, shape, dtype=torch.int8, device=device) for _ in range(2))
        return k, v, *(torch.rand(shape[1], shape[3], device=device) * 0.02 + 0.005 for _ in range(2))
    dtypes = {"FP16": torch.float16, "BF16": torch.bfloat16}
    if kind not in dtypes:
        raise ValueError(f"this check fills no cache in {kind}")
    k, v = (torch.randn(shape, device=device).to(dtypes[kind]) for _ in range(2))
    return k, v, None, None


def _rope_write(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    heads, kv_heads, dim = (int(facts[name]) for name in ("num_heads", "num_kv_heads", "head_dim"))
    half, page = int(facts["rotary_dim"]) // 2, int(facts["block_size"])
    k, v, k_scale, v_scale = _cache(facts, -(-rows // page) + 1, device)
    k.zero_(), v.zero_()
    angle = torch.rand(length, half, device=device) * 6
    slots = torch.randperm(k.shape[0] * page, device=device)[:rows].int()
    slots[rows // 2] = -1
    norms = [torch.rand(dim, device=device) if facts["qk_norm"] else None for _ in range(2)]
    values = {
        "qkv": _half(rows, (heads + 2 * kv_heads) * dim, device=device), "slot_mapping": slots,
        "positions": torch.randint(0, length, (rows,), dtype=torch.int32, device=device), "cos": angle.cos(),
        "sin": angle.sin(), "q_norm": norms[0], "k_norm": norms[1], "k_scale": k_scale, "v_scale": v_scale,
        "k_cache": k, "v_cache": v, "q_out": torch.empty(rows, heads * dim, dtype=torch.float16, device=device),
        "eps": float(facts["eps"]), "offset": float(facts["offset"]),
    }  # fmt: skip
    want_k, want_v = k.clone(), v.clone()
    q = qk_norm_rope_kv_write.reference(
        values["qkv"].float(), values["positions"], slots, values["cos"], values["sin"], *norms, values["eps"],
        values["offset"], want_k, want_v, k_scale, v_scale, heads, kv_heads, dim, str(facts["cache"]),
    )  # fmt: skip
    # A key at the edge between two codes may round either way after a different last bit.
    stored = (0.0, 1.0) if facts["cache"] == "INT8" else (2e-3, 1e-5)
    return Case(values, {"rows": rows, "n": 0}, {"q_out": q, "k_cache": want_k, "v_cache": want_v},
                {"q_out": (1e-3, 1e-5), "k_cache": stored, "v_cache": stored})  # fmt: skip


def _attention(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    """Decode of `rows` sequences of about `length` positions; with several, the last is a padded row."""
    from quantkit_kernels.triton.paged_attention import workspace

    heads, kv_heads, dim = (int(facts[name]) for name in ("num_heads", "num_kv_heads", "head_dim"))
    page = int(facts["block_size"])
    lengths = [max(1, length - 7 * row) for row in range(rows)]
    if rows > 1:
        lengths[-1] = 0
    width = -(-length // page)
    k, v, k_scale, v_scale = _cache(facts, rows * width, device)
    table = torch.randperm(rows * width, device=device).int().view(rows, width)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    q = _half(rows, heads * dim, device=device)
    partial, log_sum = workspace(rows, heads, dim, torch.device(device))
    softcap, window = float(facts["softcap"]) or None, int(facts["window"]) or None
    real = sum(seen > 0 for seen in lengths)
    expected = torch.zeros(rows, heads * dim, device=device)  # what a padded row gets
    expected[:real] = paged_attention.reference(
        q[:real].float(), k, v, k_scale, v_scale, table[:real], starts[: real + 1], seq_lens[:real], heads, kv_heads,
        dim, str(facts["cache"]), float(facts["scale"]), window, softcap,
    )  # fmt: skip
    values = {
        "q": q, "k_cache": k, "v_cache": v, "k_scale": k_scale, "v_scale": v_scale, "block_table": table,
        "seq_lens": seq_lens, "partial": partial.fill_(float("nan")), "log_sum": log_sum.fill_(float("nan")),
        "scale": float(facts["scale"]), "softcap": softcap or 1.0, "window": window or NO_WINDOW, "table_width": width,
        "out": torch.empty_like(q),
    }  # fmt: skip
    seen = sum(lengths) * kv_heads * dim
    return Case(
        values, {"rows": rows, "sequences": rows, "n": 0}, {"out": expected}, {"out": (2e-3, 3e-3)},
        operations=4.0 * sum(lengths) * heads * dim, also_moved=2 * seen * k.element_size(),
        unread=frozenset({"k_cache", "v_cache", "partial", "log_sum"}),
    )  # fmt: skip


_BUILDERS: dict[str, Callable[[Mapping[str, Any], int, int, str], Case]] = {
    "linear": _linear,
    "rms_norm": _norm,
    "add_rms_norm": _norm,
    "gated_act": _gated_act,
    "qk_norm_rope_kv_write": _rope_write,
    "paged_attention": _attention,
}


def small(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """The same facts at sizes that the interpreter gets through."""
    sizes: dict[str, Fact] = {"n": 48, "k": 256, "width": 96, "num_heads": 4, "num_kv_heads": 2}
    return {**facts, **{name: value for name, value in sizes.items() if name in facts}}
