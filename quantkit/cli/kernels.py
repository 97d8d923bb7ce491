"""`quantkit kernels`: the GPU kernels of an artifact."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quantkit.terminal import printable

kernels = typer.Typer(name="kernels", help="Kernels compiled ahead of time into an artifact.", no_args_is_help=True)


@kernels.callback()
def group() -> None:
    """Kernels compiled ahead of time into an artifact."""


@kernels.command("list")
def list_kernels(
    artifact: Annotated[Path, typer.Argument(help="The artifact's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON, sizes in bytes.")] = False,
) -> None:
    """List kernel × target × bucket class with registers, spilled bytes, shared memory and size."""
    from quantkit.artifact.kernels import read_buckets, read_kernels
    from quantkit.artifact.read import open_artifact
    from quantkit.compile.table import as_data, as_text

    opened = open_artifact(artifact, check="sizes")
    targets, buckets = read_kernels(opened), read_buckets(opened)
    typer.echo(json.dumps(as_data(targets, buckets), indent=2) if as_json else printable(as_text(targets, buckets)))


@kernels.command("check")
def check_kernels(
    artifact: Annotated[Path, typer.Argument(help="The artifact's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check that every kernel is whole, is what its description says, and fits its target; exits 3 otherwise."""
    from quantkit.artifact.read import open_artifact
    from quantkit.compile.check import check_targets

    checked = check_targets(open_artifact(artifact, check="full"))
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in checked], indent=2))
        return
    for each in checked:
        typer.echo(printable(each.line()))
    if not checked:
        typer.echo("no kernels: the recipe's compile.targets is empty")
