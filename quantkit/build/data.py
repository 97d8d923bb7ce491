"""Are data and policy fit for a build? Asked before any weight is read: a bad row must not be found out at the last
stage. Apart from `context`, which every stage imports: what only the gate needs must not be part of their keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.build.context import Outline
from quantkit.errors import RecipeError
from quantkit.gate.data import Conversation, each_conversation, read_conversations, refuse_overlap
from quantkit.gate.policy import load_policy
from quantkit.gate.prompts import read_prompts
from quantkit.gate.rungs import rung_schemes

_FEWEST = 2
"""Held-out conversations below which nothing can be judged."""


def check_data(outline: Outline) -> None:
    """RecipeError (file and row) for a row that is no conversation, a file without any, a prompt that is none, a
    message both calibrated on and judged on, an unfit policy, and a model that has no rung to be compared with."""
    load_policy(outline.policy_name(), outline.loaded.base)
    rung_schemes(outline.program)
    held_out = read_conversations(outline.data_files("gate"))
    prompts = read_prompts(outline.data_files("gate", "prompts"))
    calibrated = 0

    def counted() -> Iterator[Conversation]:
        nonlocal calibrated
        for item in each_conversation(outline.data_files("calibration"), strict=False):
            calibrated += 1
            yield item

    refuse_overlap([*held_out, *(prompt.conversation for prompt in prompts)], counted())
    for section, found, fewest in (("gate", len(held_out), _FEWEST), ("calibration", calibrated, 1)):
        if found < fewest:
            raise RecipeError(
                f"{section}.data holds {found} conversations; at least {fewest} are needed",
                where=outline.loaded.where(section, "data"),
                next="Add conversations, or name another file",
            )
