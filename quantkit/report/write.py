"""Writes the report beside the artifact's other evidence."""

from __future__ import annotations

from pathlib import Path

from jinja2 import TemplateError

from quantkit.errors import CheckpointError
from quantkit.gate.evidence import FOLDER, write_evidence, write_text
from quantkit.report.gather import gather
from quantkit.report.html import render_html

HTML = Path("report") / "report.html"
JSON = Path("report") / "report.json"


def write_report(artifact: Path | str) -> Path:
    """Write `evidence/report/report.html` and `report.json` of the artifact; returns the path of the page.

    Raises CheckpointError when artifact or evidence cannot be trusted or read.
    """
    report = gather(artifact)
    evidence = Path(artifact) / FOLDER
    try:
        page = render_html(report)
    except (LookupError, TypeError, ValueError, TemplateError) as error:
        raise CheckpointError(
            f"the evidence is not of the form this version writes ({error})",
            where=str(evidence),
            next="Run quantkit gate",
        ) from error
    content = report.as_dict()
    digest = content.pop("payload_digest")
    write_evidence(evidence / JSON, digest, content)
    write_text(evidence / HTML, page)
    return evidence / HTML
