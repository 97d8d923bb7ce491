"""The hash of the code a stage runs: every quantkit and quantkit_kernels file its module imports, transitively.

The graph is read from the source (`ast`), so nothing is imported to compute it, and imports inside functions count.
A stage keyed by it is rebuilt when its code changes and only then; a hand-kept version number would go stale.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from functools import cache
from pathlib import Path

_ROOTS = ("quantkit", "quantkit_kernels")
_NATIVE = "quantkit_kernels.cpu"
_NATIVE_SOURCES = (".cpp", ".h", ".inl", ".txt")


@cache
def source_digest(module: str) -> str:
    """sha256 (hex) over the names and contents of the files behind `module`; fixed within a process."""
    seen: dict[str, Path] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        path = _file_of(name)
        if path is None or name in seen:
            continue
        seen[name] = path
        if name not in _ROOTS:  # the top packages import lazily, for users only: they lead everywhere
            pending += _imports(name, path)
    digest = hashlib.sha256()
    for name, path in sorted(seen.items()):
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    if any(name.startswith(_NATIVE) for name in seen):
        for path in sorted(p for p in seen_folder(_NATIVE).rglob("*") if p.suffix in _NATIVE_SOURCES):
            digest.update(f"{path.name}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def seen_folder(package: str) -> Path:
    """The folder of a package of ours."""
    path = _file_of(package)
    if path is None:
        raise ModuleNotFoundError(package)
    return path.parent


@cache
def _root_folder(root: str) -> Path:
    spec = importlib.util.find_spec(root)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(root)
    return Path(spec.origin).parent


def _file_of(name: str) -> Path | None:
    """The file of a module of ours; None for anything else (a function, another package)."""
    root, *rest = name.split(".")
    if root not in _ROOTS:
        return None
    base = _root_folder(root).joinpath(*rest)
    package = base / "__init__.py"
    return package if package.is_file() else next((p for p in (base.with_suffix(".py"),) if p.is_file()), None)


@cache
def _imports(name: str, path: Path) -> tuple[str, ...]:
    """Names that `path` imports, as absolute dotted names, with their parent packages."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    ours = {n for n in found if n.split(".")[0] in _ROOTS}
    return tuple(sorted(ours | {".".join(n.split(".")[:i]) for n in ours for i in range(1, n.count(".") + 1)}))
