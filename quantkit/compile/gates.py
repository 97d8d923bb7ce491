"""Static gates: every kernel on every target, compiled and read, as a table that is kept in a file.

A change to a kernel that spills registers, loses 16-byte loads or grows its main loop moves a line of the table
(`kernels/benchmarks/sass_triton_*.json`), which a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from quantkit.compile.aot import specialisation, versions
from quantkit.compile.cache import key_of, read_kernel
from quantkit.compile.crew import Job, compile_all
from quantkit.compile.sass import read_code
from quantkit.compile.targets import TARGETS, capability
from quantkit_kernels.triton import Fact, kernels

_COMMON: dict[str, Fact] = {"phase": "decode", "rows": "few", "dtype": "fp16"}
_LINEAR: dict[str, Fact] = {"op": "linear", "n": 4096, "k": 4096, "bias": False, "scale": "bf16", "symmetric": True}
_NORM: dict[str, Fact] = {"width": 2048, "eps": 1e-6, "offset": 0.0}
_HEADS: dict[str, Fact] = {"num_heads": 32, "num_kv_heads": 8, "cache": "INT8", "block_size": 16}
_ROPE: dict[str, Fact] = {"op": "qk_norm_rope_kv_write", **_HEADS, "eps": 1e-6, "offset": 0.0}
_ATTENTION: dict[str, Fact] = {"op": "paged_attention", **_HEADS, "scale": 0.125, "softcap": 0.0, "window": 0}
_EXPERTS: dict[str, Fact] = {"experts": 8, "top_k": 2}
_PROMPTS: dict[str, Fact] = {"phase": "prefill", "rows": "many"}
BLOCK_K = 128
"""Columns that one turn of a linear kernel's main loop takes."""


def _linear_cases() -> Iterable[tuple[str, str, dict[str, Fact]]]:
    for rows in ("few", "many"):
        for group, symmetric in ((g, s) for g in (32, 64, 128) for s in (True, False)):
            name = f"g{group}{'' if symmetric else ' asymmetric'}"
            facts = {**_LINEAR, "rows": rows, "bits": 4, "group_size": group, "symmetric": symmetric}
            yield f"linear_w4a16_{rows}", name, facts
        yield f"linear_w4a16_{rows}", "g64 K=576 bias", {
            **_LINEAR, "rows": rows, "bits": 4, "group_size": 64, "n": 1536, "k": 576, "bias": True,
        }  # fmt: skip
        eight: dict[str, Fact] = {**_LINEAR, "rows": rows, "bits": 8, "group_size": 0}
        yield f"linear_w8a16_{rows}", "", eight
        for form, quant in (("w8a8", "int8"), ("fp8", "fp8")):
            yield f"linear_{form}_{rows}", "", {**eight, "quant": quant}
            yield f"linear_{form}_{rows}", "K=576 bias", {**eight, "quant": quant, "n": 1536, "k": 576, "bias": True}


def _other_cases() -> Iterable[tuple[str, str, dict[str, Fact]]]:
    yield "embedding", "bf16", {"op": "embedding", "width": 2048, "table": "bf16", "scale": 1.0}
    yield "split_k_reduce", "", {**_LINEAR, "bits": 4, "group_size": 128}
    yield "split_k_reduce", "int8 bias", {**_LINEAR, "bits": 8, "group_size": 0, "bias": True, "quant": "int8"}
    for op in ("rms_norm", "add_rms_norm"):
        yield op, "2048", {**_NORM, "op": op}
    yield "gated_act", "silu", {"op": "gated_act", "width": 8192, "activation": "silu"}
    yield "softcap", "", {"op": "softcap", "width": 256000, "softcap": 30.0}
    yield "sample", "", {"op": "sample", "vocab": 49152}
    yield "qk_norm_rope_kv_write", "INT8 128", {**_ROPE, "head_dim": 128, "rotary_dim": 128, "qk_norm": False}
    for quant in ("int8", "fp8"):
        yield "rms_norm", f"2048 {quant}", {**_NORM, "op": "rms_norm", "quant": quant}
        yield "add_rms_norm", f"16384 {quant} kept", {
            **_NORM, "op": "add_rms_norm", "width": 16384, "quant": quant, "keep": True,
        }  # fmt: skip
        for width in (8192, 28672):
            yield "gated_act_quant", f"silu {width} {quant}", {
                "op": "gated_act", "width": width, "activation": "silu", "quant": quant,
            }  # fmt: skip
        yield "quantize_per_token", f"4096 {quant}", {"op": "quantize_per_token", "width": 4096, "quant": quant}


def _cache_cases() -> Iterable[tuple[str, str, dict[str, Fact]]]:
    sizes = [(form, head_dim) for form in ("INT8", "FP8", "INT4", "FP16", "BF16") for head_dim in (64, 128, 256)]
    for form, head_dim in (*sizes, *((form, head_dim) for form in ("INT8", "INT4") for head_dim in (80, 96))):
        dims: dict[str, Fact] = {"head_dim": head_dim, "rotary_dim": head_dim, "cache": form}
        yield "qk_norm_rope_kv_write", f"{form} {head_dim} qk-norm", {**_ROPE, **dims, "qk_norm": True}
        yield "paged_attention", f"{form} {head_dim}", {**_ATTENTION, **dims}
        yield "paged_prefill", f"{form} {head_dim}", {**_ATTENTION, **_PROMPTS, **dims}
    capped: dict[str, Fact] = {"head_dim": 128, "softcap": 30.0, "window": 1024}
    yield "paged_attention", "INT8 128 softcap", {**_ATTENTION, **capped}
    yield "paged_prefill", "INT8 128 softcap", {**_ATTENTION, **_PROMPTS, **capped}
    for head_dim in (64, 128):
        yield "paged_attention_reduce", str(head_dim), {**_ATTENTION, "head_dim": head_dim}


