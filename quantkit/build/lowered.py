"""The program as the artifact stores it: precision chosen, buffers planned."""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.build.context import Context
from quantkit.program import lower_precision, plan_buffers, verify
from quantkit.program.ir import Program


def lowered_program(context: Context, schemes: Mapping[str, str]) -> Program:
    """The build's program with `schemes` of the units and the head, the recipe's compute and KV format; verified."""
    recipe = context.loaded.recipe
    lowered = lower_precision(context.program, dict(schemes), recipe.kv_cache.format, recipe.compute)
    program = plan_buffers(lowered)
    verify(program)
    return program
