"""`quantkit verify`: is an artifact whole, unchanged and usable?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def verify(
    artifact: Annotated[Path, typer.Argument(help="The artifact's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check every byte and number of an artifact."""
    from quantkit.artifact.verify import verify as check

    report = check(artifact)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
        return
    typer.echo(
        f"{artifact}: whole. {report.files} payload files, {report.payload_bytes / 1e6:,.1f} MB, "
        f"{report.weights} weights checked\n{report.payload_digest}"
    )
