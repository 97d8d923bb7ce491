"""One case of every kernel that is registered: inputs, what the reference makes of them, bytes and operations.

Facts are those of the static gates (`quantkit.compile.gates.CASES`), so a kernel that is added there is checked here.
An op that has no builder, or an argument that no builder fills, is a failure with its name: nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu import experts
from gpu.ahead import Ahead, Launchable
from gpu.case import TYPES, Case, random_half, random_matrix
from quantkit_kernels.cache_formats import CACHE_FORMATS
from quantkit_kernels.ops import (
    add_rms_norm,
    embedding,
    gated_act,
    kv_cells,
    linear,
    logits,
    paged_attention,
    qk_norm_rope_kv_write,
    quantize,
    rms_norm,
    sample,
)
from quantkit_kernels.triton import Fact, KernelSpec
from quantkit_kernels.triton.layout import pad_rows

BLOCK = 16
NO_WINDOW = 2**31 - 1


def launches(case: Case, specs: list[KernelSpec], facts: Mapping[str, Fact], ahead: Ahead) -> list[Launchable]:
    """What the op launches, one kernel after another. ValueError names arguments that the case does not fill."""
    return [ahead.launch(spec, facts, case.sizes, case.values) for spec in specs]


def build(facts: Mapping[str, Fact], rows: int, length: int, device: str) -> Case:
    """A case for these facts: `rows` rows or sequences, caches of `length` positions. ValueError: no such op."""
    builder = _BUILDERS.get(str(facts["op"]))
    if builder is None:
        raise ValueError(f"this check knows no op {facts['op']}")
    return builder(facts, rows, length, device)


QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CODE_STEPS = {"int8": (0.0, 1.0), "fp8": (0.126, 2.0**-9)}
"""A code next to the reference's: its value may lie at the edge between two."""


