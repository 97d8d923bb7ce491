"""One report model, gathered from an artifact and its evidence, shown as one offline HTML file or as JSON."""

from quantkit.report.gather import gather
from quantkit.report.html import render_html
from quantkit.report.model import Report
from quantkit.report.write import write_report

__all__ = ["Report", "gather", "render_html", "write_report"]
