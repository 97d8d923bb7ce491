"""What the artifact is compared with: the unquantized baseline, and a ladder of plain round-to-nearest models.

The rungs are what anyone gets without calibration: min-max round-to-nearest on every decoder matrix alike, output head
and KV cache unquantized. RTN-INT4 is symmetric in the largest group (128, 64, 32) that divides every matrix; a matrix
that none divides stays in 8 bits, which makes the comparison stricter. RTN-INT8 has one scale an output channel.
"""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import RecipeError
from quantkit.gate.evaluate import Variant
from quantkit.models import ModelSource
from quantkit.models.source_weights import SourceWeights
from quantkit.program import build_program, fuse, lower_precision
from quantkit.program.ir import Program
from quantkit.quantize.weights import RtnWeights

INT4 = "RTN-INT4"
INT8 = "RTN-INT8"
HEAD = "lm_head"
_GROUPS = (128, 64, 32)


def baseline(source: ModelSource, threads: int | None, backend: str, spill: Path | None = None) -> Variant:
    """The source in its own precision with a float32 cache."""
    program = lower_precision(fuse(build_program(source.spec)), {}, "FP32")
    return Variant("baseline", program, SourceWeights(source), threads, backend, spill)


def rung(source: ModelSource, name: str, threads: int | None, backend: str, spill: Path | None = None) -> Variant:
    """RTN-INT4 or RTN-INT8 of the source."""
    program = fuse(build_program(source.spec))
    lowered = lower_precision(program, rung_schemes(program, name), "FP32")
    return Variant(name, lowered, RtnWeights(source, search="minmax"), threads, backend, spill)


def rung_schemes(program: Program, name: str = INT4) -> dict[str, str]:
    """Group -> scheme of a rung on the fused `program`.

    RecipeError when no group of inputs can be stored in 4 bits: there is nothing to compare with then.
    """
    units = {group: weight.shape[1] for group, weight in program.groups().items() if group != HEAD}
    if name == INT8:
        return dict.fromkeys(units, "W8A16")
    fitting = {group for group, columns in units.items() if columns % _GROUPS[-1] == 0}
    if not fitting:
        odd, columns = next(iter(units.items()))
        raise RecipeError(
            f"no RTN-INT4 to compare with: {columns} input channels divide by none of {', '.join(map(str, _GROUPS))}",
            where=odd,
            next="The gate cannot judge a model of this shape",
        )
    size = next(size for size in _GROUPS if all(units[group] % size == 0 for group in fitting))
    return {group: f"W4A16_G{size}" if group in fitting else "W8A16" for group in units}


def count_parameters(program: Program) -> int:
    """Weights of a model, those shared by several uses counted once."""
    rows: dict[tuple[str, int], int] = {}
    for weight in program.weights.values():
        width = weight.shape[1] if len(weight.shape) == 2 else 1
        for part in weight.parts:
            rows[part.tensor, width] = max(rows.get((part.tensor, width), 0), part.stop)
    return sum(count * width for (_, width), count in rows.items())
