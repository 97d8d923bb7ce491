"""The group size that a model's shapes allow, for a recipe that is being started."""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import QuantkitError
from quantkit.models import open_source, spec_from_config
from quantkit.models.safetensors_reader import load_json
from quantkit.program import build_program, fuse

SIZES = (128, 64, 32)


def fitting_group(source: str, base: Path) -> int | None:
    """The largest of SIZES that divides the input channels of every decoder matrix of `source`.

    None where none does, or where the source cannot be opened: `plan` says why, with the recipe's line.
    """
    config = base / source / "config.json"
    try:
        spec = (
            spec_from_config(load_json(config), str(config))
            if config.is_file()
            else open_source(source, base=base).spec
        )
        groups = fuse(build_program(spec)).groups()
    except QuantkitError:
        return None
    widths = [weight.shape[1] for name, weight in groups.items() if name != "lm_head"]
    return next((size for size in SIZES if all(width % size == 0 for width in widths)), None)
