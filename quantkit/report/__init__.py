"""One report model, gathered from an artifact and its evidence, shown as one offline HTML file, JSON, JUnit XML or
Markdown."""

from quantkit.report.figures_of_answers import worth_a_look
from quantkit.report.gather import gather
from quantkit.report.html import render_html
from quantkit.report.model import Report
from quantkit.report.write import FORMS, render, write_report

__all__ = ["FORMS", "Report", "gather", "render", "render_html", "worth_a_look", "write_report"]
