"""`quantkit report`: what was found out about an artifact, as one offline HTML file or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    artifact: Annotated[Path, typer.Argument(help="The artifact's folder.")],
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON; write nothing.")] = False,
) -> None:
    """Write an artifact's report: evidence/report/report.html, readable offline, and report.json."""
    from quantkit.report import gather, write_report

    if as_json:
        typer.echo(json.dumps(gather(artifact).as_dict(), indent=1, ensure_ascii=False))
        return
    page = write_report(artifact)
    typer.echo(str(page))
    if open_it:
        typer.launch(str(page.resolve()))
