"""Evidence: JSON files beside an artifact's payload, each naming the payload digest it judges."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError

FOLDER = "evidence"


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place, flush it to disk and rename it: a kill never leaves half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".part-{path.name}")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def write_evidence(path: Path, payload_digest: str, content: dict[str, Any]) -> None:
    """`content` as JSON with the digest it is about; ValueError on NaN or Inf, which JSON has no word for."""
    body = {"payload_digest": payload_digest, **content}
    write_text(path, json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_evidence(path: Path, payload_digest: str) -> dict[str, Any] | None:
    """The content of an evidence file; None when there is none. CheckpointError when it is about another payload."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"not readable as JSON ({error})", where=str(path), next="Run quantkit gate") from None
    if not isinstance(data, dict) or data.get("payload_digest") != payload_digest:
        raise CheckpointError(
            "this evidence is about another payload", where=str(path), next="Run quantkit gate on this artifact"
        )
    return data