def _linear_codes(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    """Codes times codes, one scale a row on both sides."""
    n, k, form = int(facts["n"]), int(facts["k"]), QUANTIZED[str(facts["quant"])]
    x, x_scale = quantize.reference(torch.randn(rows, k, device=device), form)
    codes, scale = quantize.reference(torch.randn(n, k, device=device), form)
    packed = pad_rows(codes, scale.to(TYPES[str(facts["scale"])]))
    bias = random_half(n, device=device) if facts["bias"] else None
    values = {
        "x": x, "x_scale": x_scale, "codes": packed.codes, "scale": packed.scale, "bias": bias, **_parts(facts, device),
        "out": torch.empty(rows, n, dtype=torch.float16, device=device), "rows": rows, "n": n, "k": k,
    }  # fmt: skip
    expected = linear.of_token_codes(x, x_scale, codes, packed.scale, bias)
    return Case(
        values, {"rows": rows, "n": n}, {"out": expected}, {"out": (1e-3, 1e-4 * float(expected.abs().max()))},
        operations=2.0 * rows * n * k, unread=frozenset({"partial"}),
    )  # fmt: skip


def _parts(facts: Mapping[str, Any], device: str) -> dict[str, Tensor]:
    """Room for the sums of K's parts, of no use yet, where K is cut."""
    from quantkit_kernels.triton.split_k import splits

    parts = splits(facts)
    if parts == 1:
        return {}
    kind = torch.int32 if facts.get("quant") == "int8" else torch.float32
    return {"partial": torch.full((parts, 16, int(facts["n"])), -77, dtype=kind, device=device)}


def _linear(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    if facts.get("quant"):
        return _linear_codes(facts, rows, length, device)
    n, k, bits, group = (int(facts[name]) for name in ("n", "k", "bits", "group_size"))
    packed, dense = random_matrix(n, k, bits, group, symmetric=bool(facts["symmetric"]), scale=str(facts["scale"]))
    dense = dense.to(device)
    x, bias = random_half(rows, k, device=device), random_half(n, device=device) if facts["bias"] else None
    values = {
        "x": x, "words": packed.words.to(device), "scale": packed.scale.to(device),
        "zero": None if packed.zero is None else packed.zero.to(device), "bias": bias,
        "out": torch.empty(rows, n, dtype=torch.float16, device=device), "rows": rows, "n": n, "k": k,
        **_parts(facts, device),
    }  # fmt: skip
    expected = linear.reference(x.float(), dense, None if bias is None else bias.float())
    weight = dense.half()
    return Case(
        values, {"rows": rows, "n": n}, {"out": expected}, {"out": (1e-3, 1e-4 * float(expected.abs().max()))},
        operations=2.0 * rows * n * k, baseline=lambda: torch.nn.functional.linear(x, weight, bias),
        unread=frozenset({"partial"}),
    )  # fmt: skip


def _embedding(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    width, scale = int(facts["width"]), float(facts["scale"])
    table = torch.randn(8192, width, device=device).to(TYPES[str(facts["table"])])
    ids = torch.randint(0, 8192, (rows,), dtype=torch.int32, device=device)
    out = torch.empty(rows, width, dtype=torch.float16, device=device)
    values = {"token_ids": ids, "table": table, "out": out, "scale": scale}
    return Case(values, {"rows": rows, "n": width}, {"out": embedding.reference(ids, table, scale)},
                {"out": (1e-3, 1e-6)}, unread=frozenset({"table"}),
                also_moved=rows * width * table.element_size())  # fmt: skip


def _softcap(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    width, cap = int(facts["width"]), float(facts["softcap"])
    before = (2 * cap * torch.randn(rows, width, device=device)).half()
    return Case({"out": torch.empty_like(before), "softcap": cap}, {"rows": rows, "n": width},
                {"out": logits.capped(before.float(), cap)}, {"out": (1e-3, 1e-4 * cap)},
                before={"out": before}, also_moved=before.nbytes)  # fmt: skip


def _norm(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    width, eps, offset = int(facts["width"]), float(facts["eps"]), float(facts["offset"])
    x, weight = random_half(rows, width, device=device), torch.randn(width, device=device)
    values: dict[str, Any] = {"x": x, "weight": weight, "y": torch.empty_like(x), "eps": eps, "offset": offset}
    if facts["op"] == "rms_norm":
        wanted = {"y": rms_norm.reference(x.float(), weight, eps, offset)}
    else:
        values |= {"residual": random_half(rows, width, device=device, spread=9), "residual_out": torch.empty_like(x)}
        added = (x.float() + values["residual"].float()).half()
        wanted = {"y": rms_norm.reference(added.float(), weight, eps, offset), "residual_out": added}
        assert torch.equal(
            added, add_rms_norm.reference(x.float(), values["residual"].float(), weight, eps, offset)[1].half()
        )
    return _with_codes(
        facts, Case(values, {"rows": rows, "n": width}, wanted, dict.fromkeys(wanted, (2e-3, 2e-3))), "y"
    )


def _with_codes(facts: Mapping[str, Any], case: Case, name: str) -> Case:
    """The case with the output `name` quantized beside it, or in its place."""
    if not facts.get("quant"):
        return case
    kind, out = str(facts["quant"]), case.expected[name].half()
    codes, scale = quantize.reference(out, QUANTIZED[kind])
    if not facts.get("keep"):
        del case.expected[name], case.values[name]
    case.values |= {"codes": torch.empty_like(codes), "scale": torch.empty_like(scale)}
    case.expected |= {"codes": codes, "scale": scale}
    case.bound |= {"codes": CODE_STEPS[kind], "scale": (2e-3, 1e-9)}
    return case


def _gated_act(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    width, activation = int(facts["width"]), str(facts["activation"])
    gate_up = random_half(rows, 2 * width, device=device, spread=3)
    expected = gated_act.reference(gate_up.double(), activation).float()
    values = {"gate_up": gate_up, "out": torch.empty(rows, width, dtype=torch.float16, device=device)}
    return _with_codes(facts, Case(values, {"rows": rows, "n": width}, {"out": expected}, {"out": (1e-3, 1e-6)}), "out")


def _quantize(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    width, form = int(facts["width"]), QUANTIZED[str(facts["quant"])]
    x = random_half(rows, width, device=device, spread=3)
    codes, scale = quantize.reference(x, form)
    values = {"x": x, "codes": torch.empty_like(codes), "scale": torch.empty_like(scale)}
    exact = {"codes": (0.0, 1e-9), "scale": (0.0, 1e-12)}
    return Case(values, {"rows": rows, "n": width}, {"codes": codes, "scale": scale}, exact)


def _sample(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    """Draws with every filter in turn; a token is judged by how far the uniform number lies from its share."""
    from quantkit_kernels.triton.sample import sample_tensors

    vocab = int(facts["vocab"])
    logits = random_half(rows, vocab, device=device, spread=3)
    filters: list[dict[str, Any]] = [
        {}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 40}, {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05}, {"temperature": 1.5, "min_p": 0.02},
    ]  # fmt: skip
    seeds = torch.randint(0, 2**62, (rows,)).tolist()
    asked = [sample.SampleRow(**filters[row % len(filters)], seed=seeds[row], position=row) for row in range(rows)]
    seen = logits.float().cpu().numpy()

    def away(tokens: Tensor) -> Tensor:
        return torch.tensor([_away(seen[row], asked[row], token) for row, token in enumerate(tokens.tolist())])

    how = sample_tensors(asked, device)
    wanted = torch.tensor([drawn.token for drawn in sample.reference(seen, asked)], dtype=torch.int32)
    values = {**vars(how), "logits": logits, "vocab": vocab,
              "tokens": torch.empty(rows, dtype=torch.int32, device=device)}  # fmt: skip
    return Case(values, {"rows": rows, "n": vocab}, {"tokens": wanted}, {"tokens": (0.0, 2e-6)},
                numbers={"tokens": away})  # fmt: skip


def _away(logits: np.ndarray[Any, Any], row: sample.SampleRow, token: int) -> float:
    """How far a row's uniform number lies outside its token's share of 1; 0 within, infinite where it has none."""
    if row.temperature < sample.COLDEST:
        return 0.0 if token == int(logits.argmax()) else float("inf")
    if not 0 <= token < len(logits):
        return float("inf")
    number = sample.uniform(row.seed, row.position)
    found = []
    for part in (1.0, 1 - 1e-6, 1 + 1e-6):  # a weight's last bit may move what top_p keeps by a token
        share = sample.probabilities(logits, row._replace(top_p=min(1.0, row.top_p * part)))
        after = float(np.cumsum(share)[token])
        found.append(max(after - share[token] - number, number - after, 0.0) if share[token] else float("inf"))
    return min(found)


def _cache(facts: Mapping[str, Any], blocks: int, device: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """k, v and their scales; every block is one of 64, stored as the reference stores."""
    form, dim = str(facts["cache"]), int(facts["head_dim"])
    heads, page, kind = int(facts["num_kv_heads"]), int(facts["block_size"]), CACHE_FORMATS[form]
    sides: list[Tensor] = []
    scales: list[Tensor | None] = []
    for _ in range(2):
        scale = (torch.rand(heads, dim, device=device) * 2 + 1) / kind.top if kind.top else None
        cells = kv_cells.store(torch.randn(64, page, heads, dim, device=device), scale, form).transpose(1, 2)
        sides.append(cells[torch.randint(0, 64, (blocks,), device=device)])
        scales.append(scale)
    return sides[0].contiguous(), sides[1].contiguous(), scales[0], scales[1]


def _rope_write(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    heads, kv_heads, dim = (int(facts[name]) for name in ("num_heads", "num_kv_heads", "head_dim"))
    half, page, form = int(facts["rotary_dim"]) // 2, int(facts["block_size"]), str(facts["cache"])
    k, v, k_scale, v_scale = _cache(facts, -(-rows // page) + 1, device)
    angle = torch.rand(length, half, device=device) * 6
    slots = torch.randperm(k.shape[0] * page, device=device)[:rows].int()
    slots[rows // 2] = -1
    norms = [torch.rand(dim, device=device) if facts["qk_norm"] else None for _ in range(2)]
    values = {
        "qkv": random_half(rows, (heads + 2 * kv_heads) * dim, device=device), "slot_mapping": slots,
        "positions": torch.randint(0, length, (rows,), dtype=torch.int32, device=device), "cos": angle.cos(),
        "sin": angle.sin(), "q_norm": norms[0], "k_norm": norms[1], "k_scale": k_scale, "v_scale": v_scale,
        "k_cache": k, "v_cache": v, "q_out": torch.empty(rows, heads * dim, dtype=torch.float16, device=device),
        "eps": float(facts["eps"]), "offset": float(facts["offset"]),
    }  # fmt: skip
    before = {"k_cache": k.clone(), "v_cache": v.clone()}
    want_k, want_v = k.clone(), v.clone()
    q = qk_norm_rope_kv_write.reference(
        values["qkv"].float(), values["positions"], slots, values["cos"], values["sin"], *norms, values["eps"],
        values["offset"], want_k, want_v, k_scale, v_scale, heads, kv_heads, dim, form,
    )  # fmt: skip

    def read(cells: Tensor) -> Tensor:
        return kv_cells.load(cells, form, dim)

    # A key at the edge between two codes may round either way after a different last bit.
    steps = {"INT8": (0.0, 1.0), "FP8": (0.125, 2.0**-9), "FP16": (2e-3, 1e-5), "BF16": (8e-3, 1e-5)}
    stored = steps[form] if form in steps else (0.0, 1.1 / 15 * float(read(want_k).abs().max()) * 2)
    return Case(
        values, {"rows": rows, "n": 0}, {"q_out": q, "k_cache": want_k, "v_cache": want_v},
        {"q_out": (1e-3, 1e-5), "k_cache": stored, "v_cache": stored}, before,
        {"k_cache": read, "v_cache": read}, unread=frozenset({"k_cache", "v_cache"}),
        also_moved=2 * rows * kv_heads * CACHE_FORMATS[form].cell_bytes(dim),
    )  # fmt: skip


def _attention(facts: Mapping[str, Any], rows: int, length: int, device: str) -> Case:
    """Decode of `rows` sequences of about `length` positions, with several the last a padded one; or a step of `rows`
    tokens of prompts: the end of one of `length`, another from its first token, a token of decode, padding."""
    if facts["phase"] == "decode":
        lengths, counts = [max(1, length - 7 * row) for row in range(rows)], [1] * rows
        if rows > 1:
            lengths[-1] = 0
        return _attended(facts, lengths, counts, rows, device)
    padding, one = int(rows > 3), int(rows > 2)
    whole = (rows - padding - one) // 2
    chunk = rows - padding - one - whole
    return _attended(facts, [max(length, chunk), whole, 17 * one, 0], [chunk, whole, one, 0], rows, device)


def _attended(facts: Mapping[str, Any], lengths: list[int], counts: list[int], rows: int, device: str) -> Case:
    """The last `counts` tokens of sequences of `lengths`, and rows of no sequence behind them."""
    from quantkit_kernels.triton.paged_attention import workspace

    heads, kv_heads, dim = (int(facts[name]) for name in ("num_heads", "num_kv_heads", "head_dim"))
    page, form, sequences = int(facts["block_size"]), str(facts["cache"]), len(lengths)
    blocks = [-(-length // page) for length in lengths]
    k, v, k_scale, v_scale = _cache(facts, sum(blocks), device)
    table, order = torch.zeros(sequences, max(blocks), dtype=torch.int32), torch.randperm(sum(blocks)).int()
    for row, count in enumerate(blocks):
        table[row, :count] = order[sum(blocks[:row]) :][:count]
    # A sequence of no length gets zeros, which the reference makes of tokens of no sequence.
    real = [count if length else 0 for count, length in zip(counts, lengths, strict=True)]
    values: dict[str, Any] = {
        "q": random_half(rows, heads * dim, device=device), "k_cache": k, "v_cache": v, "k_scale": k_scale,
        "v_scale": v_scale, "block_table": table.to(device), "query_start_loc": _starts(counts, device),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device), "scale": float(facts["scale"]),
        "softcap": float(facts["softcap"]) or 1.0, "window": int(facts["window"]) or NO_WINDOW,
        "table_width": table.shape[1], "sequences": sequences, "tokens": rows,
    }  # fmt: skip
    values["out"] = torch.empty_like(values["q"])
    expected = paged_attention.reference(
        values["q"].float(), k, v, k_scale, v_scale, values["block_table"], _starts(real, device), values["seq_lens"],
        heads, kv_heads, dim, form, values["scale"], int(facts["window"]) or None, float(facts["softcap"]) or None,
    )  # fmt: skip
    if facts["phase"] == "decode":
        parts = workspace(sequences, heads, dim, torch.device(device))
        values |= {name: part.fill_(float("nan")) for name, part in zip(("partial", "log_sum"), parts, strict=True)}
    window = values["window"]
    ends = [range(length - count + 1, length + 1) for count, length in zip(real, lengths, strict=True)]
    seen = sum(min(keys, window) for each in ends for keys in each)
    cells = sum(min(length, window + count) for count, length in zip(real, lengths, strict=True))
    bound = (8 / 3 * 1e-3, 4e-3) if form == "INT4" else (2e-3, 3e-3)
    return Case(
        values, {"rows": rows, "sequences": sequences, "n": 0}, {"out": expected}, {"out": bound},
        operations=4.0 * seen * heads * dim,
        also_moved=2 * cells * kv_heads * CACHE_FORMATS[form].cell_bytes(dim),
        unread=frozenset({"k_cache", "v_cache", "partial", "log_sum"}),
    )  # fmt: skip


def _starts(counts: list[int], device: str) -> Tensor:
    return torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32, device=device)


_BUILDERS: dict[str, Callable[[Mapping[str, Any], int, int, str], Case]] = {
    "embedding": _embedding,
    "linear": _linear,
    "rms_norm": _norm,
    "add_rms_norm": _norm,
    "gated_act": _gated_act,
    "quantize_per_token": _quantize,
    "qk_norm_rope_kv_write": _rope_write,
    "paged_attention": _attention,
    "softcap": _softcap,
    "sample": _sample,
    "moe_route": experts.route,
    "moe_linear": experts.linear,
    "moe_sum": experts.weighted_sum,
}


def small(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """The same facts at sizes that the interpreter gets through."""
    sizes: dict[str, Fact] = {
        "n": 48,
        "k": 1024 if facts["op"] == "linear" and facts.get("rows") == "few" else 256,
        "width": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab": 5000,
    }
    return {**facts, **{name: value for name, value in sizes.items() if name in facts}}
