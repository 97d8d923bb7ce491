"""Is the data fit for a build? Asked before any weight is read: a bad row must not be found out at the last stage."""

from __future__ import annotations

from quantkit.build.context import Outline
from quantkit.errors import RecipeError
from quantkit.gate.data import read_conversations, refuse_overlap

_FEWEST = 2
"""Held-out conversations below which nothing can be judged."""


def check_data(outline: Outline) -> None:
    """RecipeError (file and row) for a row that is no conversation, a file without any, and a conversation that is
    both calibrated on and judged on."""
    held_out = read_conversations(outline.data_files("gate"))
    calibrated = read_conversations(outline.data_files("calibration"), strict=False)
    for section, found, fewest in (("gate", held_out, _FEWEST), ("calibration", calibrated, 1)):
        if len(found) < fewest:
            raise RecipeError(
                f"{section}.data holds {len(found)} conversations; at least {fewest} are needed",
                where=outline.loaded.where(section, "data"),
                next="Add conversations, or name another file",
            )
    refuse_overlap(held_out, calibrated)
