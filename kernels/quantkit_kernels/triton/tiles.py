"""Tile sizes of the linear kernels and what their signatures share.

Chosen by reading compiled code where nothing was timed (`tuning`): no GPU has run these yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton

from quantkit_kernels.triton.spec import Facts, Signature

FEW_ROWS = 16
"""Rows of x that one matrix instruction takes: the most a `few` kernel serves."""
WIDE = 4096
"""Rows of the weight from which a `few` kernel takes tiles of 64; below, tiles of 32."""


def few_block(facts: Facts) -> int:
    """Rows of the weight that a program of a `few` kernel takes: as was measured (`tuning`), else by the matrix."""
    return int(facts.get("block_n") or (64 if int(facts["n"]) >= WIDE else 32))


def tile(facts: Facts, many: int) -> tuple[int, int]:
    """Rows of the weight that a program takes, and loads under way: as measured (`tuning`), else by the bucket class.

    many: rows of the weight for a `many` kernel.
    """
    few = facts["rows"] == "few"
    block_n = few_block(facts) if few else int(facts.get("block_n") or many)
    return block_n, int(facts.get("stages") or (4 if few else 3))


def linear_signature(facts: Facts, pointers: Mapping[str, str | None], constants: Mapping[str, Any]) -> Signature:
    """The signature of a linear kernel for its bucket class; a pointer whose type is None is left out.

    STAGES is a constant too: a loop that states its stages has all of its loads pipelined, those of scales and zero
    points included, and not only the ones that feed a dot.
    """
    n, k = int(facts["n"]), int(facts["k"])
    few = facts["rows"] == "few"
    block_n, stages = tile(facts, 64)
    arguments: dict[str, str | int | float] = {name: type_ for name, type_ in pointers.items() if type_ is not None}
    return Signature(
        arguments={**arguments, "rows": FEW_ROWS, "n": n, "k": k},
        constants={
            **{name: None for name, type_ in pointers.items() if type_ is None},
            **constants,
            "WHOLE_BLOCKS": k % 128 == 0,
            "BLOCK_M": FEW_ROWS if few else 32 if facts["group_size"] == 32 else 64,  # 64 spills on sm_120
            "BLOCK_N": block_n,
            "STAGES": stages,
        },
        num_warps=block_n // 16,
        num_stages=stages,
    )


def form_refusal(facts: Facts, bits: int, quant: str | None = None) -> str | None:
    """Why a kernel for weights of `bits` and activations that come as `quant` cannot serve the facts, if so."""
    given = facts.get("quant") or None
    if facts["bits"] == bits and given == quant and facts["dtype"] == "fp16":
        return None
    return f"no kernel for {facts['bits']}-bit weights and {given or facts['dtype']} activations"


def linear_grid(how: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """Blocks of a launch: tiles of the weight's rows, tiles of x's rows, splits of K."""
    block_m, block_n, parts = (int(str(how.constants.get(name, 1))) for name in ("BLOCK_M", "BLOCK_N", "SPLITS"))
    return triton.cdiv(sizes["n"], block_n), triton.cdiv(sizes["rows"], block_m), parts
