"""Which kernel code something was compiled from: a digest that needs no Triton and is the same under all its releases.

Machine code in an artifact may be older than the package that launches it; equal digests say that the arguments and
layouts the two speak of are the same.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = "quantkit_kernels.triton"
_ALSO = frozenset({f"{_PACKAGE}.spec"})
"""Describes kernels and is in none."""


@cache
def source_digest(module: str) -> str:
    """16 hexadecimal digits of the SHA-256 of a kernel's module and of the kernel modules that it imports."""
    found: dict[str, bytes] = {}
    _collect(module, found)
    return hashlib.sha256(b"\0".join(found[name] for name in sorted(found))).hexdigest()[:16]


def _collect(module: str, found: dict[str, bytes]) -> None:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"{module} is no kernel module")
    found[module] = Path(spec.origin).read_bytes()
    for node in ast.walk(ast.parse(found[module])):
        name = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if name.startswith(f"{_PACKAGE}.") and name not in found and name not in _ALSO:
            _collect(name, found)
