"""Which op can run natively where: asked once, when a program is bound."""

from __future__ import annotations

from typing import Any

from quantkit_kernels import cpu
from quantkit_kernels.cache_formats import CACHE_FORMATS

WEIGHT_BITS = (4, 8, 16, 32)
ACTIVATIONS = ("silu", "gelu_tanh")
CPU_OPS = (
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "add",
    "linear",
    "gated_act",
    "qk_norm_rope_kv_write",
    "paged_attention",
    "logits",
)


def _one_of(what: str, value: Any, known: tuple[Any, ...]) -> tuple[bool, str]:
    listed = ", ".join(str(item) for item in known)
    return (True, "") if value in known else (False, f"{what} {value!r} has no native kernel: {listed} have")


def can_implement(op: str, device: str, **facts: Any) -> tuple[bool, str]:
    """Whether `op` has a native kernel on `device` ("cpu"), and why not.

    Facts, each optional: bits (4, 8, 16, 32), activation, cache (a name of CACHE_FORMATS), num_heads, num_kv_heads.
    Returns (True, instruction set) or (False, reason). Raises ValueError where QUANTKIT_CPU_ISA names an instruction
    set that cannot run here.
    """
    if device != "cpu":
        return False, f"no kernels for device {device!r} in this build"
    built, note = cpu.available()
    if not built:
        return False, note
    checks = [_one_of("op", op, CPU_OPS)]
    if "bits" in facts:
        checks.append(_one_of("weight bits", facts["bits"], WEIGHT_BITS))
    if "activation" in facts:
        checks.append(_one_of("activation", facts["activation"], ACTIVATIONS))
    if "cache" in facts:
        checks.append(_one_of("KV cache format", facts["cache"], tuple(CACHE_FORMATS)))
    if "num_heads" in facts and "num_kv_heads" in facts and facts["num_heads"] % facts["num_kv_heads"]:
        checks.append((False, f"{facts['num_heads']} query heads do not share {facts['num_kv_heads']} KV heads evenly"))
    refused = next((reason for fine, reason in checks if not fine), None)
    return (True, cpu.isa()) if refused is None else (False, refused)
