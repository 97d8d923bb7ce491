"""`quantkit init`: write a recipe to start from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from quantkit.errors import RecipeError


def init(
    path: Annotated[Path, typer.Argument(help="The recipe to write.")] = Path("recipe.yaml"),
    template: Annotated[str, typer.Option(help="chat, rag, code, minimal, or a model: qwen3-4b, ...")] = "chat",
    source: Annotated[str | None, typer.Option(help="The model: folder, *.gguf, package:NAME/path or hub id.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a recipe to start from."""
    from quantkit.recipe.templates import template_text

    if path.is_dir():
        path = path / "recipe.yaml"
    if source is not None and Path(source).exists():  # as the shell sees it; a recipe's paths start at the recipe
        source = os.path.relpath(Path(source).resolve(), path.resolve().parent)
    text = template_text(template, source)
    if path.exists() and not force:
        raise RecipeError("there already is such a file", where=str(path), next="Choose another name, or --force")
    text, fitted = _fitted(text, source, path.resolve().parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"cannot be written: {error.strerror}", where=str(path)) from None
    todo = "" if source else f"set model.source in {path}, then "
    typer.echo(f"Wrote {path} (template {template}{fitted}). Next: {todo}quantkit plan {path}")


def _fitted(text: str, source: str | None, base: Path) -> tuple[str, str]:
    """The template with a 4-bit group size that divides the model's channels, and words that say so."""
    if source is None or "W4A16_G128" not in text:
        return text, ""
    from quantkit.build.fitting import fitting_group

    size = fitting_group(source, base)
    if size is None:
        return text, "; 4-bit groups of 128, not yet checked against the source"
    if size == 128:
        return text, ""
    return text.replace("W4A16_G128", f"W4A16_G{size}"), f"; 4-bit groups of {size}, since 128 does not divide here"
