"""What to judge an artifact by when the command line leaves it open: what its recipe asked for, else the defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.artifact.read import Artifact
from quantkit.calibration.hub import HUB, hub_files
from quantkit.errors import RecipeError
from quantkit.gate.answering import MAX_NEW_TOKENS, MAX_PROMPTS
from quantkit.gate.evidence import FOLDER, read_evidence
from quantkit.resources import resource
from quantkit.userpath import user_path

RUN = Path("run") / "run.json"
_BUILTIN = "builtin:"
_DATA = ("builtin:evals/heldout.jsonl",)
_PROMPTS = ("builtin:evals/prompts.jsonl",)


@dataclass(frozen=True)
class Asked:
    """Source, files and policy. `base`: the recipe's folder, which relative ones start from."""

    source: str
    data: tuple[Path, ...]
    calibration: tuple[Path, ...]
    policy: str
    waiver: str | None
    max_samples: int
    base: Path
    prompts: tuple[Path, ...]
    max_prompts: int
    max_new_tokens: int


def asked_of(
    artifact: Artifact, data: list[str], calibration: list[str], policy: str | None, prompts: list[str]
) -> Asked:
    """What the artifact's run record says, with what the user gave (`data`, ... ) in place of it.

    Paths the user gave are relative to the present folder. RecipeError names a file that isn't there.
    """
    record: Mapping[str, Any] = read_evidence(artifact.folder / FOLDER / RUN, artifact.payload_digest) or {}
    recipe: Mapping[str, Any] = record.get("recipe") or artifact.manifest.recipe
    gate: Mapping[str, Any] = recipe.get("gate") or {}
    here = Path.cwd()
    written = record.get("recipe_file")
    base = Path(written).absolute().parent if isinstance(written, str) else here
    known_data = gate.get("data") or _DATA
    listed = gate.get("prompts")
    known_prompts = listed if isinstance(listed, list) and all(isinstance(text, str) for text in listed) else _PROMPTS
    known_calibration = (recipe.get("calibration") or {}).get("data") or ()
    return Asked(
        source=str(artifact.manifest.source.get("location", "")),
        data=_files(data, here) or _files(known_data, base),
        calibration=_files(calibration, here) or _files(known_calibration, base),
        policy=str(here / policy) if policy and Path(policy).suffix else policy or gate.get("policy") or "standard",
        waiver=(gate.get("review") or {}).get("waive"),
        max_samples=int(gate.get("max_samples") or 64),
        base=base,
        prompts=_files(prompts, here) or _files(known_prompts, base),
        max_prompts=int(gate.get("max_prompts") or MAX_PROMPTS),
        max_new_tokens=int(gate.get("max_new_tokens") or MAX_NEW_TOKENS),
    )


def _files(texts: Sequence[str], base: Path) -> tuple[Path, ...]:
    return tuple(path for text in texts for path in (hub_files(text) if text.startswith(HUB) else (_file(text, base),)))


def _file(text: str, base: Path) -> Path:
    if text.startswith(_BUILTIN):
        return resource(text.removeprefix(_BUILTIN))
    path = user_path(text, base, where="data file")
    if not path.is_file():
        raise RecipeError("no such data file", where=str(path), next="Name it: --data, --prompts or --calibration FILE")
    return path
