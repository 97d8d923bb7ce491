"""KernelSpec: one description of a Triton kernel, from which it is launched, compiled ahead of time and listed.

Facts are a plain dictionary about one place in a model: they come from a program node, name no quantkit type, and
hold whatever the kernel's op needs. A kernel reads what it knows and ignores the rest. Every set of facts holds

    op      the program op: embedding, linear, add_rms_norm, rms_norm, qk_norm_rope_kv_write, gated_act,
            paged_attention, softcap, sample, quantize_per_token, moe_route, moe_linear, moe_sum
    sm      the target's compute capability as a number: 80, 86, 89, 90, 100, 120
    phase   "decode" (one token a sequence) or "prefill"
    rows    "few" (at most 16 rows) or "many"
    dtype   the activations' type: "fp16"

and, by op,

    linear                  n, k, bits (4, 8), group_size (0: one scale a row), symmetric, bias, scale ("fp16", "bf16");
                            8-bit activations add quant; measured choices (`tuning`) add block_n, stages, splits
    embedding               width, table (its type: "fp16", "bf16", "fp32"), scale
    rms_norm, add_rms_norm  width, eps, offset
    qk_norm_rope_kv_write   num_heads, num_kv_heads, head_dim, rotary_dim, qk_norm, eps, offset, block_size, cache (a
                            name of `cache_formats`: "INT8")
    gated_act               width (of the result), activation
    quantize_per_token      width, quant
    paged_attention         num_heads, num_kv_heads, head_dim, cache, block_size, scale, softcap (0.0: none),
                            window (0: none)
    softcap                 width, softcap (dtype is the logits')
    sample                  vocab (dtype is the logits')
    moe_route               experts, top_k, renormalize (weights of a token's experts sum to 1); dtype is the logits'
    moe_linear              experts, top_k, share (rows of the result that read a row of x: top_k or 1) and, as linear,
                            n, k, bits (4, 8, 16), group_size, symmetric, scale (of no use to 16 bits)
    moe_sum                 width, top_k

Activations of 8 bits, codes with one dynamic scale a row, have the fact

    quant   "int8" or "fp8" (e4m3, from sm_89); absent or "": they are 16-bit floats

in a linear about x, and about the weight's codes, which are then of the same type, one scale a row (FP32 scales too:
"fp32"); in norms and gated_act about the output, where `keep` asks for the 16-bit output beside it.

A pointer that is neither an input nor an output of the op is scratch that its launches share: `partial` of a linear
(`split_k.py`), `partial` and `log_sum` of attention.

A kernel's file exports its specs as `SPECS`; `quantkit_kernels.triton.kernels()` collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Fact = int | float | str | bool
Facts = Mapping[str, Fact]


@dataclass(frozen=True)
class Signature:
    """How a kernel is specialised for some facts; together the two mappings name every parameter of the function.

    arguments: what a launch passes. A pointer is its type (`"*fp16"`, `"*i8"`, `"*i32"`, `"*fp32"`), taken to be
        16-byte aligned; a number is an example of its value, as Triton specialises integers by divisibility by 16
        (give 16 where the launches' values always divide, and list the parameter in `do_not_specialize` where they may
        not). Floats are passed as FP32.
    constants: the constexpr parameters, and `None` for a pointer that is left out.
    """

    arguments: Mapping[str, str | int | float]
    constants: Mapping[str, int | float | str | bool | None]
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class KernelSpec:
    """One Triton kernel.

    name: unique, as in the artifact's files. op: the program op it implements. function: the `@triton.jit` function.
    refusal: why it cannot serve the facts (of its op), or None where it can; the first spec that can is taken.
    launch: 0; where an op takes several launches one after another, this one's place among them (each is chosen apart).
    phases: the phases of a step in which it is asked.
    optional: where it refuses, its launch is left out, and the op is served without.
    signature: how it is specialised for the facts; equal signatures are compiled once.
    grid: `(signature, sizes) -> (x, y, z)`, the launch's blocks; sizes hold what is known at launch only:
        `rows`, `n`, for attention `sequences` and, for moe_linear, `blocks` (`ops.moe_route.most_blocks`).
    """

    name: str
    op: str
    function: Any
    refusal: Callable[[Facts], str | None]
    signature: Callable[[Facts], Signature]
    grid: Callable[[Signature, Mapping[str, int]], tuple[int, int, int]]
    launch: int = 0
    phases: tuple[str, ...] = ("decode", "prefill")
    optional: bool = False
