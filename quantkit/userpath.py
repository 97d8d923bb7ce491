"""Paths as users write them: relative to a recipe or the present folder, with `~`, and now and then with nonsense."""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import RecipeError

_SHOWN = 80


def user_path(text: str, base: Path, *, where: str = "") -> Path:
    """`text` as a path, `~` expanded, relative to `base`; it need not exist.

    RecipeError (at `where`) for one that no file system could hold or show: an unknown user's home, a NUL, a name that
    is too long, a circle of links, a folder that may not be entered.
    """
    shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    try:
        path = base / Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        raise RecipeError(f"{shown!r} cannot be looked up: {error.strerror}", where=where) from None
    except (RuntimeError, ValueError) as error:
        raise RecipeError(f"{shown!r} is not a path: {error}", where=where) from None
    return path