def _moe_cases() -> Iterable[tuple[str, str, dict[str, Fact]]]:
    every: dict[str, Fact] = {**_LINEAR, **_EXPERTS, "op": "moe_linear", "n": 2048, "k": 2048, "share": 2}
    for rows in ("few", "many"):
        for group, symmetric in ((g, s) for g in (32, 64, 128) for s in (True, False)):
            name = f"g{group}{'' if symmetric else ' asymmetric'}"
            yield f"moe_linear_w4a16_{rows}", name, {
                **every, "rows": rows, "bits": 4, "group_size": group, "symmetric": symmetric,
            }  # fmt: skip
        yield f"moe_linear_w4a16_{rows}", "g64 K=576 pairs", {
            **every, "rows": rows, "bits": 4, "group_size": 64, "n": 1536, "k": 576, "share": 1,
        }  # fmt: skip
        for form, bits in (("w8a16", 8), ("f16", 16)):
            yield f"moe_linear_{form}_{rows}", "", {**every, "rows": rows, "bits": bits, "group_size": 0}
        for experts, top_k in ((8, 2), (128, 8)):
            route: dict[str, Fact] = {"op": "moe_route", "rows": rows, "experts": experts, "top_k": top_k}
            yield "moe_order", f"{experts} {rows}", {**route, "renormalize": True}
    yield "moe_linear_w4a16_few", "g128 wide", {**every, "n": 4096, "bits": 4, "group_size": 128}
    for experts, top_k, renormalize in ((8, 2, True), (60, 4, False), (128, 8, True)):
        yield "moe_topk", str(experts), {
            "op": "moe_route", "experts": experts, "top_k": top_k, "renormalize": renormalize,
        }  # fmt: skip
    yield "moe_sum", "2048 2", {"op": "moe_sum", "width": 2048, "top_k": 2}


CASES: dict[str, tuple[str, dict[str, Fact]]] = {
    f"{kernel} {name}".strip(): (kernel, {**_COMMON, **facts})
    for kernel, name, facts in (*_linear_cases(), *_other_cases(), *_cache_cases(), *_moe_cases())
}
"""Name -> kernel and facts, over every kernel and what changes its code most."""


def refusal(case: str, target: str) -> str | None:
    """Why there is no code of that case for the target, if so."""
    kernel, facts = CASES[case]
    return kernels()[kernel].refusal({**facts, "sm": capability(target)})


def measure(
    cases: Iterable[str], targets: Iterable[str], cache: Path, workers: int, step: Callable[[int, int, str], None]
) -> dict[str, dict[str, Any]]:
    """Compile the named cases for the targets that can have them and read what came out: `{"<case> | <target>": row}`.

    A row: registers, spill_bytes, shared_bytes, instructions, matrix, wide_loads (16 bytes), local (spilling
    instructions), loop and loop_barriers (`sass.Code`), and for linear kernels per_weight: the main loop's instructions
    a thread for each weight.
    """
    specs = kernels()
    keys: dict[tuple[str, str], str] = {}
    jobs: dict[str, dict[str, Job]] = {}
    for target in targets:
        for case in cases:
            if refusal(case, target) is not None:
                continue
            kernel, plain = CASES[case]
            spec, facts = specs[kernel], {**plain, "sm": capability(target)}
            key = keys[case, target] = key_of(specialisation(spec, facts), target, versions(target))
            jobs.setdefault(target, {})[key] = Job(key, spec.function.__module__, kernel, facts)
    absent = {
        target: [job for key, job in wanted.items() if read_kernel(cache, key) is None]
        for target, wanted in jobs.items()
    }
    compile_all(absent, cache, workers, step)
    return {f"{case} | {target}": _row(cache, key) for (case, target), key in keys.items()}


def _row(cache: Path, key: str) -> dict[str, Any]:
    made = read_kernel(cache, key)
    if made is None:
        raise RuntimeError(f"{key} vanished from {cache}")
    code, facts = read_code(made.file("cubin").read_bytes()), made.metadata
    row = {
        "registers": facts["registers"],
        "spill_bytes": facts["spill_bytes"],
        "shared_bytes": facts["shared_bytes"],
        "instructions": code.instructions,
        "matrix": code.matrix,
        "wide_loads": code.wide_loads,
        "local": code.local,
        "loop": code.loop,
        "loop_barriers": code.loop_barriers,
    }
    if "BLOCK_N" in facts["constants"] and facts["op"] in ("linear", "moe_linear"):
        weights = facts["constants"]["BLOCK_N"] * BLOCK_K
        row["per_weight"] = round(code.loop * 32 * facts["num_warps"] / weights, 2)
    return row


def tool_versions(targets: Iterable[str] = TARGETS) -> Mapping[str, str]:
    """`triton version, ptxas version` by target: the table holds for these only."""
    made = {target: versions(target) for target in targets}
    return {target: f"triton {of['triton']}, ptxas {of['ptxas']}" for target, of in made.items()}
