"""What a cubin takes of the machine, read by the tools inside the Triton wheel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from quantkit.errors import PreflightError

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@cache
def tool(name: str) -> Path:
    """Path of `cuobjdump` or `nvdisasm`; PreflightError where Triton or the tool is missing."""
    spec = find_spec("triton")
    path = Path(spec.origin or "").parent / "backends" / "nvidia" / "bin" / name if spec else None
    if path is None or not path.is_file():
        raise PreflightError(f"{name} is missing: it comes with triton", next="pip install triton")
    return path


def dump(cubin: bytes, *options: str) -> str:
    """What cuobjdump says about a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool("cuobjdump")), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resource_usage(cubin: bytes) -> dict[str, int]:
    """`registers` of a thread and `spill_bytes`, the stack and local memory that it needs beyond them."""
    found = _USAGE.search(dump(cubin, "-res-usage"))
    if found is None:
        raise RuntimeError("cuobjdump states no resource usage")
    registers, stack, _, local = (int(number) for number in found.groups())
    return {"registers": registers, "spill_bytes": stack + local}
