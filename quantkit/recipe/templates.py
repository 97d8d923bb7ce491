"""The starting points of `quantkit init`, kept as recipes under `recipes/templates/`."""

from __future__ import annotations

from quantkit.errors import RecipeError
from quantkit.resources import resource

TEMPLATES = ("chat", "rag", "code", "minimal")
_SOURCE_LINE = "  source: MODEL"


def template_text(name: str, source: str | None = None) -> str:
    """The template's YAML; `source`, when given, replaces its placeholder model. RecipeError names the templates."""
    if name not in TEMPLATES:
        raise RecipeError(f"no template {name!r}", next=f"Templates: {', '.join(TEMPLATES)}")
    text = resource(f"recipes/templates/{name}.yaml").read_text(encoding="utf-8")
    if source is None:
        return text
    quoted = source.replace("'", "''")
    return text.replace(_SOURCE_LINE, f"  source: '{quoted}'")
