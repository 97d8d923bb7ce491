"""The starting points of `quantkit init`: by use, kept under `recipes/templates/`, and by model, ready recipes."""

from __future__ import annotations

import re

from quantkit.errors import RecipeError
from quantkit.resources import resource

TEMPLATES = ("chat", "rag", "code", "minimal")
MODELS = ("llama-3.2-1b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-4b", "gemma-3-1b", "mistral-7b")
_SOURCE_LINE = re.compile(r"^  source: .*$", re.MULTILINE)


def template_text(name: str, source: str | None = None) -> str:
    """The template's YAML; `source`, when given, replaces its placeholder model. RecipeError names the templates."""
    if name not in (*TEMPLATES, *MODELS):
        raise RecipeError(f"no template {name!r}", next=f"Templates: {', '.join((*TEMPLATES, *MODELS))}")
    folder = "recipes/templates" if name in TEMPLATES else "recipes"
    text = resource(f"{folder}/{name}.yaml").read_text(encoding="utf-8")
    if source is None:
        return text
    quoted = source.replace("'", "''")
    return _SOURCE_LINE.sub(lambda _: f"  source: '{quoted}'", text, count=1)
