"""The group size that a model's shapes allow, for a recipe that is being started."""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import QuantkitError
from quantkit.models import open_source
from quantkit.program import build_program, fuse

SIZES = (128, 64, 32)


def fitting_group(source: str, base: Path) -> int | None:
    """The largest of SIZES that divides the input channels of every decoder matrix of `source`.

    None where none does, or where the source cannot be opened: `plan` says why, with the recipe's line.
    """
    try:
        groups = fuse(build_program(open_source(source, base=base).spec)).groups()
    except QuantkitError:
        return None
    widths = [weight.shape[1] for name, weight in groups.items() if name != "lm_head"]
    return next((size for size in SIZES if all(width % size == 0 for width in widths)), None)
