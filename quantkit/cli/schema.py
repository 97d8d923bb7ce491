"""`quantkit schema`: the recipe's JSON Schema, for editors."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the recipe's JSON Schema, for editors."""
    from quantkit.recipe.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
