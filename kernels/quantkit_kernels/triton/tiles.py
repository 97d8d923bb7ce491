"""Tile sizes of the linear kernels and what their signatures share.

Chosen by reading compiled code, not by timing: no GPU has run these yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton

from quantkit_kernels.triton.spec import Facts, Signature

FEW_ROWS = 16
"""Rows of x that one matrix instruction takes: the most a `few` kernel serves."""
WIDE = 4096
"""Rows of the weight from which a GPU has enough tiles of 64 to be busy; below, tiles of 32."""


def linear_signature(facts: Facts, pointers: Mapping[str, str | None], constants: Mapping[str, Any]) -> Signature:
    """The signature of a linear kernel for its bucket class; a pointer whose type is None is left out.

    STAGES is a constant too: a loop that states its stages has all of its loads pipelined, those of scales and zero
    points included, and not only the ones that feed a dot.
    """
    n, k = int(facts["n"]), int(facts["k"])
    many, wide = facts["rows"] == "many", n >= WIDE
    block_n, stages = 64 if many or wide else 32, 3 if many else 4
    arguments: dict[str, str | int | float] = {name: type_ for name, type_ in pointers.items() if type_ is not None}
    return Signature(
        arguments={**arguments, "rows": FEW_ROWS, "n": n, "k": k},
        constants={
            **{name: None for name, type_ in pointers.items() if type_ is None},
            **constants,
            "WHOLE_BLOCKS": k % 128 == 0,
            "BLOCK_M": FEW_ROWS if not many else 32 if facts["group_size"] == 32 else 64,  # 64 spills on sm_120
            "BLOCK_N": block_n,
            "STAGES": stages,
        },
        num_warps=block_n // 16,
        num_stages=stages,
    )


def linear_grid(how: Signature, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """Blocks of a launch: tiles of the weight's rows, then tiles of x's rows."""
    block_m, block_n = how.constants["BLOCK_M"], how.constants["BLOCK_N"]
    return triton.cdiv(sizes["n"], block_n), triton.cdiv(sizes["rows"], block_m), 1
