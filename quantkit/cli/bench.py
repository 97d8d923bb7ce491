"""`quantkit bench`: measure an artifact on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(help="Measure an artifact on this machine.", no_args_is_help=True)


@bench.command()
def throughput(
    artifact: Annotated[Path, typer.Argument(help="The artifact's folder, or an unquantized source.")],
    threads: Annotated[int, typer.Option(help="Threads of the engine.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
) -> None:
    """Prefill, decode and serving speed in tokens/s, greedy, on random tokens without the prefix cache."""
    from quantkit.bench.throughput import load, throughput

    results = {}
    for name, speed in throughput(load(artifact, threads)):
        results[name] = speed
        if not as_json:
            typer.echo(f"{name:>12} {speed:10.1f} tokens/s")
    if as_json:
        typer.echo(json.dumps(results))
