"""`quantkit report`: what was found out about an artifact, as one offline HTML file, JSON, JUnit XML or Markdown."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from quantkit.errors import RecipeError


class Form(StrEnum):
    """What a report can be written as."""

    html = "html"
    json = "json"
    junit = "junit"
    markdown = "markdown"


def report(
    artifact: Annotated[Path, typer.Argument(help="The artifact's folder.")],
    form: Annotated[Form | None, typer.Option("--format", help="Print this one form; write nothing.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File for it; without --format, HTML.")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Write an artifact's report in every form into evidence/report/, or one form to the terminal or a file."""
    from quantkit.report import render, write_report

    if as_json and form not in (None, Form.json):
        raise RecipeError("--json and --format ask for different forms", next="Leave one of them out")
    chosen = Form.json if as_json else form
    if output is None and chosen is None:
        page = write_report(artifact)
        typer.echo(str(page))
    elif output is None:
        typer.echo(render(artifact, str(chosen)), nl=False)
        page = None
    else:
        text, page = render(artifact, str(chosen or Form.html)), output
        _write(output, text)
        typer.echo(str(output))
    if open_it and page is not None:
        typer.launch(str(page.resolve()))


def _write(path: Path, text: str) -> None:
    from quantkit.gate.evidence import write_text

    if path.is_dir():
        raise RecipeError("is a folder", where=str(path), next="Name a file: -o FILE")
    try:
        write_text(path, text)
    except OSError as error:
        raise RecipeError(
            f"cannot be written: {error.strerror}", where=str(path), next="Choose another -o FILE"
        ) from None
