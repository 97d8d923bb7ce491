"""Finds the data that ships with quantkit: `recipes/`, `calib/` and `evals/`.

In a checkout (editable install) they lie beside the package; in an installed wheel under `quantkit/data/`.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from quantkit.errors import RecipeError

KINDS = ("recipes", "calib", "evals")
_PACKAGE = Path(__file__).resolve().parent


def resource(path: str) -> Path:
    """The file or folder `kind/...` (kind: recipes, calib or evals); RecipeError when it does not ship."""
    parts = PurePosixPath(path).parts
    if not parts or parts[0] not in KINDS or ".." in parts:
        raise RecipeError(f"no packaged data at {path!r}", next=f"It starts with one of: {', '.join(KINDS)}")
    for root in (_PACKAGE / "data", _PACKAGE.parent):
        found = root.joinpath(*parts)
        if found.exists():
            return found
    folder = next((r / parts[0] for r in (_PACKAGE / "data", _PACKAGE.parent) if (r / parts[0]).is_dir()), None)
    known = sorted(p.name for p in folder.iterdir()) if folder else []
    raise RecipeError(f"no packaged data at {path!r}", next=f"{parts[0]}/ holds: {', '.join(known) or 'nothing'}")
