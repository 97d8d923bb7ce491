"""Rows of a data file on this machine, one at a time; nothing is fetched or reported anywhere."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.errors import PreflightError, RecipeError

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_LONGEST_LINE = 1 << 26


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL, JSON (one array of objects), Parquet or CSV file in order.

    JSONL is read line by line: rows need not have the same keys, and memory holds one of them. Parquet and CSV pass
    through the `datasets` library into an Arrow file that is read from disk, in HF_DATASETS_CACHE where that is set,
    else in a folder that is gone afterwards; only a JSON array is held whole.

    RecipeError names the file (and the line, for JSON that does not parse); PreflightError a disk that is full.
    """
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise RecipeError("unknown kind of data file", where=str(path), next=f"Known: {', '.join(FORMATS)}")
    if not path.is_file():
        raise RecipeError("there is no such data file", where=str(path), next="Correct the path in the recipe")
    if path.stat().st_size == 0:
        return
    if kind == "json":
        yield from _json_rows(path)
    else:
        yield from _table_rows(path, kind)


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            number = found = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                    if line.lstrip().startswith(b"["):
                        yield from _objects(_parsed(line + file.read(), path, "the array"), path)
                        return
                if len(line) == _LONGEST_LINE:
                    raise _bad(path, f"line {number} is longer than {_LONGEST_LINE >> 20} MiB")
                if line.strip():
                    row = _parsed(line, path, f"line {number}")
                    if not isinstance(row, dict):
                        raise _bad(path, f"line {number} is not a JSON object")
                    found += 1
                    yield row
            if not found:
                raise _bad(path, "holds no rows")
    except OSError as error:
        raise PreflightError(f"cannot be read: {error.strerror}", where=str(path)) from None


def _objects(rows: list[Any], path: Path) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise _bad(path, f"item {number} of the array is not a JSON object")
        yield row


def _parsed(text: bytes, path: Path, what: str) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"{what} is not valid JSON ({error})") from None


def _table_rows(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    # The Dataset.from_* readers, unlike load_dataset, send no download count. Their streaming form leaves Arrow threads
    # behind that abort the process at its end when a reader stops early (apache/arrow 45214).
    reader = {"parquet": Dataset.from_parquet, "csv": Dataset.from_csv}[kind]
    with tempfile.TemporaryDirectory(prefix="quantkit-datasets-") as scratch:
        cache = os.environ.get("HF_DATASETS_CACHE", scratch)
        try:
            table = reader(str(path), cache_dir=cache)
        except Exception as error:  # noqa: BLE001 - pyarrow, pandas, zlib, ...: nothing narrower is promised
            cause = error.__cause__ or error
            if isinstance(cause, OSError) and cause.errno:  # the machine's fault, not the file's
                raise PreflightError(
                    f"cannot be read: {cause.strerror}", where=str(path), next=f"Its rows pass through {cache}"
                ) from None
            reason = " ".join(str(cause).split())[:200] or type(cause).__name__
            raise _bad(path, f"cannot be read: {reason}" if path.read_bytes().strip() else "holds no rows") from None
        yield from table


def _bad(path: Path, what: str) -> RecipeError:
    return RecipeError(what, where=str(path), next="Correct the file")
