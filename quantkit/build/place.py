"""Puts a sealed payload and its evidence where the user asked for, in one step."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.artifact.read import Artifact, open_artifact
from quantkit.build.files import exchange_folders, finish_folder, link_or_copy, write_json
from quantkit.build.stage import EVIDENCE, PAYLOAD
from quantkit.errors import RecipeError
from quantkit.userpath import user_path

_MANIFEST = Path("quantkit") / "manifest.json"
_PEOPLE = "review"
"""Evidence that people made; kept as long as the payload stays the same."""


def check_place(out: Path) -> None:
    """RecipeError unless `out` is absent, an empty folder or an artifact: nothing else is ever overwritten."""
    user_path(str(out), Path(), where="--out")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise RecipeError("is not a folder", where=str(out), next="Choose another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / _MANIFEST).is_file():
        raise RecipeError("holds something that is not an artifact", where=str(out), next="Choose another --out")


def place(packaged: Path, judged: Path, records: Mapping[str, dict[str, Any]], out: Path) -> Artifact:
    """Make `out` hold the payload of stage folder `packaged` and the evidence of `judged`; gives it back opened.

    records: what goes into `evidence/run/`, by file name. An artifact that was there before is replaced once the new
    one is whole; the record that people made about the same payload is carried over.
    """
    check_place(out)
    part = packaged.parent / f".tmp-artifact-{out.name}"
    shutil.rmtree(part, ignore_errors=True)
    for path in sorted(p for p in (packaged / PAYLOAD).rglob("*") if p.is_file()):
        link_or_copy(path, part / path.relative_to(packaged / PAYLOAD))
    shutil.copytree(judged / EVIDENCE, part / EVIDENCE)  # copied: `quantkit gate` may write it anew
    digest = open_artifact(part, check="sizes").payload_digest
    (part / EVIDENCE / "run").mkdir(parents=True, exist_ok=True)
    for name, content in records.items():
        write_json(part / EVIDENCE / "run" / name, {"payload_digest": digest, **content})
    _carry_over(out, part, digest)
    if out.exists():
        aside = part.with_name(f"{part.name}-whole")
        shutil.rmtree(aside, ignore_errors=True)
        finish_folder(part, aside)
        exchange_folders(aside, out)
        shutil.rmtree(aside)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        finish_folder(part, out)
    return open_artifact(out, check="sizes")


def _carry_over(old: Path, new: Path, digest: str) -> None:
    record = old / EVIDENCE / _PEOPLE
    if record.is_dir() and open_artifact(old, check="sizes").payload_digest == digest:
        shutil.copytree(record, new / EVIDENCE / _PEOPLE, dirs_exist_ok=True)
