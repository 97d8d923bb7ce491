"""Write what gpu-check's tuner found into the package: `python kernels/benchmarks/gpu/keep_tuning.py gpu-check.json`.

Lines of the measured target replace its earlier ones of the same name; other targets stay. Commit the result with the
gpu-check's table; the gates' table of compiled code (`sass_table.py`) does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.compile.targets import TARGETS
from quantkit_kernels.triton import tuned_choices
from quantkit_kernels.triton.tuning import CHOICES

_KEY = re.compile(r"(few|many) W[48]( g\d+)?( asymmetric)?( int8| fp8)? n\d+ k\d+")
"""What `table_key` makes."""
Tables = dict[int, dict[str, dict[str, int]]]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("check", type=Path, help="gpu-check.json")
    options.add_argument("--out", type=Path, default=Path(tuned_choices.__file__))
    given = options.parse_args()
    try:
        sections = json.loads(given.check.read_text(encoding="utf-8"))
        found = measured(next((each["rows"] for each in sections if each["name"] == "tuner"), []))
    except OSError as error:
        return _refuse(f"{given.check}: cannot be read: {error.strerror}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return _refuse(
            f"{given.check}: is no gpu-check.json ({type(error).__name__}: {error}): name what gpu-check wrote"
        )
    if not found:
        return _refuse(f"{given.check}: no tuner section with a right result: run gpu-check --only tuner")
    part = given.out.with_name(f".{given.out.name}.part")
    try:
        part.write_text(module_text(merged(tuned_choices.TABLES, found)), encoding="utf-8")
        part.replace(given.out)
    except OSError as error:
        part.unlink(missing_ok=True)
        return _refuse(f"{given.out}: cannot be written: {error.strerror}")
    print(f"{given.out}: {', '.join(f'sm_{sm}: {len(lines)} lines measured' for sm, lines in found.items())}")
    return 0


def _refuse(line: str) -> int:
    print(f"keep-tuning: {line}", file=sys.stderr)
    return 2


def measured(rows: Sequence[Mapping[str, Any]]) -> Tables:
    """The choices of a tuner section's rows that came out right, {} where the rules were as fast. ValueError: a row of
    another form."""
    found: Tables = {}
    for row in rows:
        choice = row.get("choice")
        if not row.get("ok") or not isinstance(choice, dict):
            continue
        if not set(choice) <= set(CHOICES) or not all(type(value) is int and value > 0 for value in choice.values()):
            raise ValueError(f"{row.get('linear')}: {choice} is no choice of {', '.join(CHOICES)}")
        if not _KEY.fullmatch(str(row["linear"])) or f"sm_{row['sm']}" not in TARGETS:
            raise ValueError(f"{str(row['linear'])[:60]!r} on {row['sm']!r} names no linear of a target")
        found.setdefault(int(row["sm"]), {})[str(row["linear"])] = choice
    return found


def merged(before: Tables, found: Tables) -> Tables:
    """The tables with what was found; a linear that the rules serve as well has no line."""
    every = {sm: {**before.get(sm, {}), **found.get(sm, {})} for sm in sorted({*before, *found})}
    lines = {sm: {key: table[key] for key in sorted(table) if table[key]} for sm, table in every.items()}
    return {sm: table for sm, table in lines.items() if table}


def module_text(tables: Tables) -> str:
    """`tuned_choices.py` with these tables."""
    source = Path(tuned_choices.__file__).read_text(encoding="utf-8")
    head = source[: source.index("TABLES:")]
    body = "".join(
        f"    {sm}: {{\n"
        + "".join(f'        "{key}": {json.dumps(choice)},\n' for key, choice in lines.items())
        + "    },\n"
        for sm, lines in tables.items()
    )
    return f"{head}TABLES: dict[int, dict[str, dict[str, int]]] = " + ("{\n" + body + "}\n" if tables else "{}\n")


if __name__ == "__main__":
    raise SystemExit(main())
