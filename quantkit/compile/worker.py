"""A process that compiles kernels for one target: `python -m quantkit.compile.worker < jobs.json`.

Standard input: {"parent", "target", "cache", "jobs": [{"key", "module", "kernel", "facts"}, ...]}. Each kernel is put
into the cache as soon as it is compiled, and its key printed on a line of its own. Dies with process `parent`.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from quantkit.compile.aot import compile_kernel
from quantkit.compile.cache import write_kernel
from quantkit.errors import QuantkitError
from quantkit.parent import die_with


def main() -> int:
    """Compile what standard input asks for; 3 and one line on standard error for what the user can act on."""
    request = json.load(sys.stdin)
    die_with(request["parent"])
    try:
        for job in request["jobs"]:
            spec = next(spec for spec in import_module(job["module"]).SPECS if spec.name == job["kernel"])
            made = compile_kernel(spec, job["facts"], request["target"])
            write_kernel(Path(request["cache"]), job["key"], made.cubin, made.ptx, made.metadata)
            print(job["key"], flush=True)
    except QuantkitError as error:
        print(error.line(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
