"""Compile every kernel for every target and write down what its machine code holds: no GPU is needed.

python kernels/benchmarks/sass_table.py            writes sass_triton_VERSION.json beside itself, shows what moved
python kernels/benchmarks/sass_table.py --check    exits 1 where anything moved
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

from quantkit.compile.cache import cache_folder
from quantkit.compile.gates import CASES, measure, tool_versions
from quantkit.compile.targets import TARGETS

TABLE = Path(__file__).with_name(f"sass_triton_{version('triton')}.json")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="compare only")
    check = options.parse_args().check
    rows = measure(CASES, TARGETS, cache_folder(), len(os.sched_getaffinity(0)), _progress)
    before = json.loads(TABLE.read_text())["rows"] if TABLE.exists() else {}
    moved = [name for name in sorted(rows.keys() | before.keys()) if rows.get(name) != before.get(name)]
    for name in moved:
        print(f"{name}\n  was {json.dumps(before.get(name))}\n  is  {json.dumps(rows.get(name))}")
    if not check:
        TABLE.write_text(_text({"tools": dict(tool_versions()), "rows": rows}))
    return int(check and bool(moved))


def _text(table: dict) -> str:
    """JSON with a line a row, so that a change reads as a change of lines."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in table["rows"].items())
    return f'{{\n "tools": {json.dumps(table["tools"])},\n "rows": {{\n{lines}\n }}\n}}\n'


def _progress(done: int, total: int, what: str) -> None:
    print(f"\r{done}/{total} {what:60}", end="" if done < total else "\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
