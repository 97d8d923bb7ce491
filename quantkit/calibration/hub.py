"""Files of a hub data set, named `hub:ORG/NAME` or `hub:ORG/NAME/GLOB`: looked up in the local cache, else fetched."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from quantkit.calibration.rows import FORMATS
from quantkit.errors import PreflightError, RecipeError
from quantkit.models.locate import hub_snapshot

HUB = "hub:"
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+))?")


@cache
def hub_files(text: str, where: str = "") -> tuple[Path, ...]:
    """The data files that `text` names, sorted by path; without a glob all with `train` in their path, else all.

    Raises:
        RecipeError: (at `where`) no such form, or the data set holds no file like that.
        PreflightError: not in the cache, and no hub can be reached.
    """
    found = _NAME.fullmatch(text.removeprefix(HUB))
    if found is None:
        raise RecipeError(f"{text[:80]!r} must read hub:ORG/NAME or hub:ORG/NAME/FILES", where=where)
    name, glob = found[1], found[2]
    patterns = [glob] if glob else [f"*{suffix}" for suffix in FORMATS]
    try:
        folder = hub_snapshot(name, patterns, kind="dataset", instead="its JSONL, Parquet or CSV files")
    except PreflightError as error:
        raise PreflightError(error.what, where=where or error.where, next=error.next) from None
    held = sorted(path for path in folder.rglob("*") if path.suffix.lower() in FORMATS and path.is_file())
    names = {path: path.relative_to(folder).as_posix() for path in held}
    if glob:
        files = [path for path in held if fnmatchcase(names[path], glob)]
    else:
        files = [path for path in held if "train" in names[path]] or held
    if not files:
        raise RecipeError(
            f"data set {name} holds no {glob or 'data file'}",
            where=where,
            next=f"Files there: {', '.join(list(names.values())[:5]) or 'none of a known kind'}",
        )
    return tuple(files)
