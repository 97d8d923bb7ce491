"""The report in each of its forms, and all of them beside the artifact's other evidence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from jinja2 import TemplateError

from quantkit.errors import CheckpointError
from quantkit.gate.evidence import FOLDER, write_text
from quantkit.report.gather import gather
from quantkit.report.html import render_html
from quantkit.report.junit import render_junit
from quantkit.report.markdown import render_markdown
from quantkit.report.model import Report

PLACE = Path(FOLDER) / "report"
HTML = "report.html"


def render_json(report: Report) -> str:
    """Everything as JSON; ValueError on NaN or Inf, which JSON has no word for."""
    return json.dumps(report.as_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


FORMS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "html": (HTML, render_html),
    "json": ("report.json", render_json),
    "junit": ("junit.xml", render_junit),
    "markdown": ("report.md", render_markdown),
}
"""Each form's file and what writes it."""


def render(artifact: Path | str, form: str) -> str:
    """The artifact's report in one of FORMS. CheckpointError when artifact or evidence cannot be trusted or read."""
    return _rendered(Path(artifact), gather(artifact), form)


def write_report(artifact: Path | str, gathered: Report | None = None) -> Path:
    """Write every form into `evidence/report/` of the artifact; returns the path of the page.

    Args:
        gathered: what `gather` gave of this artifact, where it has been called already.

    Raises CheckpointError when artifact or evidence cannot be trusted or read.
    """
    folder, report = Path(artifact), gathered or gather(artifact)
    made = {file: _rendered(folder, report, form) for form, (file, _) in FORMS.items()}
    for file, text in made.items():
        write_text(folder / PLACE / file, text)
    return folder / PLACE / HTML


def _rendered(artifact: Path, report: Report, form: str) -> str:
    try:
        return FORMS[form][1](report)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, TemplateError) as error:
        raise CheckpointError(
            f"the evidence is not of the form this version writes ({error})",
            where=str(artifact / FOLDER),
            next="Run quantkit gate",
        ) from error
