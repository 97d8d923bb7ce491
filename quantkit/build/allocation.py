"""Allocation files: what `quantkit search` found, as JSON that another recipe's `quantization.allocation` names.

{"kind": "quantkit-allocation", "version": 1, "average_bits": 4.98, ...,
 "schemes": {"layers.0.qkv": {"scheme": "W8A16", "shape": "960x576"}, ...}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.build.files import write_json
from quantkit.errors import RecipeError
from quantkit.formats.schemes import SCHEMES
from quantkit.program.ir import Weight
from quantkit.yaml_source import read_yaml

KIND, VERSION = "quantkit-allocation", 1
_SHOWN = 60


def write_allocation(
    path: Path, schemes: Mapping[str, str], units: Mapping[str, Weight], about: Mapping[str, Any]
) -> None:
    """Write `schemes` (one for each of `units`) to `path`, with facts `about` them for people to read."""
    rows = {group: {"scheme": schemes[group], "shape": _shape(weight)} for group, weight in units.items()}
    write_json(path, {"kind": KIND, "version": VERSION, **about, "schemes": rows})


def read_allocation(path: Path, units: Mapping[str, Weight]) -> dict[str, str]:
    """`{group: scheme}` for each of `units`, from a file that `write_allocation` (or a person) wrote.

    RecipeError with the file's line: another kind of file or version, a group the model does not have or that the file
    leaves out, an unknown scheme, a shape that is not the model's (it then was made for another one).
    """
    source = read_yaml(path, "allocation", "quantkit search")  # JSON is YAML: every key knows its line
    data = source.data
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise RecipeError("is no allocation file", where=str(path), next="`quantkit search RECIPE -o FILE` writes one")
    if data.get("version") != VERSION:
        raise RecipeError(
            f"allocation version {_shown(data.get('version'))} is not known to this quantkit",
            where=source.where(("version",)) or str(path),
            next=f"It reads version {VERSION}",
        )
    rows = data.get("schemes")
    if not isinstance(rows, dict):
        raise RecipeError("`schemes` must map groups to schemes", where=source.where(("schemes",)) or str(path))
    for group, row in rows.items():
        where = source.where(("schemes", group))
        if group not in units:
            raise RecipeError(f"the model has no group {_shown(group)}", where=where, next=_groups(units))
        if not isinstance(row, dict) or not isinstance(row.get("scheme"), str):
            raise RecipeError(f"{group} needs a scheme", where=where, next='As in {"scheme": "W8A16"}')
        if row["scheme"] not in SCHEMES:
            raise RecipeError(
                f"unknown scheme {_shown(row['scheme'])}", where=where, next=f"Known: {', '.join(SCHEMES)}"
            )
        if row.get("shape", _shape(units[group])) != _shape(units[group]):
            raise RecipeError(
                f"{group} is {_shown(row['shape'])} in this file and {_shape(units[group])} in the model",
                where=where,
                next="The file was made for another model: search again",
            )
    missing = [group for group in units if group not in rows]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RecipeError(f"no scheme for {missing[0]}{more}", where=source.where(("schemes",)))
    return {group: rows[group]["scheme"] for group in units}


def _shape(weight: Weight) -> str:
    return f"{weight.shape[0]}x{weight.shape[1]}"


def _groups(units: Mapping[str, Weight]) -> str:
    names = list(units)
    return f"Its groups are {names[0]} to {names[-1]}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
