"""Which instruction set computes here, told the same way to the build's keys and to the executor."""

from __future__ import annotations

from quantkit.errors import RecipeError
from quantkit_kernels import cpu

REFERENCE = "reference"


def instruction_set() -> str:
    """`avx512`, `avx2` or `portable`, as QUANTKIT_CPU_ISA has it; `reference` where no native library was built.

    RecipeError when the variable names one that is unknown or cannot run here.
    """
    if not cpu.available()[0]:
        return REFERENCE
    try:
        return cpu.isa()
    except ValueError as error:
        raise RecipeError(str(error), where="environment", next="Unset it, or choose one of those") from None
