"""Rows of a data file on this machine, through the `datasets` library; nothing is fetched or reported anywhere."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.errors import PreflightError, RecipeError

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL, Parquet or CSV file in order.

    The library's cache goes to HF_DATASETS_CACHE where that is set, else to a folder that is gone afterwards.
    RecipeError names the file (and the line, for JSON that does not parse); PreflightError a disk that is full.
    """
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise RecipeError("unknown kind of data file", where=str(path), next=f"Known: {', '.join(FORMATS)}")
    if not path.is_file():
        raise RecipeError("there is no such data file", where=str(path), next="Correct the path in the recipe")
    if path.stat().st_size == 0:
        return
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    # The Dataset.from_* readers, unlike load_dataset, send no download count.
    reader = {"json": Dataset.from_json, "parquet": Dataset.from_parquet, "csv": Dataset.from_csv}[kind]
    with tempfile.TemporaryDirectory(prefix="quantkit-datasets-") as scratch:
        cache = os.environ.get("HF_DATASETS_CACHE", scratch)
        try:
            table = reader(str(path), cache_dir=cache, keep_in_memory=True)
        except Exception as error:  # noqa: BLE001 - pyarrow, pandas, zlib, ...: nothing narrower is promised
            cause = error.__cause__ or error
            if isinstance(cause, OSError) and cause.errno:  # the machine's fault, not the file's
                raise PreflightError(
                    f"cannot be read: {cause.strerror}", where=str(path), next=f"Its rows pass through {cache}"
                ) from None
            raise RecipeError(_reason(path, kind, cause), where=str(path), next="Correct the file") from None
        yield from table


def _reason(path: Path, kind: str, cause: BaseException) -> str:
    """Which line of a JSONL file is at fault, or what the library says."""
    if kind == "json":
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"line {number} is not a JSON object"
            except (ValueError, RecursionError) as fault:
                return f"line {number} is not valid JSON ({fault})"
    if not path.read_bytes().strip():
        return "holds no rows"
    return f"cannot be read: {' '.join(str(cause).split())[:200] or type(cause).__name__}"
