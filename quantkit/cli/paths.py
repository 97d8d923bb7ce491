"""Where an artifact goes when the command line does not say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[Path, typer.Argument(help="The recipe.", metavar="RECIPE")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="Overlay one value, as in quantization.budget_bits=5; may be repeated."),
]
OutPath = Annotated[
    Path | None,
    typer.Option("--out", help="The artifact's folder.", show_default="artifacts/NAME, NAME as in the recipe"),
]


def artifact_folder(out: Path | None, name: str) -> Path:
    """`out`, or `artifacts/NAME` in the working folder."""
    return out if out is not None else Path("artifacts") / name
