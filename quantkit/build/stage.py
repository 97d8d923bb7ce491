"""A stage: declared inputs to files, under a key that says when they are still good."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.build.context import Context, Outline
from quantkit.build.estimate import Cost
from quantkit.build.files import canonical_json
from quantkit.build.progress import Progress
from quantkit.build.sources import source_digest

PAYLOAD = "payload"
"""Subfolder of the package stage: the artifact without evidence."""
EVIDENCE = "evidence"
"""Subfolder of the gate stage: what was found out about the payload."""

Inputs = dict[str, Any]
Facts = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One step of a build.

    name: folder name in the store. title: what the user reads. module: its import graph's source is part of the key.
    needs: stages whose folders `run` reads. inputs: the recipe fields and file digests it reads, as JSON data.
    run: `(context, {need: folder}, folder to fill, progress) -> facts`; what an earlier, killed run left whole in the
    folder may be kept. cost: what that takes, about.
    """

    name: str
    title: str
    module: str
    needs: tuple[str, ...]
    inputs: Callable[[Context], Inputs]
    run: Callable[[Context, Mapping[str, Path], Path, Progress], Facts]
    cost: Callable[[Outline], Cost]


def stage_keys(stages: Sequence[Stage], context: Context) -> dict[str, tuple[str, Inputs]]:
    """`{stage: (key, inputs)}`: sha256 over inputs, upstream keys, the stage's code and the environment."""
    keys: dict[str, tuple[str, Inputs]] = {}
    for stage in stages:
        inputs = {
            "recipe": stage.inputs(context),
            "needs": {need: keys[need][0] for need in stage.needs},
            "code": source_digest(stage.module),
            "environment": context.environment,
        }
        text = canonical_json({"stage": stage.name, **inputs})
        keys[stage.name] = (hashlib.sha256(text.encode()).hexdigest(), inputs)
    return keys
